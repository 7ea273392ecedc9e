"""Samples that the predict command draws for prompts, and the callback that writes them to a folder."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from lightning_mhla import AttentionConfig
from lightning_mhla.checkpoints.sharded import is_sharded
from lightning_mhla.system.files import to_json, write_json, write_whole
from lightning_mhla.system.folders import run_folder, shown_place
from lightning_mhla.system.listing import is_file_name
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range, check_seed
from lightning_mhla.system.redaction import redacted
from lightning_mhla.system.sharding import fingerprint
from mhla_tasks.captioned.text import TextConfig, read_prompts

SHOWN = 8
"""Maximum number of samples in the overview picture."""

Row = dict[str, Any]


@dataclass(frozen=True)
class PromptRequest:
    """Options of the samples that the predict command draws: prompts, number of samples per prompt, and seed.

    Args:
        prompts: list of prompts, or path of a file or folder with prompts; null for all captions of a built-in data set. In a
            text file, each line is a prompt, optionally preceded by its name and a tab. The prompt files of GenEval (.jsonl)
            and MJHQ-30K (.json) and the folder of DPG-Bench (.txt files) are also accepted. File names of samples begin with
            the name of the prompt. A prompt without a name is used as its own name.
        per_prompt: number of samples for each prompt; VBench expects 5, GenEval and DPG-Bench 4.
        seed: random seed for the noise that sampling starts from; with the same seed, the sample with index i always
            starts from the same noise.

    Raises:
        ValueError: if ``per_prompt`` is below 1, or ``seed`` is out of range.
    """

    prompts: str | list[str] | None = None
    per_prompt: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(least=1, per_prompt=self.per_prompt)
        check_seed(seed=self.seed)


class RequestedSamples:
    """Map-style data set of requests, one for each sample that the predict command generates, in the order of their prompts.

    The samples of one prompt are adjacent. A prompt that is listed twice with the same name is used once.

    Args:
        request: prompts, number of samples per prompt, and seed.
        data_prompts: captions of a built-in data set, used as prompts if ``request.prompts`` is None.
        extension: extension of the files to write, without a dot.

    Raises:
        FileNotFoundError: if the file of prompts does not exist.
        ValueError: if there are no prompts, two prompts have the same name, or a name is not a valid file name.
    """

    def __init__(self, request: PromptRequest, data_prompts: Sequence[str], extension: str) -> None:
        if isinstance(request.prompts, str):
            self.prompts = read_prompts(request.prompts)
        else:
            plain = data_prompts if request.prompts is None else request.prompts
            self.prompts = [(prompt, prompt) for prompt in plain]
        self.prompts = list(dict.fromkeys(self.prompts))  # VBench's list has two of its prompts twice
        if not self.prompts:
            raise ValueError("there are no prompts; name a file of them: --data.prompts.prompts=FILE")
        if len({name for name, _ in self.prompts}) < len(self.prompts):
            raise ValueError("two prompts have the same name, so their files would overwrite each other")
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
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the request for one sample as a dict.

        Returns:
            A dict with ``index``, ``caption`` (the prompt), ``seed``, and ``file`` (name of the file to write, such as
            ``a red three-0.png``).
        """
        name, prompt = self.prompts[index // self.per_prompt]
        file = self._file(name, index % self.per_prompt)
        return {"index": index, "caption": prompt, "file": file, "seed": self.seed}

    def _file(self, name: str, number: int) -> str:
        return f"{name}-{number}.{self.extension}"


class SampleFolder(Callback):
    """Base class of callbacks that write samples to files as soon as they are drawn.

    A subclass sets the class attribute :attr:`kind`, which names the output folder. If it is ``images``, the samples for the
    prompt ``a red three`` are written to ``images/a red three-0.png``, ``images/a red three-1.png`` and so on. The folder
    contains only samples, because tools that score samples expect this layout. The file ``images.jsonl`` beside the folder has
    a line for each sample with its prompt, seed, index and drawing time in seconds. The picture ``images.png`` shows the first
    samples.

    Args:
        folder: path of the folder in which the output folder and the two files are written; None for the log folder. Samples
            that already exist there are not drawn again.
    """

    kind: ClassVar[str]
    """Name of the folder, in the plural: ``videos`` or ``images``."""

    origin: ClassVar[tuple[str, ...]] = (
        "transformer", "attention", "layer_kinds", "cross_attention", "lora", "sampling", "flow", "text", "vae",
    )  # fmt: skip
    """Names of the module's options that the samples depend on."""

    def __init__(self, folder: str | None) -> None:
        self._asked = folder
        self.folder = Path()
        self._shown: list[tuple[str, Tensor]] = []

    @abstractmethod
    def write(self, path: Path, pixels: Tensor, module: Any) -> None:
        """Write one sample to a file.

        Args:
            path: path of the file.
            pixels: image ``[C, H, W]`` or clip ``[F, C, H, W]`` with F frames, uint8 on the CPU.
            module: module that drew the sample.
        """

    @abstractmethod
    def show(self, samples: Sequence[tuple[str, Tensor]], path: Path) -> None:
        """Write an overview picture of several samples.

        Args:
            samples: prompt and pixels of each sample; images ``[C, H, W]`` or clips ``[F, C, H, W]``, uint8.
            path: path of the picture file.
        """

    def describe(self, pixels: Tensor) -> Row:
        """Return a dict with the ``height`` and ``width`` of a sample in pixels, for its line in the JSON Lines file.

        Args:
            pixels: image ``[C, H, W]`` or clip ``[F, C, H, W]`` with F frames, uint8.
        """
        return {"height": pixels.shape[-2], "width": pixels.shape[-1]}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the folder of samples, and check that samples in it were drawn with the current weights and options.

        Raises:
            ValueError: if the weights or the options differ.
        """
        default_folder = run_folder(trainer)
        self.folder = default_folder if self._asked is None else Path(self._asked)
        self._shown = []
        (self.folder / self.kind).mkdir(parents=True, exist_ok=True)  # on every machine: a folder may be local
        self._check_origin(trainer, pl_module)
        trainer.strategy.barrier()

    def _check_origin(self, trainer: Trainer, module: Any) -> None:
        """Check that existing samples were drawn with the current weights and options, and record these for the next check.

        Raises:
            ValueError: if the weights or the options differ. The folder would otherwise mix samples of two models.
        """
        path = self.folder / f"{self.kind}-origin.json"
        # of the weights themselves: last.ckpt, a run folder and an export keep their names when they are written again
        weights = fingerprint(module.network)
        options = {name: module.hparams[name] for name in self.origin if name in module.hparams}
        origin = {"weights": weights, "precision": trainer.precision, **options}
        origin = redacted(json.loads(json.dumps(origin)))
        recorded = json.loads(path.read_text()) if path.exists() else origin
        if "written" in recorded and _same_file(
            recorded, str(trainer.ckpt_path or getattr(module, "pretrained", None))
        ):
            recorded |= {name: origin[name] for name in ("weights", "precision", "lora") if name in origin}
        sampling = type(module.sampling)
        groups: dict[str, type[Any]] = {"attention": AttentionConfig, "sampling": sampling, "text": TextConfig}
        for record in (origin, recorded):  # records of earlier versions have fewer options
            record |= {name: asdict(as_dataclass(groups[name], record[name])) for name in groups if name in record}
        differing = [name for name in origin if recorded.get(name) != origin[name]]
        if differing:
            raise ValueError(
                f"{self.folder / self.kind} holds samples that were drawn with different {', '.join(differing)} (see "
                f"{path.name}); choose a different --model.output"
            )
        if trainer.is_global_zero:
            write_json(path, origin, indent=2)

    def missing(self, rows: list[Row]) -> list[int]:
        """Find the samples whose files do not exist yet.

        Args:
            rows: dict for each requested sample, with ``file``, ``prompt`` and ``index``, and either ``seed`` or, if the sample
                continues a clip, ``video`` (digest of that clip).

        Returns:
            Positions of the missing samples in ``rows``.

        Raises:
            ValueError: if the JSON Lines file of the samples records different values for one of the files, such as a different
                prompt or seed.
        """
        recorded_rows = {row["file"]: row for row in self._lines()}
        for row in rows:
            recorded = recorded_rows.get(row["file"], row)
            if differing := [key for key in row if recorded.get(key) != row[key]]:
                raise ValueError(
                    f"{self.folder / self.kind / row['file']} was drawn for a different {' and '.join(differing)} (see "
                    f"{self.kind}.jsonl); choose a different --model.output"
                )
        exists = [(self.folder / self.kind / row["file"]).exists() for row in rows]
        return [index for index, is_written in enumerate(exists) if not is_written]

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Any], *_: Any
    ) -> None:
        """Write each sample of a batch to its own file, and append a line about it to the JSON Lines file of the samples.

        Args:
            trainer: trainer that runs the predict command.
            pl_module: module that drew the samples.
            outputs: dict with ``pixels``, images ``[n, C, H, W]`` or clips ``[n, F, C, H, W]`` with F frames, uint8; and
                ``rows``, a dict for each sample with its ``file``, ``prompt``, ``index`` and drawing time.
        """
        for pixels, row in zip(outputs["pixels"], outputs["rows"], strict=True):
            pixels = pixels.cpu()
            # The line is written before the file, because `missing` cannot check a file without a line.
            with (self.folder / f"{self.kind}.jsonl").open("a") as stream:
                # a line break first: a stop may have cut the last line
                stream.write("\n" + to_json({**row, **self.describe(pixels)}) + "\n")
            self.write(self.folder / self.kind / row["file"], pixels, pl_module)
            if len(self._shown) < SHOWN:
                self._shown.append((row["prompt"], pixels))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the overview picture, sort the JSON Lines file by sample index, and print the median drawing time per sample.

        The first process does this alone, after all processes have written their samples.
        """
        trainer.strategy.barrier()
        if not trainer.is_global_zero:
            return
        # A stop between line and file leads to a second line for the file, which replaces the first.
        rows = sorted({row["file"]: row for row in self._lines()}.values(), key=lambda row: row["index"])
        write_whole(self.folder / f"{self.kind}.jsonl", "".join(to_json(row) + "\n" for row in rows))
        if self._shown:
            self.show(self._shown, self.folder / f"{self.kind}.png")
        if not rows:
            return
        first, seconds = rows[0], median(row["seconds"] for row in rows)
        place = shown_place(trainer, self.folder / self.kind)
        frames = f"{first['frames']} frames of " if "frames" in first else ""
        Console(soft_wrap=True, highlight=False).print(
            f"{len(rows)} {self.kind} of {frames}{first['height']} x {first['width']} in {place}: "
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
            except ValueError:  # cut by a stop
                continue
        return rows


def _same_file(recorded: Mapping[str, Any], weights: str) -> bool:
    """Return whether existing samples were drawn with the current weights, according to a record of an earlier version.

    Earlier versions of this program identified weights by path and modification time instead of a hash.

    Args:
        recorded: record with ``weights``, the path of the weights, and ``written``, their modification time in nanoseconds,
            which is None if the path is not a checkpoint.
        weights: path of the current weights.
    """
    path = Path(weights)
    written = path.stat().st_mtime_ns if path.is_file() or is_sharded(path) else None
    return recorded["weights"] == redacted(weights) and recorded["written"] == written
