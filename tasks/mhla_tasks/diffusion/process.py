"""Noise processes: what the network learns to predict, and how its predictions become samples.

``DenoisingProcess`` is DDPM (arXiv 2006.11239) as DiT trains it, with the learned variance of arXiv 2102.09672;
``FlowProcess`` is flow matching on straight paths. Noise schedules and samplers are diffusers'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor
from typing_extensions import override

from lightning_mhla.generative.flow import TIMESTEPS, FlowTimes, draw_flow_times, flow_point
from mhla_tasks.diffusion.model import DiT

Sampler = Literal["ddpm", "ddim", "dpm-solver++", "euler"]

BETAS = {"num_train_timesteps": TIMESTEPS, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
"""DiT's noise schedule."""


@dataclass(frozen=True)
class ProcessConfig:
    """The noise process and the objective.

    Args:
        objective: ddpm (noise, DiT's own) or flow (velocity on straight paths).
        learn_sigma: whether the network also predicts the variance of a step (ddpm).
        times: distribution of the timesteps in training, uniform or logit_normal (flow).
        shift: moves timesteps towards noise, in training and sampling, for large samples (flow).
        label_dropout: share of samples trained without their class, which guidance needs.
    """

    objective: Literal["ddpm", "flow"] = "ddpm"
    learn_sigma: bool = True
    times: FlowTimes = "uniform"
    shift: float = 1.0
    label_dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.label_dropout < 1:
            raise ValueError(f"label_dropout={self.label_dropout} must be at least 0 and below 1")
        if self.shift <= 0:
            raise ValueError(f"shift={self.shift} must be positive")
        if self.objective == "ddpm" and (self.times != "uniform" or self.shift != 1):
            raise ValueError("times and shift belong to objective: flow")

    @property
    def learns_sigma(self) -> bool:
        """Whether the network has twice the channels."""
        return self.objective == "ddpm" and self.learn_sigma


