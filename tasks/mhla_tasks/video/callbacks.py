"""Clips drawn while a model trains."""

from __future__ import annotations

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_mhla.callbacks import PeriodicEvaluation
from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.data.sampling import kept_random_state
from lightning_mhla.system.folders import run_folder
from mhla_tasks.video.module import VideoDiffusion
from mhla_tasks.video.strips import draw_strips, write_animation


class ClipPictures(PeriodicEvaluation):
    """Draws clips for a few prompts, from the weights that validation uses, as strips of frames and as an animation.

    ``clips-step*.png`` and ``.gif`` go to ``pictures/`` in the log folder, the strips also to TensorBoard. The noise of a
    clip is always the same.

    Args:
        prompts: a clip is drawn for each.
        every_n_steps: optimiser steps between two pictures; null for none on the way.
        at_end: whether the last weights draw one.
        frames: number of frames of a strip.
        seed: seed of the noise.
    """

    def __init__(
        self,
        prompts: list[str],
        every_n_steps: int | None = 1000,
        at_end: bool = True,
        frames: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(every_n_steps, at_end)
        if not prompts:
            raise ValueError("prompts is empty; give at least one")
        self.prompts, self.frames, self.seed = prompts, frames, seed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out now, not hours later, whether clips can be drawn; on the processes that draw, so that others load nothing.

        Raises:
            ValueError: on every process, for what does not fit together.
        """
        module, failed = _checked(pl_module), ""
        if trainer.is_global_zero or shards_weights(trainer):
            try:
                module.check_drawable()
            except (ValueError, FileNotFoundError) as error:
                failed = str(error)
            module.rest()
        failed = trainer.strategy.broadcast(failed)
        if failed:
            raise ValueError(failed)

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw on the first process, or on all where they gather weights from each other; write on the first."""
        module = _checked(pl_module)
        folder, step = run_folder(trainer) / "pictures", trainer.global_step
        if trainer.is_global_zero or shards_weights(trainer):
            with (
                kept_random_state(),
                evaluation_weights(trainer, module),
                trainer.precision_plugin.forward_context(),
            ):
                clips = module.draw(self.prompts, list(range(len(self.prompts))), self.seed)
            module.rest()
        if trainer.is_global_zero:
            figure = draw_strips(list(zip(self.prompts, clips.cpu(), strict=True)), self.frames)
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"clips-step{step:07d}.png", dpi=110)
            write_animation(folder / f"clips-step{step:07d}.gif", clips, module.sampling.fps)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure("clips", figure, step)
        trainer.strategy.barrier()


def _checked(module: LightningModule) -> VideoDiffusion:
    if not isinstance(module, VideoDiffusion):
        raise ValueError(f"ClipPictures draws from a VideoDiffusion, not from a {type(module).__name__}")
    return module
