"""Strips of sample images: stored with the results of a run, and drawn on the results page with a line for each variant."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from benchmarks.paper.study import Row, by_variant
from lightning_mhla.data.images import open_image

GAP = 2
"""Width of the gap between two images in pixels."""


def strip(images: Tensor) -> str:
    """Encode images ``[N, H, W]``, uint8, side by side as a PNG in base64."""
    spaced = F.pad(images, (0, GAP), value=255)
    buffer = io.BytesIO()
    Image.fromarray(spaced.permute(1, 0, 2).flatten(1)[:, :-GAP].numpy()).save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def draw_strips(rows: list[Row], path: Path) -> None:
    """Write a picture with the sample images of each variant's first seed.

    Args:
        rows: results of the runs, which contain the strips.
        path: path of the picture.
    """
    strips = {name: runs[0]["samples"] for name, runs in by_variant(rows).items()}
    pictures = {name: np.asarray(open_image(base64.b64decode(text))) for name, text in strips.items()}
    height, width = next(iter(pictures.values())).shape
    figure = Figure(figsize=(9, (9 * height / width + 0.25) * len(pictures)), layout="constrained")
    for axis, (name, picture) in zip(
        figure.subplots(len(pictures), squeeze=False)[:, 0], pictures.items(), strict=True
    ):
        axis.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axis.set_title(name, loc="left", fontsize=9, pad=2)
        axis.set_axis_off()
    figure.savefig(path, dpi=150)
