"""Noise processes of diffusion models: each defines the training loss of the network, and builds the samplers for generation.

``DenoisingProcess`` is DDPM (arXiv 2006.11239) as DiT trains it, with the learned variance of arXiv 2102.09672. ``FlowProcess``
is flow matching on straight paths. Noise schedules and samplers come from diffusers.
"""

# Longer than other modules because both noise processes document the formulas of one interface.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import (
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor
from typing_extensions import override

from lightning_mhla.generative.flow import TIMESTEPS, FlowTimes, draw_flow_times, flow_point
from lightning_mhla.generative.solvers import flow_solver
from lightning_mhla.system.ranges import check_range
from mhla_tasks.diffusion.model import DiT

Sampler = Literal["ddpm", "ddim", "dpm-solver++", "euler"]

BETAS = {"num_train_timesteps": TIMESTEPS, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
"""Arguments of diffusers' schedulers that select DiT's noise schedule."""


@dataclass(frozen=True)
class ProcessConfig:
    """Options of the noise process and the training objective.

    Args:
        objective: ddpm (the network predicts noise, as in DiT) or flow (the network predicts velocity on straight paths).
        learn_sigma: whether the network also predicts the variance of a denoising step; ignored with flow.
        times: distribution of the timesteps in training, uniform or logit_normal; only with flow.
        shift: factor that shifts timesteps toward noise, for samples with many pixels; 1 for no shift. Only with flow.
        label_dropout: share of samples that are trained without their class; guidance requires a share above 0.

    Raises:
        ValueError: if an option is out of range, or ``times`` or ``shift`` is set with the objective ddpm.
    """

    objective: Literal["ddpm", "flow"] = "ddpm"
    learn_sigma: bool = True
    times: FlowTimes = "uniform"
    shift: float = 1.0
    label_dropout: float = 0.1

    def __post_init__(self) -> None:
        check_range(least=0, below=1, label_dropout=self.label_dropout)
        check_range(above=0, shift=self.shift)
        if self.objective == "ddpm" and (self.times != "uniform" or self.shift != 1):
            raise ValueError("times and shift require objective: flow")

    @property
    def learns_sigma(self) -> bool:
        """Whether the network also predicts a variance, which doubles the number of output channels."""
        return self.objective == "ddpm" and self.learn_sigma


class NoiseProcess:
    """Base class of noise processes, which define the training loss and build the samplers.

    A noise process is not an ``nn.Module``, so its noise schedule stays in float32 regardless of the precision of training.

    Args:
        config: options of the process.

    Attributes:
        samplers: names of the supported samplers; the first one is the default.
    """

    samplers: tuple[Sampler, ...] = ()

    def __init__(self, config: ProcessConfig) -> None:
        self.config = config

    def draw_times(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw random timesteps to train on.

        Args:
            count: number of timesteps.
            generator: random generator on ``device``; None for the global generator.
            device: device of the timesteps.

        Returns:
            Timesteps ``[count]`` from 0 (data) to 1000 (noise), int64 or float32 depending on the process.
        """
        raise NotImplementedError

    def losses(self, network: DiT, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Compute the training loss of each sample.

        Args:
            network: network that predicts noise or velocity from noisy samples.
            clean: clean samples ``[B, C, H, W]`` float32.
            noise: standard normal noise with the shape of ``clean``.
            times: timesteps ``[B]`` from :meth:`draw_times`.
            labels: class labels ``[B]``, integers from 0 to K - 1 for K classes; K marks a sample without a class.

        Returns:
            Losses ``[B]`` float32.
        """
        raise NotImplementedError

    def scheduler(self, sampler: Sampler) -> Any:
        """Build the diffusers scheduler that implements a sampler.

        Args:
            sampler: name of the sampler, one of :attr:`samplers`.

        Returns:
            A new scheduler of the diffusers library, such as ``DPMSolverMultistepScheduler``.

        Raises:
            ValueError: if the noise process does not support the sampler.
        """
        raise NotImplementedError

    def check_sampler(self, sampler: str) -> None:
        """Check that the noise process supports a sampler.

        Args:
            sampler: name of the sampler, such as ``"euler"``.

        Raises:
            ValueError: if the sampler is not supported; the message names the supported samplers.
        """
        if sampler not in self.samplers:
            names = ", ".join(self.samplers)
            raise ValueError(f"sampler={sampler!r} does not support objective {self.config.objective!r}; use {names}")

    def drop_labels(self, labels: Tensor, num_classes: int) -> Tensor:
        """Replace each label, with probability ``config.label_dropout``, with the label that marks a sample without a class.

        Args:
            labels: class labels ``[B]``.
            num_classes: number of classes, which is also the label that marks a sample without a class.

        Returns:
            New labels ``[B]``, with the dtype of ``labels``.
        """
        dropped = torch.rand(labels.shape, device=labels.device) < self.config.label_dropout
        return torch.where(dropped, num_classes, labels)


class DenoisingProcess(NoiseProcess):
    """Noise process of DDPM, in which the network predicts the noise and, optionally, the variance of a denoising step.

    The network predicts where the variance lies between its smallest and its largest possible value, on a logarithmic scale.

    Args:
        config: options of the process.
    """

    samplers = ("ddpm", "ddim", "dpm-solver++")

    def __init__(self, config: ProcessConfig) -> None:
        super().__init__(config)
        # alpha_bar is the share of the data in the variance at each timestep.
        self.alpha_bar: Tensor = DDPMScheduler(**BETAS).alphas_cumprod
        alpha_bar = self.alpha_bar.double()
        previous_alpha_bar = torch.cat([alpha_bar.new_ones(1), alpha_bar[:-1]])
        posterior = (1 - previous_alpha_bar) / (1 - alpha_bar) * (1 - alpha_bar / previous_alpha_bar)
        posterior[0] = posterior[1]  # else 0, which has no logarithm
        self.previous_alpha_bar, self.posterior = previous_alpha_bar.float(), posterior.log().float()

    @override
    def draw_times(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw random integer timesteps from 0 to 999 to train on.

        Args:
            count: number of timesteps.
            generator: random generator on ``device``; None for the global generator.
            device: device of the timesteps.

        Returns:
            Timesteps ``[count]`` int64.
        """
        return torch.randint(0, TIMESTEPS, (count,), generator=generator, device=device)

    @override
    def losses(self, network: DiT, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each sample: the mean squared error of the predicted noise, and a term for the variance.

        The second term is the variational bound, with weight 1 as in the original DiT code. It trains only the variance,
        because gradients do not flow through the predicted mean. It is omitted if the network does not predict the variance.

        Args:
            network: network that predicts noise and, optionally, variance from noisy samples.
            clean: clean samples ``[B, C, H, W]`` float32.
            noise: standard normal noise with the shape of ``clean``.
            times: timesteps ``[B]``, integers from 0 to 999.
            labels: class labels ``[B]``, integers from 0 to K - 1 for K classes; K marks a sample without a class.

        Returns:
            Losses ``[B]`` float32.
        """
        (alpha_bar,) = self._at(times, self.alpha_bar)
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
        """Compute, for each sample, the term of the variational bound that belongs to its timestep.

        The bound is equation 5 of arXiv 2006.11239, and the predicted variance is equation 15 of arXiv 2102.09672.

        Args:
            clean: clean samples ``[B, C, H, W]`` float32. The term of timestep 0 treats them as 8-bit pixels scaled to -1 .. 1.
            noisy: noisy samples at ``times``, with the shape of ``clean``.
            predicted: noise that the network predicts, with the shape of ``clean``.
            between: predicted position of the log variance between its limits, with the shape of ``clean``. -1 stands for the
                log variance of the posterior, and 1 for log beta.
            times: timesteps ``[B]``, integers from 0 to 999.

        Returns:
            Terms ``[B]`` float32, in bits per dimension.
        """
        alpha_bar, previous_alpha_bar, posterior = self._at(
            times, self.alpha_bar, self.previous_alpha_bar, self.posterior
        )
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
        """Look up noise schedule tables ``[1000]`` at the timesteps ``times`` ``[B]``; each result is ``[B, 1, 1, 1]``."""
        return [table.to(times.device)[times][:, None, None, None] for table in tables]

    @override
    def scheduler(self, sampler: Sampler) -> Any:
        """Build the diffusers scheduler that implements a sampler.

        The steps of ``ddpm`` and ``dpm-solver++`` are spread evenly over all 1,000 timesteps, as the original DiT code does for
        DDPM. Those of ``ddim`` have diffusers' ``trailing`` spacing. ``ddim`` is built as the first-order DPM-Solver, which is
        the same method (arXiv 2206.00927, section 4.1), because diffusers' own DDIM scheduler takes wrong steps if the number
        of steps does not divide 1,000.

        Args:
            sampler: ``ddpm``, ``ddim`` or ``dpm-solver++``.

        Returns:
            A new ``DDPMScheduler`` for ``ddpm``, otherwise a new ``DPMSolverMultistepScheduler``.

        Raises:
            ValueError: if the sampler is not one of these.
        """
        self.check_sampler(sampler)
        if sampler == "ddim":
            return DPMSolverMultistepScheduler(
                **BETAS, algorithm_type="dpmsolver++", solver_order=1, timestep_spacing="trailing"
            )
        if sampler == "dpm-solver++":
            return DPMSolverMultistepScheduler(**BETAS, algorithm_type="dpmsolver++", timestep_spacing="linspace")
        variance = "learned_range" if self.config.learn_sigma else "fixed_large"
        return DDPMScheduler(**BETAS, variance_type=variance, clip_sample=False, timestep_spacing="linspace")


class FlowProcess(NoiseProcess):
    """Noise process of flow matching, in which the network predicts the velocity (noise minus data).

    Noisy samples lie on the straight line between data and noise.

    Args:
        config: options of the process.
    """

    samplers = ("euler", "dpm-solver++")

    @override
    def draw_times(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw random timesteps between 0 (data) and 1000 (noise) to train on.

        Args:
            count: number of timesteps.
            generator: random generator on ``device``; None for the global generator.
            device: device of the timesteps.

        Returns:
            Timesteps ``[count]`` float32.
        """
        return draw_flow_times(self.config.times, self.config.shift, count, generator, device)

    @override
    def losses(self, network: DiT, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean squared error of the predicted velocity for each sample.

        Args:
            network: network that predicts velocity (noise minus data) from noisy samples.
            clean: clean samples ``[B, C, H, W]`` float32.
            noise: standard normal noise with the shape of ``clean``.
            times: timesteps ``[B]`` from 0 (data) to 1000 (noise).
            labels: class labels ``[B]``, integers from 0 to K - 1 for K classes; K marks a sample without a class.

        Returns:
            Losses ``[B]`` float32.
        """
        noisy, velocity = flow_point(clean, noise, times)
        out = network(noisy, times, labels).float()
        return (out - velocity).square().flatten(1).mean(1)

    @override
    def scheduler(self, sampler: Sampler) -> Any:
        """Build the diffusers scheduler that implements a sampler.

        Args:
            sampler: ``euler``, or ``dpm-solver++``, whose scheduler rounds timesteps to integers.

        Returns:
            A new ``FlowMatchEulerDiscreteScheduler`` for ``euler``, or ``DPMSolverMultistepScheduler`` for ``dpm-solver++``.

        Raises:
            ValueError: if the sampler is not one of these.
        """
        self.check_sampler(sampler)
        if sampler == "euler":
            return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TIMESTEPS, shift=self.config.shift)
        return flow_solver(self.config.shift)


def make_process(config: ProcessConfig) -> NoiseProcess:
    """Build the noise process that a configuration describes."""
    return (DenoisingProcess if config.objective == "ddpm" else FlowProcess)(config)


def _negative_log_likelihood(clean: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Compute the negative log-likelihood, in nats, of each 8-bit pixel value under a discretized normal distribution.

    Args:
        clean: pixel values, scaled from 0 .. 255 to -1 .. 1, float32 of any shape.
        mean: means of the normal distributions, with the shape of ``clean``.
        log_variance: logarithms of their variances, with the shape of ``clean``.

    Returns:
        Negative log-likelihoods with the shape of ``clean``.
    """
    inverse = (-0.5 * log_variance).exp()
    upper = torch.special.ndtr((clean - mean + 1 / 255) * inverse)
    lower = torch.special.ndtr((clean - mean - 1 / 255) * inverse)
    # The darkest and the brightest pixel value take all of the probability beyond them.
    chance = torch.where(clean < -0.999, upper, torch.where(clean > 0.999, 1 - lower, upper - lower))
    return -chance.clamp(min=1e-12).log()
