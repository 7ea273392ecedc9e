"""Training modules of generative models: validation that draws the same times and noise for a sample each time."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.training.compilation import CompileOptions
from lightning_mhla.training.module import TrainingModule
from lightning_mhla.training.optim import OptimizerConfig

VALIDATION_SEED = 0
"""Of the noise and timesteps that validation uses: for each sample the same, each time and on any number of processes."""


class GenerativeModule(TrainingModule):
    """A module whose validation loss is the mean of :meth:`sample_losses`; arguments as for :class:`TrainingModule`."""

    def __init__(
        self, optimizer: OptimizerConfig, ema_decay: float | None, compile_options: CompileOptions | None = None
    ) -> None:
        super().__init__(optimizer, ema_decay, compile_options)
        self.val_loss, self.val_samples = MeanMetric(), SumMetric()

    @abstractmethod
    def sample_losses(self, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """The training loss ``[B]`` of samples, at times and with noise of their own.

        Args:
            batch: batch of the data module.
            generators: generators of the CPU, one for each sample.
        """

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """The training loss, at timesteps and with noise that belong to each sample."""
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """As in validation."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: dict[str, Any], stage: str) -> None:
        valid = batch["valid"]
        generators = [sample_generator(VALIDATION_SEED, int(index)) for index in batch["index"]]
        losses = self.sample_losses(batch, generators)[valid]
        if len(losses):
            self.val_loss.update(losses)
            self.val_samples.update(valid.sum())
        self.log(f"{stage}/loss", self.val_loss, on_epoch=True, prog_bar=True, batch_size=len(valid))
        self.log(f"{stage}/samples", self.val_samples, on_epoch=True, batch_size=len(valid))


def sample_noise(like: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Standard normal noise of the shape, dtype and device of ``like`` ``[B, ...]``, one generator a sample."""
    return torch.stack([torch.randn(like.shape[1:], generator=generator) for generator in generators]).to(like)
