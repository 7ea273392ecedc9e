"""Learning curves as a picture beside the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lightning_mhla.callbacks.points import MetricPoints, as_lists, draw_curves
from lightning_mhla.system.folders import checkpoint_folder
from lightning_mhla.system.lightning_private import accumulates_gradients

CURVES = "learning_curves.png"
"""Name of the picture in the checkpoint folder."""


class LearningCurves(Callback):
    """Draws every logged metric against the optimiser step: ``learning_curves.png`` in the checkpoint folder.

    Metrics of one name under ``train/`` and ``val/`` share a panel. Points survive a resume.

    Attributes:
        points: the record of the run's metrics; :class:`RunReport` shares it.
    """

    def __init__(self) -> None:
        self.points = MetricPoints()
        self._path: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the points of an earlier fit."""
        if stage == "fit":
            self.points.clear()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the folder, on every rank."""
        self._path = checkpoint_folder(trainer) / CURVES

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note the training metrics every ``log_every_n_steps``."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set when the trainer is made
        if every and trainer.global_step % every == 0 and not accumulates_gradients(trainer):
            self.points.note_logged(trainer, "train/")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the validation metrics, and draw."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self.points.note_logged(trainer, "val/")
            if trainer.is_global_zero:
                self.draw()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the last state."""
        if trainer.is_global_zero:
            self.draw()

    def state_dict(self) -> dict[str, Any]:
        """All points."""
        return as_lists(self.points)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Points so far."""
        self.points.restore(state_dict)

    def draw(self) -> None:
        """Write the picture."""
        if self._path is not None:
            draw_curves(self.points, self._path)
