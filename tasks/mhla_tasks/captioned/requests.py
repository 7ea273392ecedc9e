"""Samples that predict draws for prompts, and the folder that it writes them to."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from lightning_mhla import AttentionConfig
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.listing import is_file_name, shown
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.redaction import redacted
from mhla_tasks.captioned.text import TextConfig, read_prompts

SHOWN = 8
"""Number of samples in the picture."""

ORIGIN = ("transformer", "attention", "layer_kinds", "sampling", "flow", "text", "vae")
"""Options of the module that samples depend on."""

Row = dict[str, Any]


@dataclass(frozen=True)
class PromptRequest:
    """Options of the samples that predict draws.

    Args:
        prompts: text file with a prompt on each line, name<TAB>prompt where files are to be named otherwise; the lists of
            GenEval (.jsonl), MJHQ-30K (.json) and DPG-Bench (a folder of .txt); or a list of prompts; null for all captions
            of the embedded data.
        per_prompt: samples of each prompt; VBench wants 5, GenEval and DPG-Bench 4.
        seed: seed of the noise; sample i always starts from the same.
    """

    prompts: str | list[str] | None = None
    per_prompt: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.per_prompt < 1:
            raise ValueError(f"per_prompt={self.per_prompt} must be at least 1")


class RequestedSamples:
    """Source of the samples that predict draws, all samples of a prompt in a row.

    Args:
        request: see :class:`PromptRequest`.
        known: prompts to take where it names none.
        extension: of the files.

    Raises:
        FileNotFoundError: when there is no such file of prompts.
        ValueError: for no prompts, or such as cannot be file names.
    """

    def __init__(self, request: PromptRequest, known: Sequence[str], extension: str) -> None:
        if isinstance(request.prompts, str):
            self.prompts = read_prompts(request.prompts)
        else:
            plain = known if request.prompts is None else request.prompts
            self.prompts = [(prompt, prompt) for prompt in plain]
        self.prompts = list(dict.fromkeys(self.prompts))  # VBench's list has two of its prompts twice
        if not self.prompts:
            raise ValueError("there are no prompts; name a file of them: --data.prompts.prompts=FILE")
        if len({name for name, _ in self.prompts}) < len(self.prompts):
            raise ValueError("two prompts have one name, so that their files would overwrite each other")
        self.extension = extension
        for name, _ in self.prompts:
            if not name or not is_file_name(self._file(name, request.per_prompt)):
                raise ValueError(
                    f"the prompt {name[:60]!r} cannot be a file name (a slash, a leading dot, or too long); write "
                    "name<TAB>prompt into the file of prompts"
                )
        self.per_prompt, self.seed = request.per_prompt, request.seed
        self.shard_sizes: Sequence[int] = [len(self.prompts) * request.per_prompt]

    def __len__(self) -> int:
        """Number of samples."""
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``index``, ``caption``, ``file`` (its name, ``PROMPT-NUMBER.EXTENSION``) and ``seed``."""
        name, prompt = self.prompts[index // self.per_prompt]
        file = self._file(name, index % self.per_prompt)
        return {"index": index, "caption": prompt, "file": file, "seed": self.seed}

    def _file(self, name: str, number: int) -> str:
        return f"{name}-{number}.{self.extension}"


class SampleFolder(Callback):
    """Write the samples of each process as they are drawn.

    ``KIND/PROMPT-0.EXTENSION`` and so on, nothing else in that folder: tools that score samples find them by these names.
    ``KIND.jsonl`` has prompt, seed and number of each, and the seconds that it took; ``KIND.png`` shows the first.

    Args:
        folder: where; None for the folder of the run. Samples that are there already are not drawn again.
    """

    kind: ClassVar[str]
    """Name of the folder: ``videos`` or ``images``."""

    def __init__(self, folder: str | None) -> None:
        self._asked = folder
        self.folder = Path()
        self._shown: list[tuple[str, Tensor]] = []

    @abstractmethod
    def write(self, path: Path, pixels: Tensor, module: Any) -> None:
        """Write one sample."""

    @abstractmethod
    def show(self, samples: Sequence[tuple[str, Tensor]], path: Path) -> None:
        """Draw a picture of some samples with their prompts."""

    def describe(self, pixels: Tensor) -> Row:
        """Return the size of a sample, for its line."""
        return {"height": pixels.shape[-2], "width": pixels.shape[-1]}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine the folder, on every rank."""
        own = run_folder(trainer)
        self.folder = own if self._asked is None else Path(self._asked)
        self._shown = []
        if trainer.is_global_zero:
            (self.folder / self.kind).mkdir(parents=True, exist_ok=True)
        self._check_origin(trainer, pl_module)
        trainer.strategy.barrier()

    def _check_origin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the weights and options that samples are drawn with, or compare them with an earlier record.

        Raises:
            ValueError: when they differ, so that samples of two models would be mixed.
        """
        path = self.folder / f"{self.kind}-origin.json"
        weights = Path(str(trainer.ckpt_path or getattr(pl_module, "pretrained", None)))
        origin = {
            "weights": str(weights),
            "written": weights.stat().st_mtime_ns if weights.is_file() else None,  # last.ckpt is overwritten
            **{name: pl_module.hparams[name] for name in ORIGIN},
        }
        origin = redacted(json.loads(json.dumps(origin)))
        before = json.loads(path.read_text()) if path.exists() else origin
        sampling = type(getattr(pl_module, "sampling"))  # noqa: B009  # LightningModule does not declare it
        for record in (origin, before):  # an earlier version knew fewer options
            record["attention"] = asdict(as_dataclass(AttentionConfig, record["attention"]))
            record["sampling"] = asdict(as_dataclass(sampling, record["sampling"]))
            record["text"] = asdict(as_dataclass(TextConfig, record["text"]))
        differing = [name for name in origin if before.get(name) != origin[name]]
        if differing:
            raise ValueError(
                f"{self.folder / self.kind} holds samples of other {', '.join(differing)} (see {path.name}); choose another "
                "--model.output"
            )
        if trainer.is_global_zero:
            write_whole(path, json.dumps(origin, indent=2) + "\n")

    def missing(self, rows: list[Row]) -> list[int]:
        """Return the indices of samples that are not written yet.

        Args:
            rows: ``file``, ``prompt``, ``index`` and ``seed`` of each.

        Raises:
            ValueError: when a sample is there that was drawn for another prompt, or with other noise.
        """
        known = {row["file"]: row for row in self._lines()}
        for row in rows:
            before = known.get(row["file"], row)
            if any(before[key] != row[key] for key in row):
                raise ValueError(
                    f"{self.folder / self.kind / row['file']} was drawn for another prompt, number or seed (see "
                    f"{self.kind}.jsonl); choose another --model.output"
                )
        here = [(self.folder / self.kind / row["file"]).exists() for row in rows]
        return [index for index, found in enumerate(here) if not found]

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Any], *_: Any
    ) -> None:
        """Write the samples of a batch."""
        for pixels, row in zip(outputs["pixels"], outputs["rows"], strict=True):
            pixels = pixels.cpu()
            with (self.folder / f"{self.kind}.jsonl").open("a") as stream:  # a line break first: the last may be torn
                stream.write("\n" + json.dumps({**row, **self.describe(pixels)}) + "\n")
            self.write(self.folder / self.kind / row["file"], pixels, pl_module)
            if len(self._shown) < SHOWN:
                self._shown.append((row["prompt"], pixels))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what was written and the time per sample, on the first process."""
        trainer.strategy.barrier()
        if not trainer.is_global_zero:
            return
        rows = sorted({row["file"]: row for row in self._lines()}.values(), key=lambda row: row["index"])
        write_whole(self.folder / f"{self.kind}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        if self._shown:
            self.show(self._shown, self.folder / f"{self.kind}.png")
        if not rows:
            return
        first, seconds = rows[0], median(row["seconds"] for row in rows)
        frames = f"{first['frames']} frames of " if "frames" in first else ""
        Console(soft_wrap=True, highlight=False).print(
            f"{len(rows)} {self.kind} of {frames}{first['height']} x {first['width']} in {shown(self.folder / self.kind)}: "
            f"{seconds:.2f} s each (median), {first.get('at_once', 1)} at once",
            markup=False,
        )

    def _lines(self) -> list[Row]:
        path = self.folder / f"{self.kind}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = []
        for line in filter(None, lines):
            try:
                rows.append(json.loads(line))
            except ValueError:  # torn by a stop
                continue
        return rows
