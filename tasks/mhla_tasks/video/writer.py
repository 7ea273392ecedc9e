"""Files that predict writes: mp4 clips as VBench wants them, a line for each, and a picture to look at."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from lightning_mhla import AttentionConfig
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.options import as_dataclass
from mhla_tasks.video.clips import write_clip
from mhla_tasks.video.sampling import SamplingConfig
from mhla_tasks.video.strips import draw_strips

SHOWN = 8
"""Clips in the picture, and frames of each."""

ORIGIN = ("transformer", "attention", "layer_kinds", "sampling", "flow", "text", "vae")
"""Options of the module that a clip depends on."""

Row = dict[str, Any]


class ClipWriter(Callback):
    """Writes clips as they are drawn, every process its own.

    ``videos/PROMPT-0.mp4`` and so on, nothing else in that folder: VBench's tool finds them by these names.
    ``videos.jsonl`` has prompt, seed and number of each, and the seconds that it took; ``videos.png`` shows the first.

    Args:
        folder: where; None for the folder of the run. Clips that are there already are not drawn again.
    """

    def __init__(self, folder: str | None) -> None:
        self._asked = folder
        self.folder = Path()
        self._shown: list[tuple[str, Tensor]] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the folder, on every rank."""
        own = run_folder(trainer)
        self.folder = own if self._asked is None else Path(self._asked)
        self._shown = []
        if trainer.is_global_zero:
            (self.folder / "videos").mkdir(parents=True, exist_ok=True)
        self._check_origin(trainer, pl_module)
        trainer.strategy.barrier()

    def _check_origin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write down what the clips are drawn from and how, or compare it with what is there.

        Raises:
            ValueError: when they differ, so that clips of two models would be mixed.
        """
        path = self.folder / "videos-origin.json"
        weights = Path(str(trainer.ckpt_path or getattr(pl_module, "pretrained", None)))
        origin = {
            "weights": str(weights),
            "written": weights.stat().st_mtime_ns if weights.is_file() else None,  # last.ckpt is overwritten
            **{name: pl_module.hparams[name] for name in ORIGIN},
        }
        origin = json.loads(json.dumps(origin))
        before = json.loads(path.read_text()) if path.exists() else origin
        for record in (origin, before):  # an earlier version knew fewer options
            record["attention"] = asdict(as_dataclass(AttentionConfig, record["attention"]))
            record["sampling"] = asdict(as_dataclass(SamplingConfig, record["sampling"]))
        differing = [name for name in origin if before.get(name) != origin[name]]
        if differing:
            raise ValueError(
                f"{self.folder / 'videos'} holds clips of other {', '.join(differing)} (see {path.name}); choose another "
                "--model.init_args.output"
            )
        if trainer.is_global_zero:
            write_whole(path, json.dumps(origin, indent=2) + "\n")

    def missing(self, rows: list[Row]) -> list[int]:
        """Indices of the clips that are not there yet.

        Args:
            rows: ``file``, ``prompt``, ``index`` and ``seed`` of each.

        Raises:
            ValueError: when a clip is there that was drawn for another prompt, or with other noise.
        """
        known = {row["file"]: row for row in self._lines()}
        for row in rows:
            before = known.get(row["file"], row)
            if any(before[key] != row[key] for key in row):
                raise ValueError(
                    f"{self.folder / 'videos' / row['file']} was drawn for another prompt, number or seed (see "
                    "videos.jsonl); choose another --model.init_args.output"
                )
        here = [(self.folder / "videos" / row["file"]).exists() for row in rows]
        return [index for index, found in enumerate(here) if not found]

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Any], *_: Any
    ) -> None:
        """Write the clips of a batch."""
        for frames, row in zip(outputs["frames"], outputs["rows"], strict=True):
            frames = frames.cpu()
            line = {**row, "frames": len(frames), "height": frames.shape[-2], "width": frames.shape[-1]}
            with (self.folder / "videos.jsonl").open("a") as stream:  # a line break first: the last line may be torn
                stream.write("\n" + json.dumps(line) + "\n")
            write_clip(self.folder / "videos" / row["file"], frames, outputs["fps"], outputs["crf"])
            if len(self._shown) < SHOWN:
                self._shown.append((row["prompt"], frames))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what was written and how long a clip took, on the first process."""
        trainer.strategy.barrier()
        if not trainer.is_global_zero:
            return
        rows = sorted({row["file"]: row for row in self._lines()}.values(), key=lambda row: row["index"])
        write_whole(self.folder / "videos.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        if self._shown:
            draw_strips(self._shown, SHOWN).savefig(self.folder / "videos.png", dpi=110)
        if not rows:
            return
        first, seconds = rows[0], median(row["seconds"] for row in rows)
        Console(soft_wrap=True, highlight=False).print(
            f"{len(rows)} clips of {first['frames']} frames of {first['height']} x {first['width']} in "
            f"{self.folder / 'videos'}: {seconds:.2f} s a clip (median), {first['clips_at_once']} at once"
        )

    def _lines(self) -> list[Row]:
        path = self.folder / "videos.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = []
        for line in filter(None, lines):
            try:
                rows.append(json.loads(line))
            except ValueError:  # torn by a stop
                continue
        return rows