class NoiseProcess:
    """A way from data to noise and back; no module, so that its tables stay float32 in every precision.

    Args:
        config: see :class:`ProcessConfig`.
    """

    samplers: tuple[Sampler, ...] = ()

    def __init__(self, config: ProcessConfig) -> None:
        self.config = config

    def draw_times(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Timesteps ``[count]`` to train on."""
        raise NotImplementedError

    def losses(self, network: DiT, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Training loss of each sample.

        Args:
            network: predicts from noisy samples.
            clean: ``[B, C, S, S]``.
            noise: standard normal, of the shape of ``clean``.
            times: ``[B]``, see :meth:`draw_times`.
            labels: ``[B]``.

        Returns:
            ``[B]`` float32.
        """
        raise NotImplementedError

    def scheduler(self, sampler: Sampler) -> Any:
        """The diffusers scheduler of a sampler.

        Raises:
            ValueError: if the objective has no such sampler.
        """
        raise NotImplementedError

    def check_sampler(self, sampler: str) -> None:
        """Refuse samplers of the other objective.

        Raises:
            ValueError: naming the existing ones.
        """
        if sampler not in self.samplers:
            names = ", ".join(self.samplers)
            raise ValueError(f"sampler={sampler!r} does not go with objective {self.config.objective!r}; use {names}")

    def drop_labels(self, labels: Tensor, num_classes: int) -> Tensor:
        """``labels`` with a share of them replaced by ``num_classes``, no class."""
        dropped = torch.rand(labels.shape, device=labels.device) < self.config.label_dropout
        return torch.where(dropped, num_classes, labels)


class DenoisingProcess(NoiseProcess):
    """DDPM: predict the noise; with ``learn_sigma`` also where the log variance of a step lies between its bounds."""

    samplers = ("ddpm", "ddim", "dpm-solver++")

    def __init__(self, config: ProcessConfig) -> None:
        super().__init__(config)
        self.kept: Tensor = DDPMScheduler(**BETAS).alphas_cumprod
        kept = self.kept.double()
        before = torch.cat([kept.new_ones(1), kept[:-1]])
        posterior = (1 - before) / (1 - kept) * (1 - kept / before)
        posterior[0] = posterior[1]  # 0 otherwise, without a logarithm
        self.before, self.posterior = before.float(), posterior.log().float()

    @override
    def draw_times(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw integers 0 to 999."""
        return torch.randint(0, TIMESTEPS, (count,), generator=generator, device=device)

    @override
    def losses(self, network: DiT, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the squared error of the noise, plus the variational bound for the variance.

        The bound trains the variance alone, as the mean in it is detached, and is not weighted (DiT's code).
        """
        (kept,) = self._at(times, self.kept)
        noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
        out = network(noisy, times, labels).float()
        if not self.config.learn_sigma:
            return (out - noise).square().flatten(1).mean(1)
        predicted, between = out.chunk(2, dim=1)
        bound = self.variational_bound(clean, noisy, predicted.detach(), between, times)
        return (predicted - noise).square().flatten(1).mean(1) + bound

    def variational_bound(
        self, clean: Tensor, noisy: Tensor, predicted: Tensor, between: Tensor, times: Tensor
    ) -> Tensor:
        """Terms of the variational bound in bits per dimension (arXiv 2006.11239 equation 5, 2102.09672 equation 15).

        Args:
            clean: ``[B, C, S, S]``; pixels of 8 bits scaled to -1 .. 1, for the likelihood at timestep 0.
            noisy: samples of the same shape, at ``times``.
            predicted: the noise that the network predicts, of the same shape.
            between: tensor of the same shape; -1 for the smallest variance (of the posterior), 1 for the largest (beta).
            times: ``[B]`` int.

        Returns:
            ``[B]``.
        """
        kept, before, posterior = self._at(times, self.kept, self.before, self.posterior)
        beta = 1 - kept / before
        to_clean, to_noisy = (x / (1 - kept) for x in (before.sqrt() * beta, (kept / before).sqrt() * (1 - before)))
        guess = (noisy - (1 - kept).sqrt() * predicted) / kept.sqrt()
        mean, target = (to_clean * x + to_noisy * noisy for x in (guess, clean))
        share = (between + 1) / 2
        log_variance = share * beta.log() + (1 - share) * posterior
        ratio = log_variance - posterior
        divergence = 0.5 * (ratio - 1 + (-ratio).exp() + (target - mean).square() * (-log_variance).exp())
        terms = torch.where(
            times[:, None, None, None] == 0, _negative_log_likelihood(clean, mean, log_variance), divergence
        )
        return terms.flatten(1).mean(1) / math.log(2)

    def _at(self, times: Tensor, *tables: Tensor) -> list[Tensor]:
        """Values of tables at ``times``, ``[B, 1, 1, 1]`` on their device."""
        return [table.to(times.device)[times][:, None, None, None] for table in tables]

    @override
    def scheduler(self, sampler: Sampler) -> Any:
        """Build the scheduler; ``ddpm`` spreads timesteps over all 1,000, as DiT's code does.

        ddim wants them equally far apart, down to the last step (``trailing``): diffusers' takes one stride for all.
        """
        self.check_sampler(sampler)
        if sampler == "ddim":
            return DDIMScheduler(**BETAS, clip_sample=False, timestep_spacing="trailing")
        if sampler == "dpm-solver++":
            return DPMSolverMultistepScheduler(**BETAS, algorithm_type="dpmsolver++", timestep_spacing="linspace")
        variance = "learned_range" if self.config.learn_sigma else "fixed_large"
        return DDPMScheduler(**BETAS, variance_type=variance, clip_sample=False, timestep_spacing="linspace")


class FlowProcess(NoiseProcess):
    """Flow matching: predict noise minus data at a point on the straight line between them."""

    samplers = ("euler", "dpm-solver++")

    @override
    def draw_times(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw times from 0, data, to 1000, noise."""
        return draw_flow_times(self.config.times, self.config.shift, count, generator, device)

    @override
    def losses(self, network: DiT, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the squared error of the velocity."""
        noisy, velocity = flow_point(clean, noise, times)
        out = network(noisy, times, labels).float()
        return (out - velocity).square().flatten(1).mean(1)

    @override
    def scheduler(self, sampler: Sampler) -> Any:
        """Build the scheduler; ``dpm-solver++`` rounds the times that the network sees to integers."""
        self.check_sampler(sampler)
        if sampler == "euler":
            return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TIMESTEPS, shift=self.config.shift)
        return DPMSolverMultistepScheduler(
            num_train_timesteps=TIMESTEPS,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=self.config.shift,
        )


def make_process(config: ProcessConfig) -> NoiseProcess:
    """The process of a configuration."""
    return (DenoisingProcess if config.objective == "ddpm" else FlowProcess)(config)


def _negative_log_likelihood(clean: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Of 8-bit pixels scaled to -1 .. 1 under a normal distribution rounded to them, in nats."""
    inverse = (-0.5 * log_variance).exp()
    upper = torch.special.ndtr((clean - mean + 1 / 255) * inverse)
    lower = torch.special.ndtr((clean - mean - 1 / 255) * inverse)
    chance = torch.where(clean < -0.999, upper, torch.where(clean > 0.999, 1 - lower, upper - lower))
    return -chance.clamp(min=1e-12).log()
