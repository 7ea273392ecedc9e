"""Files that predict writes for video models: MP4 clips in VBench's layout, a JSON line for each, and an overview picture."""

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
    """Callback that writes each drawn clip to an MP4 file as soon as its batch is complete; see :class:`SampleFolder`."""

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
