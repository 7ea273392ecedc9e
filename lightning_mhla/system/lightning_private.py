"""Functions that access private attributes and methods of Lightning.

``tests/test_private_names.py`` states why each of these attributes and methods is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

if TYPE_CHECKING:
    restricted_classmethod = classmethod
else:
    # Its methods raise an error if they are called on an instance, which they would leave unchanged.
    restricted_classmethod = type(vars(LightningModule)["load_from_checkpoint"])


def logger_connector(trainer: Trainer) -> Any:
    """Return the component of a trainer that collects the logged metrics."""
    return trainer._logger_connector


def loop_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return the metrics that the running training or validation loop has logged so far, by name.

    A metric that is logged both for each step and for the epoch is listed once, without ``_step`` or ``_epoch``: with its value
    in the latest step or, once the epoch has ended, in the epoch.
    """
    metrics = logger_connector(trainer).metrics["callback"]
    forked = [name for name in metrics if name.endswith(("_step", "_epoch")) and name.rsplit("_", 1)[0] in metrics]
    return {name: value for name, value in metrics.items() if name not in forked}


def saved_hyperparameters(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the two dicts that ``save_hyperparameters`` fills, the first for checkpoints and the second for loggers."""
    return module._hparams, module._hparams_initial


def ddp_options(strategy: Any) -> dict[str, Any]:
    """Return the options that a DDP strategy passes to ``DistributedDataParallel``; an empty dict for other strategies."""
    return getattr(strategy, "_ddp_kwargs", {})


def trains_in_children(trainer: Trainer) -> bool:
    """Return whether a trainer forks or spawns its training processes, so that this process does not see their callbacks."""
    return getattr(trainer.strategy.launcher, "_start_method", None) is not None


def logged_step(trainer: Trainer) -> int:
    """Return the step number that Lightning attaches to the metrics it logs."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def validates_after_this_batch(trainer: Trainer) -> bool:
    """Return whether validation or the end of the epoch follows the current training batch."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return loop.batch_progress.is_last_batch or loop._should_check_val_fx(fetcher)


def accumulates_gradients(trainer: Trainer) -> bool:
    """Return whether the current batch only accumulates gradients, and does not complete an optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def batches_done(trainer: Trainer) -> int:
    """Return the number of batches of the current epoch that training has started, including the current one."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def inside_accumulation(trainer: Trainer) -> bool:
    """Return whether a trainer resumes from a checkpoint that was saved while gradients were being accumulated.

    Such a checkpoint was saved between two batches of one optimizer step. Call the function at the start of training.
    """
    return trainer.fit_loop.restarted_mid_epoch and accumulates_gradients(trainer)


def ends_epoch(trainer: Trainer) -> bool:
    """Return whether the epoch ends after the current training batch, because it is the last batch or training stops."""
    return trainer.fit_loop.epoch_loop._is_training_done or stops_early(trainer)


def stops_early(trainer: Trainer) -> bool:
    """Return whether training stops because a callback has requested it, and ``min_epochs`` and ``min_steps`` are reached."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def ended_inside_epoch(trainer: Trainer) -> bool:
    """Return whether training stopped before the last batch of an epoch."""
    return not trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def as_of_last_batch(loops: dict[str, Any]) -> None:
    """Correct the training progress in a checkpoint that was saved after training stopped inside an epoch.

    Lightning counts this epoch as complete, so a resumed run would start with the next epoch. After the correction, a
    resumed run continues after the last batch that was processed.

    Args:
        loops: entry ``loops`` of the checkpoint, changed in place.
    """
    fit_loop = loops["fit_loop"]
    for progress, count in (("epoch_progress", "processed"), ("epoch_loop.batch_progress", "completed")):
        for span in ("total", "current"):
            fit_loop[progress][span][count] -= 1
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def start_next_epoch(trainer: Trainer) -> None:
    """Make a trainer begin the next epoch if it has loaded a checkpoint from the end of an epoch.

    Without this call, if ``max_steps`` limits the run, Lightning processes the end of that epoch a second time, without the
    metrics that callbacks monitor.
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
    """Make a ModelCheckpoint report the paths that it would write and remove, instead of writing and removing them.

    The caller can then save after all callbacks have updated their states for the step. ``last.ckpt`` is neither written nor
    reported.

    Args:
        callback: ModelCheckpoint to change in place, until :func:`stop_deferring` is called for it.
        save: function that is called with each path to which the callback would write the current state.
        remove: function that is called with the path of each checkpoint that is no longer among the best.
        pending: function that takes a path, and returns whether it was reported but is not written yet. The callback does not
            use such a path again.
        outdated: function that takes the trainer, and returns whether the monitored value at the end of an epoch belongs to
            earlier weights. If so, the callback does nothing at the end of the epoch.
    """
    exists, end_epoch = callback.file_exists, callback.on_train_epoch_end

    def want(trainer: Trainer, filepath: str) -> None:
        save(filepath)
        # Lightning's own method records these two, which keep several triggers from saving the same step again.
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
    """Restore the methods of a ModelCheckpoint that :func:`defer_saves` overrides."""
    for name in (
        "_save_checkpoint",
        "_remove_checkpoint",
        "_save_last_checkpoint",
        "file_exists",
        "on_train_epoch_end",
    ):
        vars(callback).pop(name, None)


def steps_between_saves(callback: ModelCheckpoint) -> int:
    """Return the number of steps between two saves of a ModelCheckpoint, or 0 if it does not save by steps."""
    return callback._every_n_train_steps


def prepared_batch(trainer: Trainer, module: LightningModule, batch: Any) -> Any:
    """Return a batch after the conversions that Lightning's loops apply before they move it to the device.

    Args:
        trainer: trainer whose precision plugin converts the batch.
        module: module of the run. Its hook ``on_before_batch_transfer``, or the data module's, is called.
        batch: batch of the first data loader.
    """
    return module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
