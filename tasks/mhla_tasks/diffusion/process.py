"""Noise processes, which define the training loss of the network and the samplers for its predictions.

``DenoisingProcess`` is DDPM (arXiv 2006.11239) as DiT trains it, with the learned variance of arXiv 2102.09672.
``FlowProcess`` is flow matching on straight paths. Noise schedules and samplers come from diffusers.
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
    """Options of the noise process and the training objective.

    Args:
        objective: ddpm (predicts noise, as in DiT) or flow (predicts velocity on straight paths).
        learn_sigma: whether the network also predicts the variance of a step; only with ddpm.
        times: distribution of the timesteps in training, uniform or logit_normal; only with flow.
        shift: factor that shifts timesteps towards noise, in training and sampling, for large samples; only with flow. 1 for no
            shift.
        label_dropout: share of samples trained without their class; guidance requires a share above 0.
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
            raise ValueError("times and shift require objective: flow")

    @property
    def learns_sigma(self) -> bool:
        """Whether the network also predicts a variance, which doubles the number of output channels."""
        return self.objective == "ddpm" and self.learn_sigma


class NoiseProcess:
    """Base class of noise processes, which define the training loss and the samplers.

    A noise process is not an ``nn.Module``, so that its noise schedule stays float32 whatever the precision of training.

    Args:
        config: options of the process.

    Attributes:
        samplers: names of the supported samplers; the first one is the default.
    """

    samplers: tuple[Sampler, ...] = ()

    def __init__(self, config: ProcessConfig) -> None:
        self.config = config

    def draw_times(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw random timesteps ``[count]`` to train on."""
        raise NotImplementedError

    def losses(self, network: DiT, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Compute the training loss of each sample.

        Args:
            network: network that predicts noise or velocity from noisy samples.
            clean: clean samples ``[B, C, S, S]``.
            noise: standard normal noise with the shape of ``clean``.
            times: timesteps ``[B]``, as :meth:`draw_times` draws them.
            labels: classes ``[B]``.

        Returns:
            Losses ``[B]`` float32.
        """
        raise NotImplementedError

    def scheduler(self, sampler: Sampler) -> Any:
        """Build the diffusers scheduler that implements a sampler.

        Raises:
            ValueError: if the objective does not support the sampler.
        """
        raise NotImplementedError

    def check_sampler(self, sampler: str) -> None:
        """Check that the objective supports a sampler.

        Raises:
            ValueError: if the objective does not support the sampler; the message names those that it supports.
        """
        if sampler not in self.samplers:
            names = ", ".join(self.samplers)
            raise ValueError(f"sampler={sampler!r} does not support objective {self.config.objective!r}; use {names}")

    def drop_labels(self, labels: Tensor, num_classes: int) -> Tensor:
        """Replace each label with probability ``label_dropout`` by ``num_classes``, the label that stands for no class."""
        dropped = torch.rand(labels.shape, device=labels.device) < self.config.label_dropout
        return torch.where(dropped, num_classes, labels)


class DenoisingProcess(NoiseProcess):
    """Noise process of DDPM, whose network predicts the noise and, with ``learn_sigma``, the variance of a step.

    The predicted variance interpolates, on a logarithmic scale, between the smallest and the largest possible variance.
    """

    samplers = ("ddpm", "ddim", "dpm-solver++")

    def __init__(self, config: ProcessConfig) -> None:
        super().__init__(config)
        # alpha_bar is the share of the data in the variance at each timestep. self.kept and self.before store both tables.
        self.kept: Tensor = DDPMScheduler(**BETAS).alphas_cumprod
        alpha_bar = self.kept.double()
        previous_alpha_bar = torch.cat([alpha_bar.new_ones(1), alpha_bar[:-1]])
        posterior = (1 - previous_alpha_bar) / (1 - alpha_bar) * (1 - alpha_bar / previous_alpha_bar)
        posterior[0] = posterior[1]  # else 0, which has no logarithm
        self.before, self.posterior = previous_alpha_bar.float(), posterior.log().float()

    @override
    def draw_times(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw random timesteps ``[count]``, integers from 0 to 999."""
        return torch.randint(0, TIMESTEPS, (count,), generator=generator, device=device)

    @override
    def losses(self, network: DiT, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each sample: mean squared error of the noise, plus a variational bound if variance is learned.

        As in DiT's code, the bound is not weighted. It trains only the variance, because gradients do not flow through the
        predicted mean.
        """
        (alpha_bar,) = self._at(times, self.kept)
        noisy = alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise
        out = network(noisy, times, labels).float()
        if not self.config.learn_sigma:
            return (out - noise).square().flatten(1).mean(1)
        predicted, between = out.chunk(2, dim=1)
        bound = self.variational_bound(clean, noisy, predicted.detach(), between, times)
        return (predicted - noise).square().flatten(1).mean(1) + bound

    def variational_bound(
        self, clean: Tensor, noisy: Tensor, predicted: Tensor, between: Tensor, times: Tensor
    ) -> Tensor:
        """Compute the term of the variational bound for the timestep of each sample.

        See equation 5 of arXiv 2006.11239 for the bound, and equation 15 of arXiv 2102.09672 for the predicted variance.

        Args:
            clean: clean samples ``[B, C, S, S]``. The term of timestep 0 assumes 8-bit pixels, scaled to -1 .. 1.
            noisy: noisy samples at ``times``, with the shape of ``clean``.
            predicted: noise that the network predicts, with the shape of ``clean``.
            between: predicted log variance, with the shape of ``clean``, as a position between its smallest value (-1, the log
                variance of the posterior) and its largest value (1, log beta).
            times: timesteps ``[B]`` int.

        Returns:
            Terms ``[B]``, in bits per dimension.
        """
        alpha_bar, previous_alpha_bar, posterior = self._at(times, self.kept, self.before, self.posterior)
        beta = 1 - alpha_bar / previous_alpha_bar
        # The posterior mean is a linear combination of the clean and the noisy sample (arXiv 2006.11239, equation 7).
        to_clean = previous_alpha_bar.sqrt() * beta / (1 - alpha_bar)
        to_noisy = (alpha_bar / previous_alpha_bar).sqrt() * (1 - previous_alpha_bar) / (1 - alpha_bar)
        guess = (noisy - (1 - alpha_bar).sqrt() * predicted) / alpha_bar.sqrt()
        mean, target = (to_clean * x + to_noisy * noisy for x in (guess, clean))
        share = (between + 1) / 2
        log_variance = share * beta.log() + (1 - share) * posterior
        ratio = log_variance - posterior
        # KL divergence of two normal distributions: the posterior, and the step that the network predicts.
        divergence = 0.5 * (ratio - 1 + (-ratio).exp() + (target - mean).square() * (-log_variance).exp())
        terms = torch.where(
            times[:, None, None, None] == 0, _negative_log_likelihood(clean, mean, log_variance), divergence
        )
        return terms.flatten(1).mean(1) / math.log(2)

    def _at(self, times: Tensor, *tables: Tensor) -> list[Tensor]:
        """Return the values of noise schedule tables ``[1000]`` at ``times`` ``[B]``, each as ``[B, 1, 1, 1]``."""
        return [table.to(times.device)[times][:, None, None, None] for table in tables]

    @override
    def scheduler(self, sampler: Sampler) -> Any:
        """Build the diffusers scheduler that implements a sampler.

        ``ddpm`` spreads its timesteps evenly over all 1,000, as DiT's code does. ``ddim`` uses diffusers' ``trailing`` spacing,
        because diffusers' DDIM assumes the same stride for all steps.
        """
        self.check_sampler(sampler)
        if sampler == "ddim":
            return DDIMScheduler(**BETAS, clip_sample=False, timestep_spacing="trailing")
        if sampler == "dpm-solver++":
            return DPMSolverMultistepScheduler(**BETAS, algorithm_type="dpmsolver++", timestep_spacing="linspace")
        variance = "learned_range" if self.config.learn_sigma else "fixed_large"
        return DDPMScheduler(**BETAS, variance_type=variance, clip_sample=False, timestep_spacing="linspace")


class FlowProcess(NoiseProcess):
    """Noise process of flow matching: the network predicts noise minus data at points on the line between the two."""

    samplers = ("euler", "dpm-solver++")

    @override
    def draw_times(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw random timesteps ``[count]`` between 0 (data) and 1000 (noise)."""
        return draw_flow_times(self.config.times, self.config.shift, count, generator, device)

    @override
    def losses(self, network: DiT, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean squared error of the predicted velocity of each sample, ``[B]``."""
        noisy, velocity = flow_point(clean, noise, times)
        out = network(noisy, times, labels).float()
        return (out - velocity).square().flatten(1).mean(1)

    @override
    def scheduler(self, sampler: Sampler) -> Any:
        """Build the diffusers scheduler of a sampler. The scheduler of ``dpm-solver++`` rounds timesteps to integers."""
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
    """Build the noise process that a configuration describes."""
    return (DenoisingProcess if config.objective == "ddpm" else FlowProcess)(config)


def _negative_log_likelihood(clean: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Compute the negative log-likelihood in nats of 8-bit pixels, scaled to -1 .. 1, under a discretized normal density."""
    inverse = (-0.5 * log_variance).exp()
    upper = torch.special.ndtr((clean - mean + 1 / 255) * inverse)
    lower = torch.special.ndtr((clean - mean - 1 / 255) * inverse)
    # The darkest and the brightest pixel value take all of the probability beyond them.
    chance = torch.where(clean < -0.999, upper, torch.where(clean > 0.999, 1 - lower, upper - lower))
    return -chance.clamp(min=1e-12).log()
