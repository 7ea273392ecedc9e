"""Samples of a few prompts, drawn while a model trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_mhla.callbacks import PeriodicEvaluation
from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.data.sampling import kept_random_state
from lightning_mhla.generative.captioned import CaptionedDiffusion
from lightning_mhla.system.folders import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PromptedSamples(PeriodicEvaluation):
    """Draws a sample for each prompt, from the weights that validation uses; its noise is always the same.

    The first process draws, or all of them where they gather weights from each other.

    Args:
        prompts: a sample is drawn for each.
        every_n_steps: optimiser steps between two evaluations; None for none on the way.
        at_end: whether the last weights draw.
        at_start: whether the first weights draw: right after replacing, of a pretrained model.
        seed: seed of the noise.
    """

    draws_from: ClassVar[type[CaptionedDiffusion]]

    def __init__(
        self, prompts: list[str], every_n_steps: int | None, at_end: bool, at_start: bool = False, seed: int = 0
    ) -> None:
        super().__init__(every_n_steps, at_end)
        if not prompts:
            raise ValueError("prompts is empty; give at least one")
        self.prompts, self.seed, self.at_start = prompts, seed, at_start

    def keep(self, trainer: Trainer, module: CaptionedDiffusion, pixels: Tensor) -> None:
        """Write or score samples ``[n, ...]`` uint8, on the first process."""
        raise NotImplementedError

    def check(self, module: CaptionedDiffusion) -> None:
        """Load what is needed; ValueError or FileNotFoundError for what does not fit together or is not there."""
        module.check_drawable()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out now, not hours later, whether samples can be drawn; on the processes that draw, so that others load nothing.

        Raises:
            ValueError: on every process, for what does not fit together.
        """
        module, failed = self._checked(pl_module), ""
        if trainer.is_global_zero or shards_weights(trainer):
            try:
                self.check(module)
            except (ValueError, FileNotFoundError) as error:
                failed = str(error)
            module.rest()
        failed = trainer.strategy.broadcast(failed)
        if failed:
            raise ValueError(failed)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw from the first weights, if that is wanted."""
        if self.at_start and trainer.global_step == 0:
            self.evaluate(trainer, pl_module)

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw; keep on the first process."""
        module, pixels = self._checked(pl_module), None
        if trainer.is_global_zero or shards_weights(trainer):
            with kept_random_state(), evaluation_weights(trainer, module), trainer.precision_plugin.forward_context():
                pixels = module.draw_prompts(self.prompts, self.seed)
            module.rest()
        if trainer.is_global_zero and pixels is not None:
            self.keep(trainer, module, pixels)
        trainer.strategy.barrier()

    def _checked(self, module: LightningModule) -> CaptionedDiffusion:
        if not isinstance(module, self.draws_from):
            kind, name = type(self).__name__, self.draws_from.__name__
            raise ValueError(f"{kind} draws from a {name}, not from a {type(module).__name__}")
        return module


def save_figure(trainer: Trainer, figure: Figure, name: str) -> str:
    """Write a figure to ``pictures/NAME-stepN.png`` in the log folder and to TensorBoard; the path without its ending."""
    folder, step = run_folder(trainer) / "pictures", trainer.global_step
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-step{step:07d}"
    figure.savefig(f"{path}.png", dpi=110)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, step)
    return str(path)
