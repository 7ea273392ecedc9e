"""Options for drawing images with a text-to-image model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mhla_tasks.captioned.sampling import check_sampling

Sampler = Literal["dpm", "euler"]


@dataclass(frozen=True)
class SanaSamplingConfig:
    """Options for drawing images with a text-to-image model.

    The defaults are those of diffusers' ``SanaPipeline``, except for the size of the images.

    Args:
        sampler: dpm (DPM-Solver++ for flow matching, SANA's default) or euler.
        steps: number of sampling steps. Each step evaluates the network once. With guidance, the batch size is doubled.
        guidance: scale of classifier-free guidance (arXiv 2207.12598), at least 1; 1 to sample without guidance.
        height: height of the images in pixels.
        width: width of the images in pixels.
        negative_prompt: prompt from which guidance moves images away. The default is the empty prompt, which
            replaces dropped captions in training (option caption_dropout).

    Raises:
        ValueError: if a number is out of range.
    """

    sampler: Sampler = "dpm"
    steps: int = 20
    guidance: float = 4.5
    height: int = 512
    width: int = 512
    negative_prompt: str = ""

    def __post_init__(self) -> None:
        check_sampling(self)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        return self.height, self.width
