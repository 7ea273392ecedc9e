"""Base class of callbacks that evaluate a model every ``n`` optimizer steps and at the end of training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from lightning import Callback, LightningModule, Trainer

from lightning_mhla.callbacks.curves import LearningCurves
from lightning_mhla.callbacks.recovery import RunStopped, is_leaving
from lightning_mhla.callbacks.stalls import StallWatch
from lightning_mhla.system.numbers import plural


@runtime_checkable
class MeasuresSpeed(Protocol):
    """Protocol for callbacks that measure the training speed, and exclude the time of periodic evaluations."""

    def exclude(self, seconds: float) -> None:
        """Exclude the duration of the evaluation that has just ended, in seconds, from the measurement."""


class PeriodicEvaluation(Callback):
    """Base class of callbacks that evaluate the model every ``every_n_steps`` optimizer steps and at the end of training.

    Every process calls :meth:`evaluate`, at most once for each optimizer step. An evaluation runs just before the next step
    begins. By then, the moving average of the weights has been updated, and any checkpoint of the completed step has been
    saved. If the run is stopped during the evaluation and resumes from this checkpoint, it repeats the evaluation.

    Args:
        every_n_steps: number of optimizer steps between two evaluations; None for no evaluations during training.
        at_end: whether to evaluate the final weights at the end of training.

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    def __init__(self, every_n_steps: int | None, at_end: bool) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"every_n_steps={every_n_steps} must be positive, or null for no evaluations during training"
            )
        self.every_n_steps, self.at_end = every_n_steps, at_end
        self._evaluated = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Discard the step of the last evaluation that an earlier fit with this callback recorded."""
        if stage == "fit":
            self._evaluated = -1

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the current weights. Subclasses implement this method, and every process calls it."""
        raise NotImplementedError

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Run the evaluation when the number of completed optimizer steps is a multiple of ``every_n_steps``."""
        if self._is_due(trainer):
            self._once(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the final weights if ``at_end`` is true, or if the last step is a multiple of ``every_n_steps``."""
        if self.at_end or self._is_due(trainer):
            self._once(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Perform the final evaluation if it is due and has not been performed yet.

        This is the case if the run was interrupted during its final evaluation, and then resumed after the end of training.

        Raises:
            RunStopped: if a signal stopped the run at its last step. The exit status of the process then says that the run has
                to be resumed, for its final evaluation.
        """
        if self._is_due(trainer) or (self.at_end and trainer.global_step):
            self._once(trainer, pl_module)
            if trainer.global_step != self._evaluated:
                raise RunStopped

    def _is_due(self, trainer: Trainer) -> bool:
        step = trainer.global_step
        return bool(self.every_n_steps and step and step % self.every_n_steps == 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a dict with ``evaluated``, the optimizer step of the latest evaluation."""
        return {"evaluated": self._evaluated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer step of the latest evaluation, so that the same weights are not evaluated twice."""
        self._evaluated = state_dict["evaluated"]

    def skipped_parts(self, trainer: Trainer) -> list[str]:
        """Return a list with one sentence that says why the run had no evaluation, or an empty list if it had one."""
        if self._evaluated >= 0 or self.at_end:
            return []
        period = "every_n_steps is null"
        if self.every_n_steps is not None:
            steps = plural(trainer.global_step, "step")
            period = f"every_n_steps={self.every_n_steps} is more than the {steps} of the run"
        return [f"No {type(self).__name__}: {period}, and at_end is false."]

    def log_values(self, trainer: Trainer, prefix: str, values: Mapping[str, float]) -> None:
        """Log metrics under a common prefix to every logger, and add them to the curves of :class:`LearningCurves`, if present.

        Args:
            trainer: trainer of the run.
            prefix: text to put before each metric's name, separated from it by a slash.
            values: metric values by name, without the prefix.
        """
        for logger in trainer.loggers:
            logger.log_metrics({f"{prefix}/{name}": value for name, value in values.items()}, trainer.global_step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # the trainer's own list
            if isinstance(callback, LearningCurves):
                for name, value in values.items():
                    callback.points.note(f"{prefix}/{name}", trainer.global_step, value)

    def _once(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._evaluated and not is_leaving(trainer):
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, StallWatch):
                    callback.evaluating()
            start = time.monotonic()
            self.evaluate(trainer, pl_module)
            seconds = time.monotonic() - start
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, MeasuresSpeed):
                    callback.exclude(seconds)
            # Only now: a checkpoint that is saved after a failed evaluation must not say that it was done.
            self._evaluated = trainer.global_step
