"""Flow matching on straight paths from data to noise (arXiv 2210.02747, 2209.03003)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from torch import Tensor

from lightning_mhla.system.ranges import check_range

FlowTimes = Literal["uniform", "logit_normal"]

TIMESTEPS = 1000
"""Timestep of pure noise in the units that networks receive. Clean data have timestep 0."""


@dataclass(frozen=True)
class FlowConfig:
    """Options of flow matching, in which a network predicts noise minus data at points on straight paths from data to noise.

    Args:
        times: distribution of the timesteps in training, uniform or logit_normal.
        shift: shift of the timesteps toward noise, in training and sampling; 1 for no shift. Wan uses 3 for 480p
            videos.
        caption_dropout: share of training samples whose caption is replaced by an empty one, as classifier-free
            guidance requires.

    Raises:
        ValueError: if ``times`` is unknown, ``shift`` is not positive, or ``caption_dropout`` is not from 0 to below 1.
    """

    times: FlowTimes = "logit_normal"
    shift: float = 3.0
    caption_dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.times not in get_args(FlowTimes):
            raise ValueError(f"flow.times={self.times!r} is not one of {', '.join(get_args(FlowTimes))}")
        check_range("flow.", least=0, below=1, caption_dropout=self.caption_dropout)
        check_range("flow.", above=0, shift=self.shift)


def draw_flow_times(
    times: FlowTimes, shift: float, count: int, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Draw random timesteps at which a flow-matching model is trained.

    Args:
        times: distribution of the timesteps. ``logit_normal`` (mean 0, standard deviation 1) draws timesteps in the middle
            more often than those near the ends (arXiv 2403.03206).
        shift: shift s toward noise, for samples with many pixels; 1 for no shift. It changes the share t of noise in a sample
            to ``s t / (1 + (s - 1) t)`` (arXiv 2403.03206).
        count: number of timesteps.
        generator: random generator on ``device``; None for the global one.
        device: device of the timesteps.

    Returns:
        Timesteps ``[count]`` float32 from 0 (clean data) to 1000 (pure noise).
    """
    share = compute_density_for_timestep_sampling(
        times, count, logit_mean=0.0, logit_std=1.0, device=device, generator=generator
    )
    return TIMESTEPS * shift * share / (1 + (shift - 1) * share)


def flow_point(clean: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Mix clean samples with noise at the given timesteps, and compute the velocities that a network learns to predict.

    Args:
        clean: clean samples ``[B, ...]``.
        noise: standard normal noise with the shape of ``clean``.
        times: timesteps ``[B]`` from 0 (clean data) to 1000 (pure noise).

    Returns:
        Noisy samples, and velocities (noise minus clean samples), both with the shape of ``clean``.
    """
    # [B, 1, ...], to multiply samples of any number of axes
    share = (times / TIMESTEPS).view(-1, *(1,) * (clean.dim() - 1))
    return (1 - share) * clean + share * noise, noise - clean
