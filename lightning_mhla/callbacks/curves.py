"""Callback that draws the learning curves of a run as a picture in the checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lightning_mhla.callbacks.points import MetricPoints, as_lists, draw_curves, matching_steps, separate_stages
from lightning_mhla.system.folders import checkpoint_folder
from lightning_mhla.system.lightning_private import accumulates_gradients

CURVES = "learning_curves.png"
"""Name of the picture in the checkpoint folder."""


class LearningCurves(Callback):
    """Callback that plots the logged metrics against the optimizer step in the picture ``learning_curves.png``.

    The file lies in the folder of the run's checkpoints. Metrics whose names differ only in the prefix, such as ``train/loss``
    and ``val/loss``, share a plot. Every other metric, such as ``val_loss``, has its own plot. Some runs first train each new
    attention layer to match the layer that it replaces. The loss of these steps has its own plot, ``layer_distance``.
    Checkpoints store the recorded values, so a resumed run continues its curves.

    Attributes:
        points: recorded values of each metric with their optimizer steps, shared with :class:`RunReport`.
    """

    def __init__(self) -> None:
        self.points = MetricPoints()
        self._path: Path | None = None
        self._matching_steps = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Discard the metric values that an earlier fit recorded."""
        if stage == "fit":
            self.points.clear()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the path of ``learning_curves.png``. Every process must call this method."""
        self._path = checkpoint_folder(trainer) / CURVES
        self._matching_steps = matching_steps(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record the training metrics every ``log_every_n_steps`` steps."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set when the trainer is made
        if every and trainer.global_step % every == 0 and not accumulates_gradients(trainer):
            self.points.note_training(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation metrics of a fit, and draw the learning curves."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self.points.note_validation(trainer)
            if trainer.is_global_zero:
                self.draw()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the learning curves at the end of training, and write the picture."""
        if trainer.is_global_zero:
            self.draw()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Returns:
            Dict with ``points`` (values of all metrics with their optimizer steps) and ``validation`` (names of the metrics
            that validation has logged).
        """
        return {"points": as_lists(self.points), "validation": sorted(self.points.validation)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the recorded values of all metrics from a checkpoint."""
        points = state_dict.get("points")
        if not isinstance(points, dict):  # a checkpoint of an earlier version holds the points themselves
            points = state_dict
        self.points.restore(points)
        self.points.validation.update(state_dict["validation"] if points is not state_dict else ())

    def draw(self) -> None:
        """Draw the recorded metrics and write the picture. Before training starts, the method does nothing."""
        if self._path is not None:
            draw_curves(separate_stages(self.points, self._matching_steps), self._path)
