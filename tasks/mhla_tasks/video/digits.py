"""Clips of moving handwritten digits with captions, from the digits of scikit-learn or MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mhla.data.digits import LOADERS, Name

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Direction of each move, as steps along rows and columns."""


def caption(label: int, move: str) -> str:
    """Return the caption of a clip with a moving digit, such as ``a seven moving right``.

    Args:
        label: the digit, from 0 to 9.
        move: direction in which the digit moves: ``left``, ``right``, ``up`` or ``down``.
    """
    return f"a {NAMES[label]} moving {move}"


def every_caption() -> list[str]:
    """Return forty captions: one for each combination of a digit from zero to nine and one of the four directions."""
    return [caption(label, move) for label in range(len(NAMES)) for move in MOVES]


def render(digit: Tensor, move: str, frames: int, height: int, width: int, generator: torch.Generator | None) -> Tensor:
    """Render a clip of a digit that moves by at most one pixel per frame, and never leaves the canvas.

    Args:
        digit: image of the digit, ``[1, S, S]`` in 0 .. 1.
        move: direction in which the digit moves: ``left``, ``right``, ``up`` or ``down``.
        frames: number of frames in the clip.
        height: height of the canvas in pixels, at least S.
        width: width of the canvas in pixels, at least S.
        generator: random generator for the start position; None for torch's global generator.

    Returns:
        Clip ``[1, frames, height, width]`` float32 in -1 .. 1.
    """
    clip, side = torch.full((1, frames, height, width), -1.0), digit.shape[-1]
    down, right = MOVES[move]
    spaces = (height - side, width - side)
    travel = [min(frames - 1, space) * abs(direction) for space, direction in zip(spaces, (down, right), strict=True)]
    # Before or behind the start, depending on the direction, there is room for the complete distance.
    starts = [
        int(torch.randint(space - distance + 1, (), generator=generator)) + (distance if direction < 0 else 0)
        for space, distance, direction in zip(spaces, travel, (down, right), strict=True)
    ]
    for frame in range(frames):
        progress = frame / max(frames - 1, 1)
        top, left = (
            start + direction * round(distance * progress)
            for start, direction, distance in zip(starts, (down, right), travel, strict=True)
        )
        clip[:, frame, top : top + side, left : left + side] = digit * 2 - 1
    return clip


@cache
def moving_digits(name: Name, train: bool) -> tuple[Tensor, Tensor]:
    """Load the images and labels of the handwritten digits from which clips are rendered.

    Digits of MNIST are scaled from 28 x 28 to 20 x 20 pixels, so that they have room to move. Digits of scikit-learn keep their
    8 x 8 pixels.

    Args:
        name: data set: ``digits`` (scikit-learn) or ``mnist``.
        train: whether to load the training digits instead of the held-out digits.

    Returns:
        Images ``[n, 1, S, S]`` float32 in 0 .. 1, and labels ``[n]`` int64.
    """
    images, labels = LOADERS[name](train)
    if name == "mnist":
        images = F.interpolate(images, (20, 20), mode="bilinear", antialias=True)
    return images, labels


class MovingDigitSamples:
    """Map-style data set of clips with a moving digit: each training digit in four directions, or each held-out digit in one.

    Args:
        train: whether to show the training digits instead of the held-out digits. Training clips get a new random start
            position each time they are read. Clips of held-out digits are always the same.
        frames: number of frames in a clip.
        height: height of the canvas in pixels, at least that of a digit.
        width: width of the canvas in pixels, at least that of a digit.
        name: data set of the digits: ``digits`` (scikit-learn, 8 x 8 pixels) or ``mnist`` (scaled to 20 x 20 pixels).

    Raises:
        ValueError: if a digit does not fit on the canvas, or ``frames`` is below 1.
    """

    def __init__(self, train: bool, frames: int, height: int, width: int, name: Name = "digits") -> None:
        self.images, self.labels = moving_digits(name, train)
        side = self.images.shape[-1]
        if frames < 1 or min(height, width) < side:
            raise ValueError(
                f"clips of {frames} frames of {height} x {width} are too small: a digit needs at least 1 frame and "
                f"{side} x {side} pixels"
            )
        self.train, self.size = train, (frames, height, width)
        self.shard_sizes: Sequence[int] = [len(self.labels) * (len(MOVES) if train else 1)]

    def __len__(self) -> int:
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one clip as a dict with ``video`` ``[1, F, H, W]`` float32 in -1 .. 1, ``caption`` and the given ``index``."""
        digit = index // len(MOVES) if self.train else index
        move = list(MOVES)[index % len(MOVES)]
        generator = None if self.train else torch.Generator().manual_seed(index)
        video = render(self.images[digit], move, *self.size, generator)
        return {"video": video, "caption": caption(int(self.labels[digit]), move), "index": index}
