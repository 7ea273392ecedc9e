"""Base class of callbacks that draw samples for prompts during training."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
from lightning import LightningModule, Trainer
from torch import Tensor

from lightning_mhla.callbacks import PeriodicEvaluation
from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.data.sampling import kept_random_state
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.ranges import check_seed
from mhla_tasks.captioned.module import CaptionedDiffusion


class DrawnSamples(PeriodicEvaluation):
    """Base class of callbacks that draw a sample for each prompt during training, and then write or score the samples.

    Samples are drawn with the moving average of the weights if training maintains one, otherwise with the current weights.
    The sample for a prompt starts from the same noise in every evaluation, so the sample changes only if the weights
    change. A subclass implements :meth:`keep`, which writes or scores the samples.

    Args:
        prompts: texts to draw samples for, one sample each.
        every_n_steps: number of optimizer steps between two evaluations; None for no evaluations during training.
        at_end: whether to draw samples at the end of training.
        at_start: whether to also draw samples before the first optimizer step.
        seed: random seed for the noise that sampling starts from.

    Raises:
        ValueError: if ``prompts`` is empty, ``every_n_steps`` is below 1, or ``seed`` is out of range.
    """

    module_class: ClassVar[type[CaptionedDiffusion]]
    """Class of the modules that this callback draws from."""

    def __init__(self, prompts: list[str], every_n_steps: int | None, at_end: bool, at_start: bool, seed: int) -> None:
        super().__init__(every_n_steps, at_end)
        if not prompts:
            raise ValueError("prompts is empty; give at least one")
        check_seed(seed=seed)
        self.prompts, self.seed, self.at_start = prompts, seed, at_start

    @abstractmethod
    def keep(self, trainer: Trainer, module: CaptionedDiffusion, samples: Tensor, folder: Path) -> None:
        """Write or score the samples of one evaluation.

        The method runs on the first process only, so it must not call collective operations.

        Args:
            trainer: Lightning trainer that runs the callback.
            module: module that drew the samples.
            samples: drawn samples, uint8 on the CPU, in the order of the prompts: images ``[n, C, H, W]`` or clips
                ``[n, F, C, H, W]`` with F frames.
            folder: log folder of the training run.
        """

    def check(self, module: CaptionedDiffusion) -> None:
        """Load the text encoder and the autoencoder of a module, and check that the module can draw samples.

        Raises:
            ValueError: if an autoencoder is required but not configured, or the module's sampler options are not supported.
            FileNotFoundError: if the text encoder or the autoencoder does not exist.
        """
        module.check_drawable()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before training that the module can draw samples.

        The check runs on the first process only, or on all processes if the weights are sharded. If the check fails on the
        first process, all processes stop.

        Raises:
            ValueError: on every process, if samples cannot be drawn; the message gives the reason.
        """
        module, failed = self._checked(pl_module), ""
        if trainer.is_global_zero or shards_weights(trainer):
            try:
                self.check(module)
            except (ValueError, FileNotFoundError) as error:
                failed = str(error)
            module.rest()
        # If only the first process raised, the others would wait for it in the next collective operation.
        failed = trainer.strategy.broadcast(failed)
        if failed:
            raise ValueError(failed)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw samples with the initial weights if ``at_start`` is true and the run does not resume from a checkpoint."""
        if self.at_start and trainer.global_step == 0:
            self.evaluate(trainer, pl_module)

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw a sample for each prompt, and pass the samples to :meth:`keep` on the first process.

        The samples are drawn on the first process only, or on all processes if the weights are sharded.
        """
        module, samples = self._checked(pl_module), None
        folder = run_folder(trainer)  # a collective, so every process must call it
        if trainer.is_global_zero or shards_weights(trainer):
            # Training continues with the random numbers that it would have without the drawing.
            with kept_random_state(), evaluation_weights(trainer, module), trainer.precision_plugin.forward_context():
                samples = module.draw_prompts(self.prompts, self.seed)
            module.rest()
        if trainer.is_global_zero and samples is not None:
            self.keep(trainer, module, samples, folder)
        trainer.strategy.barrier()

    def _checked(self, module: LightningModule) -> CaptionedDiffusion:
        if not isinstance(module, self.module_class):
            raise ValueError(
                f"{type(self).__name__} draws from a {self.module_class.__name__}, not from a {type(module).__name__}"
            )
        return module
