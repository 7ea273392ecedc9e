"""Flow matching on straight paths from data to noise (arXiv 2210.02747, 2209.03003)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from torch import Tensor

FlowTimes = Literal["uniform", "logit_normal"]

TIMESTEPS = 1000
"""Timestep of pure noise, as networks receive it; data have timestep 0."""


@dataclass(frozen=True)
class FlowConfig:
    """Options of flow matching, where the network predicts noise minus data on straight paths between them.

    Args:
        times: distribution of the timesteps in training, uniform or logit_normal.
        shift: moves timesteps towards noise, in training and sampling; Wan's is 3 for 480 rows.
        caption_dropout: share of samples trained with the empty caption, which guidance needs.
    """

    times: FlowTimes = "logit_normal"
    shift: float = 3.0
    caption_dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.caption_dropout < 1:
            raise ValueError(f"flow.caption_dropout={self.caption_dropout} must be at least 0 and below 1")
        if self.shift <= 0:
            raise ValueError(f"flow.shift={self.shift} must be positive")


def draw_flow_times(
    times: FlowTimes, shift: float, count: int, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Draw timesteps ``[count]`` float32 to train on.

    Args:
        times: distribution of the times; logit_normal (mean 0, deviation 1) prefers the middle (arXiv 2403.03206).
        shift: moves them towards noise, for large samples: ``s t / (1 + (s - 1) t)`` of the share t (same source).
        count: number of samples.
        generator: generator of the device; None for the global one.
        device: where.
    """
    share = compute_density_for_timestep_sampling(
        times, count, logit_mean=0.0, logit_std=1.0, device=device, generator=generator
    )
    return TIMESTEPS * shift * share / (1 + (shift - 1) * share)


def flow_point(clean: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Compute noisy samples at ``times``, and the velocity there, noise minus data.

    Args:
        clean: ``[B, ...]``.
        noise: standard normal, of the shape of ``clean``.
        times: ``[B]``.
    """
    share = (times / TIMESTEPS).view(-1, *(1,) * (clean.dim() - 1))
    return (1 - share) * clean + share * noise, noise - clean
