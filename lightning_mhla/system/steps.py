"""Number of optimizer steps of a run. Gradient accumulation, which may change between epochs, is taken into account."""

from __future__ import annotations

import math

from lightning import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler


def accumulation(trainer: Trainer, epoch: int) -> int:
    """Return the number of batches per optimizer step in an epoch.

    Args:
        trainer: trainer of the run.
        epoch: index of the epoch, from 0.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # the trainer's own list
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return trainer.accumulate_grad_batches


def steps_of_epochs(trainer: Trainer, epochs: float) -> float:
    """Return the number of optimizer steps in the first ``epochs`` epochs of a run; infinite for data without a length.

    The last batch of an epoch completes an optimizer step even if fewer batches were accumulated.

    Args:
        trainer: trainer of the run.
        epochs: number of epochs. A fraction of an epoch counts as that fraction of its steps.
    """
    batches = trainer.num_training_batches if trainer.limit_train_batches else 0  # with a limit of 0 it is not set to 0
    if not math.isfinite(batches):
        return math.inf
    parts, complete = math.modf(epochs)
    steps = [math.ceil(batches / accumulation(trainer, epoch)) for epoch in range(int(complete) + (parts > 0))]
    return sum(steps[: int(complete)]) + (parts * steps[-1] if parts else 0.0)


def steps_of_run(trainer: Trainer) -> float:
    """Return the number of optimizer steps in a complete run; infinite if the run has no end.

    Without ``max_steps``, the run has no end if ``max_epochs`` is not set or if the data has no length.
    Lightning's ``estimated_stepping_batches`` is not used, because it applies the accumulation of the current epoch to all
    epochs.
    """
    limit = math.inf if trainer.max_steps == -1 else float(trainer.max_steps)
    if trainer.max_epochs in (None, -1):
        return limit
    assert trainer.max_epochs is not None
    return min(limit, steps_of_epochs(trainer, max(trainer.max_epochs, 1)))
