"""Sampler options of clips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mhla_tasks.captioned.sampling import check_sampling

Sampler = Literal["unipc", "euler"]


@dataclass(frozen=True)
class SamplingConfig:
    """Sampler options of clips.

    Args:
        sampler: unipc (Wan's own) or euler.
        steps: evaluations of the network for a clip (twice as many with guidance).
        guidance: scale of classifier-free guidance (arXiv 2207.12598); 1 for none.
        frames: number of frames of a clip.
        height: in pixels.
        width: in pixels.
        fps: frames a second of the files.
        crf: x264's constant rate factor, 0 (no loss but of color resolution) to 51.
        negative_prompt: prompt that guidance leads away from; empty as in training with caption_dropout.
    """

    sampler: Sampler = "unipc"
    steps: int = 50
    guidance: float = 5.0
    frames: int = 81
    height: int = 480
    width: int = 800
    fps: float = 16.0
    crf: float = 15.0
    negative_prompt: str = ""

    def __post_init__(self) -> None:
        check_sampling(self)
        if self.fps <= 0:
            raise ValueError(f"sampling.fps={self.fps} must be above 0")
        if not 0 <= self.crf <= 51:
            raise ValueError(f"sampling.crf={self.crf} must lie between 0 and 51")

    @property
    def size(self) -> tuple[int, int, int]:
        """Frames, height and width of a clip."""
        return self.frames, self.height, self.width
