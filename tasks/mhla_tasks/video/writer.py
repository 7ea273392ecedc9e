"""What predict writes: mp4 files as VBench wants them, a line for each, and a picture to look at."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from lightning_mhla.callbacks.folder import gather_rows, run_folder
from lightning_mhla.files import write_whole
from mhla_tasks.video.clips import write_clip
from mhla_tasks.video.strips import draw_strips

log = logging.getLogger(__name__)

SHOWN = 8
"""Clips in the picture, and frames of each."""


class ClipWriter(Callback):
    """Writes clips as they are drawn, every process its own.

    ``videos/PROMPT-0.mp4`` and so on, nothing else in that folder: VBench's tool finds them by these names.
    ``videos.jsonl`` has prompt, seed and number of each, and the seconds that it took; ``videos.png`` shows the first.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._rows: list[dict[str, Any]] = []
        self._shown: list[tuple[str, Tensor]] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the folder, on every rank."""
        self._folder = run_folder(trainer)
        self._rows, self._shown = [], []
        if trainer.is_global_zero:
            (self._folder / "videos").mkdir(parents=True, exist_ok=True)
        trainer.strategy.barrier()

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Any], *_: Any
    ) -> None:
        """Write the clips of a batch."""
        for frames, row in zip(outputs["frames"].cpu(), outputs["rows"], strict=True):
            write_clip(self._folder / "videos" / row["file"], frames, outputs["fps"])
            self._rows.append({**row, "frames": len(frames), "height": frames.shape[-2], "width": frames.shape[-1]})
            if len(self._shown) < SHOWN:
                self._shown.append((row["prompt"], frames))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what was written and how long a clip took, on the first process."""
        rows = sorted(gather_rows(trainer, self._rows), key=lambda row: row["index"])
        if not trainer.is_global_zero:
            return
        write_whole(self._folder / "videos.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        if self._shown:
            draw_strips(self._shown, SHOWN).savefig(self._folder / "videos.png", dpi=110)
        times = torch.tensor([row["seconds"] for row in rows], dtype=torch.float64)
        first, console = rows[0], Console(soft_wrap=True, highlight=False)
        console.print(
            f"{len(rows)} clips of {first['frames']} frames of {first['height']} x {first['width']} written to "
            f"{self._folder / 'videos'}: {times.mean():.2f} s a clip, {first['clips_at_once']} at once"
        )
