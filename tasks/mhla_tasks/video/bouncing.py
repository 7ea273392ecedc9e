"""Clips of a handwritten digit that bounces off the edges of the canvas. The motion is predictable and never ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource
from lightning_mhla.data.digits import Name
from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.system.ranges import check_range
from mhla_tasks.video.digits import NAMES, moving_digits


def positions(start: int, velocity: int, space: int, frames: int) -> list[int]:
    """Compute the position of a point in each frame, if it moves at constant speed and is reflected at 0 and at ``space``.

    Args:
        start: position in the first frame, from 0 to ``space``.
        velocity: change of the position from frame to frame until the first reflection.
        space: largest position, at least 1.
        frames: number of frames.

    Returns:
        Position in each frame, from 0 to ``space``.
    """
    # On a circle of twice the length, the point moves on without reflections; the second half is the way back.
    unfolded = [(start + velocity * frame) % (2 * space) for frame in range(frames)]
    return [min(position, 2 * space - position) for position in unfolded]


def bounce(digit: Tensor, size: tuple[int, int, int], speed: int, generator: torch.Generator | None) -> Tensor:
    """Render a clip of a digit that moves diagonally and bounces off the edges of the canvas.

    The start position and, along each axis, the direction and a speed from 1 to ``speed`` pixels per frame are random. With a
    random generator in the same state, a longer clip begins with the frames of a shorter one.

    Args:
        digit: image of the digit, ``[1, S, S]`` in 0 .. 1.
        size: number of frames, and height and width of the canvas in pixels. Both sides of the canvas are larger than S.
        speed: largest speed along each axis, in pixels per frame.
        generator: random generator; None for torch's global generator.

    Returns:
        Clip ``[1, F, H, W]`` float32 in -1 .. 1.
    """
    frames, *sides = size
    places = []
    for side in sides:
        space = side - digit.shape[-1]
        start, pace, sign = (int(torch.randint(limit, (), generator=generator)) for limit in (space + 1, speed, 2))
        places.append(positions(start, (pace + 1) * (2 * sign - 1), space, frames))
    clip, edge = torch.full((1, *size), -1.0), digit.shape[-1]
    for frame, (top, left) in enumerate(zip(*places, strict=True)):
        clip[:, frame, top : top + edge, left : left + edge] = digit * 2 - 1
    return clip


class BouncingDigitSamples:
    """Map-style data set of clips with a bouncing digit, one clip for each digit.

    Args:
        train: whether to show the training digits instead of the held-out digits. Training clips get a new random start,
            direction and speed each time they are read. Clips of held-out digits are always the same.
        frames: number of frames in a clip.
        height: height of the canvas in pixels.
        width: width of the canvas in pixels.
        speed: largest speed along each axis, in pixels per frame.
        name: data set of the digits: ``digits`` (scikit-learn, 8 x 8 pixels) or ``mnist`` (scaled to 20 x 20 pixels).
        limit: maximum number of clips; None for one of each digit.

    Raises:
        ValueError: if ``frames``, ``speed`` or ``limit`` is below 1, or a digit has no room to move on the canvas.
    """

    def __init__(
        self,
        train: bool,
        frames: int,
        height: int,
        width: int,
        speed: int = 1,
        name: Name = "digits",
        limit: int | None = None,
    ) -> None:
        self.images, self.labels = moving_digits(name, train)
        side = self.images.shape[-1]
        check_range(least=1, frames=frames, speed=speed, clips=limit)
        if min(height, width) <= side:
            raise ValueError(
                f"a digit of {side} x {side} pixels has no room to move on {height} x {width}; the canvas must be larger"
            )
        self.train, self.size, self.speed = train, (frames, height, width), speed
        self.shard_sizes: Sequence[int] = [min(len(self.labels), limit or len(self.labels))]

    def __len__(self) -> int:
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one clip as a dict with ``video`` ``[1, F, H, W]`` float32 in -1 .. 1, ``caption`` and the given ``index``."""
        generator = None if self.train else sample_generator(0, index)
        video = bounce(self.images[index], self.size, self.speed, generator)
        return {"video": video, "caption": NAMES[int(self.labels[index])], "index": index}


class BouncingDigits(ResumableDataModule):
    """Data module of clips in which a handwritten digit moves diagonally and bounces off the edges of the canvas.

    At speeds up to 2, the first two frames determine the motion, so every frame of a continued clip can be compared with the
    truth.

    Args:
        digits: data set of the digits: digits (scikit-learn, 8 x 8 pixels) or mnist (scaled to 20 x 20 pixels).
        frames: number of frames in a clip. Clips for the predict command are longer if the model draws longer clips.
        height: height of the canvas, in pixels.
        width: width of the canvas, in pixels.
        speed: largest speed of a digit along each axis, in pixels per frame.
        clips: number of held-out clips that the predict command continues.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process; 0 is fastest for clips this small.
        seed: random seed for the order of the clips and for the motion of the digits; null for the seed of seed_everything.
    """

    def __init__(
        self,
        digits: Name = "digits",
        frames: int = 8,
        height: int = 16,
        width: int = 16,
        speed: int = 1,
        clips: int = 16,
        batch_size: int = 16,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        check_range(least=1, frames=frames, height=height, width=width, speed=speed, clips=clips)
        self.save_hyperparameters(ignore=["clips"])
        self.frames, self.clips = frames, clips
        self.canvas = (height, width, speed, digits)

    def held_out(self, frames: int, clips: int | None) -> BouncingDigitSamples:
        """Return the data set of clips of held-out digits. A clip begins with the same frames, whatever ``frames`` is.

        Args:
            frames: number of frames in a clip.
            clips: maximum number of clips; None for one clip of each held-out image of a digit.
        """
        return BouncingDigitSamples(False, frames, *self.canvas, limit=clips)

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "train":
            return BouncingDigitSamples(True, self.frames, *self.canvas)
        if stage != "predict":
            return self.held_out(self.frames, None)
        drawn = getattr(getattr(self.trainer, "lightning_module", None), "sampling", None)
        return self.held_out(max(self.frames, getattr(drawn, "frames", 1)), self.clips)
