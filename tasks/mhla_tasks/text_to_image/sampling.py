"""Options for sampling images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mhla_tasks.captioned.sampling import check_sampling

Sampler = Literal["dpm", "euler"]


@dataclass(frozen=True)
class SanaSamplingConfig:
    """Options for drawing images; the defaults are those of diffusers' ``SanaPipeline``.

    Args:
        sampler: dpm (DPM-Solver++ for flow matching, SANA's default) or euler.
        steps: number of network evaluations per image (twice as many with guidance).
        guidance: scale of classifier-free guidance (arXiv 2207.12598); 1 for none.
        height: height of the images in pixels.
        width: width of the images in pixels.
        negative_prompt: prompt that guidance moves away from; empty for the empty caption, as trained with caption_dropout.
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
