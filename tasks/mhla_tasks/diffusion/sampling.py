"""Sampling from a class-conditional network with a diffusers scheduler and classifier-free guidance.

The noise of a sample depends only on the seed and on the index of the sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.generative.flow import TIMESTEPS
from lightning_mhla.generative.solvers import check_steps, set_steps
from lightning_mhla.system.ranges import check_range
from mhla_tasks.diffusion.model import DiT
from mhla_tasks.diffusion.process import NoiseProcess, Sampler


@dataclass(frozen=True)
class DiTSamplingConfig:
    """Options for drawing images: sampler, number of steps and guidance.

    Args:
        sampler: name of the sampler. A model trained with the objective ddpm supports ddpm (default), ddim and dpm-solver++. A
            model trained with the objective flow supports euler (default) and dpm-solver++. null for the default.
        steps: number of sampling steps. Each step evaluates the network once; with guidance, the batch has twice the size.
        guidance: scale of classifier-free guidance (arXiv 2207.12598); 1 to sample without guidance.

    Raises:
        ValueError: if ``steps`` is below 1, or ``guidance`` is negative.
    """

    sampler: Sampler | None = None
    steps: int = 250
    guidance: float = 1.0

    def __post_init__(self) -> None:
        check_range(least=1, steps=self.steps)
        check_range(least=0, guidance=self.guidance)


@torch.no_grad()
def draw_samples(
    network: DiT, process: NoiseProcess, config: DiTSamplingConfig, labels: Tensor, indices: Sequence[int], seed: int
) -> Tensor:
    """Draw samples, each of which depends only on the weights, the sampler options, its label, the seed and its index.

    Args:
        network: network in evaluation mode.
        process: noise process that the network was trained on.
        config: sampler options.
        labels: class labels ``[B]`` int64 on the device of the network.
        indices: index of each sample, which determines its noise.
        seed: random seed, the same for all samples.

    Returns:
        Samples ``[B, channels, height, width]`` float32.

    Raises:
        ValueError: if the noise process does not support the sampler options, or a label is out of range.
    """
    check_labels(labels.tolist(), network.num_classes)
    check_sampling(process, config)
    scheduler = process.scheduler(config.sampler or process.samplers[0])
    generators = [sample_generator(seed, index) for index in indices]
    return denoise(network, scheduler, labels, config.steps, config.guidance, generators)


@torch.no_grad()
def denoise(
    network: DiT,
    scheduler: Any,
    labels: Tensor,
    steps: int,
    guidance: float,
    generators: torch.Generator | list[torch.Generator] | None = None,
) -> Tensor:
    """Draw samples of given classes with a diffusers scheduler.

    Args:
        network: network in evaluation mode.
        scheduler: diffusers scheduler for the noise process that the network was trained on.
        labels: class labels ``[B]`` int64 on the device of the network.
        steps: number of sampling steps.
        guidance: scale of classifier-free guidance; 1 to sample without guidance.
        generators: random generator of the noise, or a list with one for each sample; None for the global generator.

    Returns:
        Samples ``[B, channels, height, width]`` float32.
    """
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        # Equal steps from noise to data; diffusers' default grid would end with a step of a thousandth.
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), device=labels.device)
    else:
        set_steps(scheduler, steps, labels.device)
    shape = (len(labels), network.channels, *network.sides)
    x = randn_tensor(shape, generator=generators, device=labels.device, dtype=torch.float32)
    ancestral = isinstance(scheduler, DDPMScheduler)  # the only one that draws noise and takes a learned variance
    noise: dict[str, Any] = {"generator": generators} if ancestral else {}
    for time in scheduler.timesteps:
        predicted = _guided(network, x, time.expand(len(x)), labels, guidance)
        if not ancestral:
            # A learned variance lies in the second half of the channels.
            predicted = predicted[:, : network.channels]
        x = scheduler.step(predicted, time, x, **noise).prev_sample
    return x


def _guided(network: DiT, x: Tensor, times: Tensor, labels: Tensor, guidance: float) -> Tensor:
    """Predict noise or velocity with classifier-free guidance.

    Guidance extrapolates from the prediction without a class to the prediction with the class. A predicted variance is not
    extrapolated, but taken from the prediction with the class.

    Args:
        network: network that predicts noise or velocity.
        x: noisy samples ``[B, C, H, W]`` float32.
        times: timesteps ``[B]``.
        labels: class labels ``[B]``.
        guidance: scale of classifier-free guidance; 1 to return the conditional prediction.

    Returns:
        Prediction ``[B, out_channels, H, W]`` float32.
    """
    if guidance == 1:
        return network(x, times, labels).float()
    # One batch of twice the size; the second half has no class.
    all_labels = torch.cat([labels, torch.full_like(labels, network.num_classes)])
    conditional, unconditional = network(x.repeat(2, 1, 1, 1), times.repeat(2), all_labels).float().chunk(2)
    mean = unconditional[:, : network.channels] + guidance * (conditional - unconditional)[:, : network.channels]
    return torch.cat([mean, conditional[:, network.channels :]], 1)


def check_sampling(process: NoiseProcess, config: DiTSamplingConfig) -> None:
    """Check that a noise process supports the sampler, the number of steps and the guidance scale in sampler options.

    Args:
        process: noise process that the network was trained on.
        config: sampler options.

    Raises:
        ValueError: if an option is not supported; the message says what is supported.
    """
    sampler = config.sampler or process.samplers[0]
    process.check_sampler(sampler)
    minimum = 2 if sampler == "ddpm" else 1
    if not minimum <= config.steps <= TIMESTEPS:
        raise ValueError(f"steps={config.steps} of sampler {sampler!r} must lie between {minimum} and {TIMESTEPS:,}")
    check_steps(process.scheduler(sampler), sampler, config.steps)
    if config.guidance != 1 and not process.config.label_dropout:
        raise ValueError(
            f"guidance={config.guidance} needs a model that was also trained without labels: process.label_dropout above 0"
        )


def check_labels(labels: Iterable[int], num_classes: int) -> None:
    """Check that all class labels lie between 0 and ``num_classes - 1``.

    Args:
        labels: class labels.
        num_classes: number of classes of the network.

    Raises:
        ValueError: if a label is out of range; the message names the first such label.
    """
    for label in labels:
        if not 0 <= label < num_classes:
            raise ValueError(f"class {label} is not one of 0 to {num_classes - 1}")
