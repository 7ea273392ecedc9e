"""Clips of real handwritten digits that move, with captions: always there, nothing to download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mhla.data.digits import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Rows and columns that a digit moves by."""

SIDE = 8
"""Pixels of a digit's side."""


def caption(label: int, move: str) -> str:
    """Caption of a clip: ``a seven moving right``."""
    return f"a {NAMES[label]} moving {move}"


def every_caption() -> list[str]:
    """All captions that there are: each digit in each direction."""
    return [caption(label, move) for label in range(len(NAMES)) for move in MOVES]


def render(digit: Tensor, move: str, frames: int, height: int, width: int, generator: torch.Generator | None) -> Tensor:
    """A digit that moves by at most one pixel a frame, as far as the canvas has room.

    Args:
        digit: ``[1, 8, 8]`` in 0 .. 1.
        move: left, right, up or down.
        frames: of the clip.
        height: of the canvas, at least 8.
        width: likewise.
        generator: draws where it starts; None for the global one.

    Returns:
        ``[1, frames, height, width]`` float32 in -1 .. 1.
    """
    clip = torch.full((1, frames, height, width), -1.0)
    down, right = MOVES[move]
    rooms = (height - SIDE, width - SIDE)
    travel = [min(frames - 1, room) * abs(way) for room, way in zip(rooms, (down, right), strict=True)]
    starts = [
        int(torch.randint(room - far + 1, (), generator=generator)) + (far if way < 0 else 0)
        for room, far, way in zip(rooms, travel, (down, right), strict=True)
    ]
    for frame in range(frames):
        share = frame / max(frames - 1, 1)
        top, left = (
            start + way * round(far * share) for start, way, far in zip(starts, (down, right), travel, strict=True)
        )
        clip[:, frame, top : top + SIDE, left : left + SIDE] = digit * 2 - 1
    return clip


class MovingDigitSamples:
    """Clips as a source. In training every digit moves in every direction; of those held out each in one.

    Args:
        train: the 1,437 training digits, 5,748 clips, each starting somewhere else every time; or the 360 held out.
        frames: of a clip.
        height: of the canvas, at least 8 pixels.
        width: likewise.

    Raises:
        ValueError: for a canvas on which a digit has no room.
    """

    def __init__(self, train: bool, frames: int, height: int, width: int) -> None:
        if frames < 1 or min(height, width) < SIDE:
            raise ValueError(
                f"clips of {frames} frames of {height} x {width}: at least 1 frame and {SIDE} x {SIDE} pixels for a digit"
            )
        self.images, self.labels = load_digits(train)
        self.train, self.size = train, (frames, height, width)
        self.shard_sizes: Sequence[int] = [len(self.labels) * (len(MOVES) if train else 1)]

    def __len__(self) -> int:
        """Number of clips."""
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``video`` ``[1, F, H, W]`` in -1 .. 1, ``caption`` and ``index``."""
        digit = index // len(MOVES) if self.train else index
        move = list(MOVES)[index % len(MOVES)]
        generator = None if self.train else torch.Generator().manual_seed(index)
        video = render(self.images[digit], move, *self.size, generator)
        return {"video": video, "caption": caption(int(self.labels[digit]), move), "index": index}
