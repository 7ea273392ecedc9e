"""Sampler options of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mhla_tasks.captioned.sampling import check_sampling

Sampler = Literal["dpm", "euler"]


@dataclass(frozen=True)
class SamplingConfig:
    """Sampler options of images; the defaults are SanaPipeline's.

    Args:
        sampler: dpm (flow DPM-Solver++, SANA's own) or euler.
        steps: evaluations of the network for an image (twice as many with guidance).
        guidance: scale of classifier-free guidance (arXiv 2207.12598); 1 for none.
        height: in pixels.
        width: in pixels.
        negative_prompt: prompt that guidance leads away from; empty as in training with caption_dropout.
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
        """Height and width of an image."""
        return self.height, self.width
