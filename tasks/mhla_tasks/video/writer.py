"""Callbacks of the predict command that write drawn and continued clips to files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import mean, median
from typing import Any

from lightning import LightningModule, Trainer
from rich.console import Console
from torch import Tensor
from typing_extensions import override

from lightning_mhla.system.files import write_json
from lightning_mhla.system.numbers import rounded
from mhla_tasks.captioned.requests import SHOWN, Row, SampleFolder
from mhla_tasks.video.clips import write_clip
from mhla_tasks.video.strips import draw_continuations, draw_strips, side_by_side, write_animation


class ClipWriter(SampleFolder):
    """Callback that writes each drawn clip to an MP4 file, as soon as all clips of its batch are complete.

    The files are in the subfolder ``videos``, with the names that VBench expects. Beside this subfolder, ``videos.jsonl`` has a
    line for each clip with its prompt, seed, index and drawing time in seconds. The picture ``videos.png`` shows the first
    eight clips.

    Args:
        folder: path of the folder that contains the subfolder and both files; None for the log folder. Clips that already exist
            there are not drawn again.
    """

    kind = "videos"

    @override
    def write(self, path: Path, pixels: Tensor, module: Any) -> None:
        write_clip(path, pixels, module.sampling.fps, module.sampling.crf)

    @override
    def show(self, samples: Sequence[tuple[str, Tensor]], path: Path) -> None:
        draw_strips(samples, SHOWN).savefig(path, dpi=110)

    @override
    def describe(self, pixels: Tensor) -> Row:
        return {"frames": len(pixels), **super().describe(pixels)}


class ContinuationWriter(ClipWriter):
    """Callback that writes continued clips to MP4 files, and compares them with the clips of the data.

    The files of clips are named by index, such as ``0007.mp4``. In addition to the files of :class:`ClipWriter`, ``videos.gif``
    shows each of the first clips beside the true one, and the rows of ``videos.png`` alternate between true and continued
    clips. ``videos-by-frame.json`` has, among other values for each predicted frame, the mean relative error over the clips
    whose true clip has this frame, the median time per batch in seconds, and the size in bytes of the generation states of a
    clip. The values at the trained length and at each doubling of it are printed.

    Args:
        folder: path of the folder for all of these files; None for the log folder. Clips that already exist there are not drawn
            again.
    """

    origin = ("height", "width", "channels", "frames", "start", "shape", "attention", "layer_kinds", "sampling")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._truth: list[Tensor] = []
        super().on_predict_start(trainer, pl_module)

    @override
    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Any], *rest: Any
    ) -> None:
        self._truth += [clip.cpu() for clip in outputs["truth"][: SHOWN - len(self._truth)]]
        super().on_predict_batch_end(trainer, pl_module, outputs, *rest)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._module: Any = pl_module
        super().on_predict_end(trainer, pl_module)
        rows = self._lines()
        if trainer.is_global_zero and rows:
            self._summarize(rows)

    @override
    def show(self, samples: Sequence[tuple[str, Tensor]], path: Path) -> None:
        module = self._module
        clips = [clip for _, clip in samples]
        draw_continuations(self._truth, clips, module.start, module.frames).savefig(path, dpi=110)
        write_animation(path.with_suffix(".gif"), side_by_side(self._truth, clips), module.sampling.fps)

    def _summarize(self, rows: Sequence[Row]) -> None:
        """Write statistics of each predicted frame to a JSON file, and print them at the trained length and its doublings."""
        start, trained = self._module.start, self._module.frames
        # Videos differ in length, as do clips of an interrupted run that continued with other options. Black frames of a video
        # have no relative error.
        by_clip = zip_longest(*(row["error"] for row in rows))
        compared = [[error for error in frame if error is not None] for frame in by_clip]
        errors = [mean(frame) if frame else math.nan for frame in compared]
        exact = [frame.count(0) for frame in compared]
        by_frame = {
            "first_frame": start + 1,
            "trained_frames": trained,
            "clips": len(rows),
            "at_once": rows[0]["at_once"],
            "error": [round(value, 4) for value in errors],
            "exact": exact,
            "compared": [len(frame) for frame in compared],
            "seconds": [
                round(median(values), 6) for values in zip(*(row["frame_seconds"] for row in rows), strict=True)
            ],
            "state_bytes": rows[0]["state_bytes"],
        }
        write_json(self.folder / f"{self.kind}-by-frame.json", by_frame)
        seconds, sizes, console = by_frame["seconds"], by_frame["state_bytes"], Console(soft_wrap=True, highlight=False)
        length = trained
        while start < length <= start + len(seconds):
            at = length - start - 1
            error = (
                f"error {rounded(errors[at])}, {exact[at]} of {len(compared[at])} clips exact, "
                if at < len(compared)
                else ""
            )
            time = rounded(seconds[at] * 1000)
            console.print(f"frame {length}: {error}{time} ms, states of {sizes[at]:,} bytes", markup=False)
            length *= 2
