"""Callback that writes the clips that the predict command draws with a text-to-video model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from mhla_tasks.captioned.requests import SHOWN, Row, SampleFolder
from mhla_tasks.video.clips import write_clip
from mhla_tasks.video.strips import draw_strips


class ClipWriter(SampleFolder):
    """Callback that writes each clip drawn from a model to an MP4 file, as soon as all clips of its batch are complete.

    The files are in the folder ``videos``, with the names that VBench expects. Beside the folder, ``videos.jsonl`` has
    a line for each clip with its prompt, seed, index and drawing time in seconds. The picture ``videos.png`` shows the first
    clips.

    Args:
        folder: path of the folder that receives this output; None for the log folder. Clips that already exist there are not
            drawn again.
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
