"""Options for drawing video clips with a text-to-video model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_mhla.system.ranges import check_range
from mhla_tasks.captioned.sampling import check_sampling

Sampler = Literal["unipc", "euler"]


@dataclass(frozen=True)
class WanSamplingConfig:
    """Options for drawing video clips and writing them to MP4 files.

    Args:
        sampler: unipc (Wan's default) or euler.
        steps: number of sampling steps. Each step evaluates the network once, or twice with guidance.
        guidance: scale of classifier-free guidance (arXiv 2207.12598), at least 1; 1 to sample without guidance.
        frames: number of frames in a clip.
        height: height of the clips in pixels.
        width: width of the clips in pixels.
        fps: frames per second of the MP4 files.
        crf: constant rate factor of x264, from 0 (loses only color resolution) to 51 (lowest quality).
        negative_prompt: prompt from which guidance moves clips away. The default is the empty prompt, which replaces
            dropped captions in training (option caption_dropout).

    Raises:
        ValueError: if a number is out of range.
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
        check_range("sampling.", above=0, fps=self.fps)
        if not 0 <= self.crf <= 51:
            raise ValueError(f"sampling.crf={self.crf} must lie between 0 and 51")

    @property
    def size(self) -> tuple[int, int, int]:
        """Number of frames, and height and width in pixels, of a clip."""
        return self.frames, self.height, self.width
