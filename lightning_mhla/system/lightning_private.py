"""Private names of Lightning that the suite uses; ``tests/test_private_names.py`` says what each is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


def logger_connector(trainer: Trainer) -> Any:
    """The part of a trainer that gathers metrics."""
    return trainer._logger_connector


def saved_hyperparameters(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two copies that ``save_hyperparameters`` keeps: for checkpoints, and for loggers."""
    return module._hparams, module._hparams_initial


def ddp_options(strategy: Any) -> dict[str, Any]:
    """Options of a DDP strategy for DistributedDataParallel; empty for other strategies."""
    return getattr(strategy, "_ddp_kwargs", {})


def logged_step(trainer: Trainer) -> int:
    """The step that rows of the log are written for."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def validates_after_this_batch(trainer: Trainer) -> bool:
    """Whether validation or the end of the epoch follows the batch that was just trained on."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return loop.batch_progress.is_last_batch or loop._should_check_val_fx(fetcher)


def accumulates_gradients(trainer: Trainer) -> bool:
    """Whether the optimiser has not stepped yet with the gradients of the last batch."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def batches_done(trainer: Trainer) -> int:
    """Batches of the present epoch that a run has trained on."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def inside_accumulation(trainer: Trainer) -> bool:
    """At the start of training: whether the batches done in the epoch are not those of complete optimiser steps."""
    return bool(trainer.fit_loop.restarted_mid_epoch) and accumulates_gradients(trainer)


def ends_epoch(trainer: Trainer) -> bool:
    """Whether the epoch ends after the batch that was just trained on: it is the last one, or training stops."""
    fit_loop = trainer.fit_loop
    return fit_loop.epoch_loop._is_training_done or (trainer.should_stop and fit_loop._can_stop_early)


def ended_inside_epoch(trainer: Trainer) -> bool:
    """Whether training stops although its epoch has more batches."""
    return not trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def as_of_last_batch(loops: dict[str, Any]) -> None:
    """Change the saved progress of training that stopped inside an epoch to that at the end of its last batch.

    Lightning counts the epoch as done, and a longer run would start with the next one.

    Args:
        loops: the loops' progress as a checkpoint has it, changed in place.
    """
    fit_loop = loops["fit_loop"]
    for progress, count in (("epoch_progress", "processed"), ("epoch_loop.batch_progress", "completed")):
        for span in ("total", "current"):
            fit_loop[progress][span][count] -= 1
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def start_next_epoch(trainer: Trainer) -> None:
    """After loading a checkpoint of the end of an epoch: start with the next one, without ending that one again.

    Lightning repeats the end of the epoch where ``max_steps`` limits the run, without the metrics that callbacks look for.
    """
    fit_loop = trainer.fit_loop
    if fit_loop.restarted_on_epoch_end:
        fit_loop.epoch_progress.increment_completed()
        fit_loop.reset_restart_stage()
        fit_loop._restarting = False
        fit_loop.epoch_loop.restarting = False


def defer_saves(
    callback: ModelCheckpoint,
    save: Callable[[str], None],
    remove: Callable[[str], None],
    pending: Callable[[str], bool],
    outdated: Callable[[Trainer], bool],
) -> None:
    """Have a ModelCheckpoint hand over the paths that it would write and remove; it writes no ``last.ckpt``.

    What it wrote by itself would lack what callbacks after it learn at the same step.

    Args:
        callback: changed in place, until :func:`stop_deferring`.
        save: takes a path to write the present state to.
        remove: takes a path of a checkpoint that is no longer among the best.
        pending: whether a path was handed over and is not written yet, so that no second checkpoint takes its name.
        outdated: whether the monitored value is of earlier weights, at the end of an epoch.
    """
    exists, end_epoch = callback.file_exists, callback.on_train_epoch_end

    def want(trainer: Trainer, filepath: str) -> None:
        save(filepath)
        callback._last_global_step_saved = trainer.global_step
        callback._last_checkpoint_saved = filepath

    overrides: dict[str, Any] = {
        "_save_checkpoint": want,
        "_remove_checkpoint": lambda trainer, filepath: remove(filepath),
        "_save_last_checkpoint": lambda trainer, metrics: None,
        "file_exists": lambda filepath, trainer: pending(str(filepath)) or exists(filepath, trainer),
        "on_train_epoch_end": lambda trainer, module: None if outdated(trainer) else end_epoch(trainer, module),
    }
    for name, override in overrides.items():
        setattr(callback, name, override)


def stop_deferring(callback: ModelCheckpoint) -> None:
    """Undo :func:`defer_saves`."""
    for name in (
        "_save_checkpoint",
        "_remove_checkpoint",
        "_save_last_checkpoint",
        "file_exists",
        "on_train_epoch_end",
    ):
        vars(callback).pop(name, None)


def steps_between_saves(callback: ModelCheckpoint) -> int:
    """``every_n_train_steps`` of a ModelCheckpoint; 0 for none."""
    return callback._every_n_train_steps
