"""Matplotlib figure that shows several images with their captions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS, INCHES, LETTERS = 6, 1.5, 24
"""Number of images in a row, side of an image in inches, and number of letters in a line of a caption."""


def draw_captioned(images: Sequence[tuple[str, Tensor]], title: str = "") -> Figure:
    """Draw a Matplotlib figure of images in rows of six, with a caption above each image.

    Args:
        images: caption and pixels ``[C, H, W]`` uint8 of each image.
        title: title of the figure.
    """
    from matplotlib.figure import Figure  # slow to import, so only when there is something to draw

    columns = min(COLUMNS, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(columns * INCHES, rows * (INCHES + 0.4) + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes:
        axis.axis("off")
    for axis, (caption, pixels) in zip(axes, images, strict=False):
        axis.imshow(pixels.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axis.set_title("\n".join(textwrap.wrap(caption, LETTERS)[:3]), fontsize=7, parse_math=False)
    figure.suptitle(title, fontsize=9, parse_math=False)
    return figure
