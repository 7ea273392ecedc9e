"""Callback that writes the images that a text-to-image model draws in the predict command."""

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
    """Callback that writes each drawn image to a PNG file in the subfolder ``images`` as soon as its batch is complete.

    Beside this subfolder, ``images.jsonl`` has a line for each image with its prompt, seed, index and drawing time in seconds.
    The picture ``images.png`` shows the first eight images.

    Args:
        folder: path of the folder that contains the subfolder and both files; None for the log folder. Images that already
            exist there are not drawn again.
    """

    kind = "images"

    @override
    def write(self, path: Path, pixels: Tensor, module: Any) -> None:
        with written_whole(path) as aside:
            Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy()).save(aside, format="PNG")

    @override
    def show(self, samples: Sequence[tuple[str, Tensor]], path: Path) -> None:
        draw_captioned(samples).savefig(path, dpi=110)
