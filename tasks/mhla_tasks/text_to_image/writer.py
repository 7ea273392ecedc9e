"""Files that predict writes for text-to-image models: PNG images, a JSON line for each, and an overview picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from typing_extensions import override

from lightning_mhla.system.files import written_whole
from mhla_tasks.captioned.requests import SampleFolder
from mhla_tasks.text_to_image.pictures import draw_captioned


class ImageWriter(SampleFolder):
    """Callback that writes each drawn image to a PNG file as soon as its batch is complete; see :class:`SampleFolder`."""

    kind = "images"

    @override
    def write(self, path: Path, pixels: Tensor, module: Any) -> None:
        with written_whole(path) as aside:
            Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy()).save(aside, format="PNG")

    @override
    def show(self, samples: Sequence[tuple[str, Tensor]], path: Path) -> None:
        draw_captioned(samples).savefig(path, dpi=110)
