"""Reading of prompts from a file, options for generating continuations, and writing of the continuations to a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from transformers import GenerationConfig

from lightning_mhla.data.lines import has_surrogates
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.folders import gather_rows, run_folder, shown_place
from lightning_mhla.system.ranges import check_range
from mhla_tasks.language.columns import read_column, table_kind
from mhla_tasks.language.dialogues import Document

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationOptions:
    """Options for generating continuations of prompts.

    Args:
        max_new_tokens: maximum number of tokens in a continuation.
        temperature: temperature of sampling; 0 takes the most likely token each time.
        top_k: number of most likely tokens to sample from; 0 for all.
        top_p: total probability of the most likely tokens to sample from; 1 for all.
        beams: number of beams of beam search; more than 1 requires temperature 0.
        control_tokens: whether the spelling of a control token in a prompt, such as <|im_start|>, becomes that token, as in
            prompts made by a chat template; false leaves it as text.

    Raises:
        ValueError: if an option is out of range, or if beam search is combined with sampling.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    beams: int = 1
    control_tokens: bool = False

    def __post_init__(self) -> None:
        check_range(least=1, max_new_tokens=self.max_new_tokens, beams=self.beams)
        check_range(least=0, temperature=self.temperature, top_k=self.top_k)
        check_range(least=0, most=1, top_p=self.top_p)
        if self.beams > 1 and self.temperature:
            raise ValueError(f"beams={self.beams} does not sample: set temperature: 0")

    def for_generate(self) -> dict[str, Any]:
        """Return the generation options as keyword arguments of transformers' ``generate``."""
        return {"max_new_tokens": self.max_new_tokens, **self.sampling()}

    def sampling(self) -> dict[str, Any]:
        """Return the options that determine the choice of tokens, as keyword arguments of transformers' ``generate``.

        The options ``max_new_tokens`` and ``control_tokens`` are left out.
        """
        if not self.temperature:
            return {"num_beams": self.beams, "do_sample": False}
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {"num_beams": self.beams, "do_sample": True, **sampling}


def sampling_options(saved: GenerationConfig, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Combine the sampling options that the user sets with the generation settings that were saved with a model.

    Options that the user sets take precedence. The saved settings are ignored if their ``do_sample`` is None. Otherwise they
    have the same effect as in transformers' ``generate``, except that a ``top_k`` or ``top_p`` that the user sets
    turns on sampling.

    Args:
        saved: generation settings of the model.
        requested: options that the user sets, by name; None for those that are not set.

    Returns:
        Keyword arguments of :class:`GenerationOptions`. Options that are left out keep their defaults in this class.
    """
    overrides = {name: value for name, value in requested.items() if value is not None}
    if saved.do_sample:
        values = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # those of transformers
        values |= {name: value for name in values if (value := getattr(saved, name)) is not None}
        return {**values, **overrides}
    if saved.do_sample is False and not {"top_k", "top_p"} & overrides.keys():  # these are of use only for sampling
        return {"temperature": 0.0, **overrides}
    return overrides


class PromptFile:
    """Data set of the prompts in a file: its lines, or the column ``prompt`` if it is a table. Blank lines are skipped.

    Args:
        path: path of a text file or a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` table, which may be compressed.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if a row has no prompt, or the file is not text or has no prompts; the message names the file and the line.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file; give one with a prompt on each line")
        rows = read_column(path, "prompt", table_kind(path) or "lines")
        self.prompts = [_checked_prompt(prompt, place) for place, prompt in rows]
        if not self.prompts:
            raise ValueError(f"{path} holds no prompts")
        self.shard_sizes: Sequence[int] = [len(self.prompts)]

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a dict with the text of a prompt, ``prompt``, and its position among the prompts of the file, ``index``."""
        return {"prompt": self.prompts[index], "index": index}


def _checked_prompt(prompt: Document | None, place: str) -> str:
    if not isinstance(prompt, str | None):
        raise ValueError(f"{place} is a dialogue, not text; write the prompt as the chat template renders it")
    if not prompt:
        raise ValueError(f"{place} has an empty prompt")
    if has_surrogates(prompt):
        raise ValueError(
            f"{place}: the prompt has half of a surrogate pair: {prompt[:60]!r}; write the character itself"
        )
    return prompt


class ContinuationFile(Callback):
    """Callback of the predict command that writes each prompt and its continuation to a file in the log folder.

    The file ``continuations.jsonl`` has one JSON object for each prompt, with the keys ``prompt`` and ``continuation``, in the
    order of the prompt file.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, str, str]] = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: list[tuple[int, str, str]], *_: Any
    ) -> None:
        """Keep the prompts and continuations of a batch in memory until prediction ends.

        Args:
            trainer: ignored.
            pl_module: ignored.
            outputs: tuples of the prompt's index in the prompt file, the prompt, and its continuation.
        """
        self._rows += outputs

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the continuations of all processes, and write them to ``continuations.jsonl`` on the first process."""
        rows, path = gather_rows(trainer, self._rows), run_folder(trainer) / "continuations.jsonl"
        self._rows = []
        if not trainer.is_global_zero:
            return
        lines = (
            json.dumps({"prompt": prompt, "continuation": continuation}, ensure_ascii=False)
            for _, prompt, continuation in sorted(rows)
        )
        write_whole(path, "".join(f"{line}\n" for line in lines))
        log.info("%d continuations written to %s", len(rows), shown_place(trainer, path))
