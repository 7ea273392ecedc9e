"""Base class for training generative models, with a fixed timestep and fixed noise for each validation sample."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from lightning_mhla.data.module import ShardSets
from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.generative.images import check_finite
from lightning_mhla.training.module import TrainingModule
from lightning_mhla.training.options import TrainingOptions

log = logging.getLogger(__name__)

VALIDATION_SEED = 0
"""Seed of the noise and timesteps in validation, so that a sample always gets the same ones, on any number of processes."""


def is_fitting(module: LightningModule) -> bool:
    """Return whether a trainer is fitting the module; False for a module without a trainer."""
    try:
        return bool(module.trainer.state.fn == TrainerFn.FITTING)
    except RuntimeError:  # Lightning's error without a trainer
        return False


class GenerativeModule(TrainingModule):
    """Base class of LightningModules that train generative models.

    Subclasses implement :meth:`sample_losses`, which computes a loss for each sample. The validation loss is the mean of these
    losses, with a fixed timestep and fixed noise for each sample.

    Args:
        training: options of the training, such as the optimizer.
    """

    def __init__(self, training: TrainingOptions) -> None:
        super().__init__(training)
        self.val_loss, self.val_samples = MeanMetric(nan_strategy="disable"), SumMetric()

    @abstractmethod
    def sample_losses(self, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """Compute the training loss of each sample, with a timestep and noise drawn from the sample's random generator.

        Args:
            batch: batch of B samples from the data module, by entry name.
            generators: random generators on the CPU, one for each of the B samples.

        Returns:
            Losses ``[B]``.
        """

    def encoding_models(self) -> dict[str, str]:
        """Return the models that encode samples, as a dict from option name, such as ``model.vae``, to folder or hub name.

        The dict is empty if samples are not encoded, as in models that generate pixels.
        """
        return {}

    def on_fit_start(self) -> None:
        """Log a warning if the training data were encoded by models other than those in :meth:`encoding_models`."""
        shards = getattr(getattr(self.trainer, "datamodule", None), "shards", None)
        if isinstance(shards, ShardSets) and self.trainer.is_global_zero:
            shards.compare_models(self.encoding_models())

    def check_samples(self, samples: Tensor) -> None:
        """Check that generated samples are finite. During training, NaN or infinity only causes a warning.

        Args:
            samples: generated samples of any shape.

        Raises:
            ValueError: if a value is NaN or infinite, except in an evaluation during training.
        """
        try:
            check_finite(samples)
        except ValueError as error:
            if not is_fitting(self):
                raise
            log.warning("%s", error)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add the losses of a batch to the mean validation loss, with a fixed timestep and fixed noise for each sample."""
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add the losses of a batch to the mean test loss, with a fixed timestep and fixed noise for each sample."""
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
    """Draw standard normal noise with a separate random generator for each sample.

    Args:
        like: tensor ``[B, ...]`` whose shape, dtype and device the noise gets.
        generators: random generators on the CPU, one for each of the B samples.

    Returns:
        Noise ``[B, ...]``.
    """
    # Drawn on the CPU, so that the noise does not depend on the device.
    return torch.stack([torch.randn(like.shape[1:], generator=generator) for generator in generators]).to(like)
