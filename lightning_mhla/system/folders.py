"""Output folders of a run, and gathering of lists from all processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mhla.system.listing import shown

Row = TypeVar("Row")


class TrialFolder(Callback):
    """Callback that creates the temporary folder of a trial with ``fast_dev_run``, and removes it when the trial ends or fails.

    The first process creates the folder, and all processes use it. A callback removes it, because processes that Lightning
    forks or spawns end without the cleanup of the interpreter.

    Attributes:
        path: path of the folder, the same in all processes; None before it is created and after it is removed.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._created: TemporaryDirectory[str] | None = None

    def create(self, trainer: Trainer) -> Path:
        """Return the temporary folder. The first call, which every process must make, creates the folder."""
        if self.path is None:
            if trainer.is_global_zero:
                self._created = TemporaryDirectory(prefix="fast-dev-run-", ignore_cleanup_errors=True)
            name = "" if self._created is None else self._created.name
            self.path = Path(trainer.strategy.broadcast(name))
            if trainer.local_rank == 0:  # on every machine
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            trainer.strategy.barrier()
        return self.path

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the temporary folder after all processes have finished the trial."""
        if self.path is not None:
            trainer.strategy.barrier()
            self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the temporary folder after a failure, without waiting for processes that may also have failed."""
        self._remove()

    def _remove(self) -> None:
        if self._created is not None:
            self._created.cleanup()
        if self.path is not None:  # a process on a different machine, or one that wrote after the first one had failed
            shutil.rmtree(self.path, ignore_errors=True)
        self.path = self._created = None


def run_folder(trainer: Trainer) -> Path:
    """Return the log folder of a run, the same on every process. Every process must call this function.

    The result for a trial with ``fast_dev_run`` is a temporary folder. Callbacks write to it, so that the trial also runs their
    code but leaves no files behind.
    """
    if is_trial(trainer):
        return _trial_folder(trainer).create(trainer)
    return Path(trainer.log_dir or trainer.default_root_dir)


def _trial_folder(trainer: Trainer) -> TrialFolder:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # the trainer's own list
    for callback in callbacks:
        if isinstance(callback, TrialFolder):
            return callback
    # The last callback, so that the others can write until their last hook.
    folder = TrialFolder()
    callbacks.append(folder)
    return folder


def shown_place(trainer: Trainer, path: Path) -> str:
    """Return the path of an output as text for a message.

    A path in the temporary folder of a trial is replaced with a description, because the folder will be removed.

    Args:
        trainer: trainer of the run.
        path: path of a file or folder that was written.
    """
    if is_trial(trainer) and path.is_relative_to(_trial_folder(trainer).path or path):
        return "a temporary folder (fast_dev_run keeps no file)"
    return shown(path)


def is_trial(trainer: Trainer) -> bool:
    """Return whether the run is a trial of a few batches with ``fast_dev_run``, which leaves no files behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set when the trainer is created


def is_run_folder(trainer: Trainer, folder: Path) -> bool:
    """Return whether a folder belongs to the run alone, so that files may be written into it.

    The result is False for the current working directory, for a run that has neither a logger nor ``--run_dir``, and for a
    trial with ``fast_dev_run``.

    Args:
        trainer: trainer of the run.
        folder: result of :func:`run_folder`.
    """
    if is_trial(trainer) or folder.resolve() == Path.cwd():
        return False
    return bool(trainer.loggers) or (folder / "lock").exists()


def checkpoint_folder(trainer: Trainer) -> Path:
    """Return the folder of a run's checkpoints, the same on every process. Every process must call this function."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath and not is_trial(trainer):
            return Path(callback.dirpath)
    return run_folder(trainer) / "checkpoints"


def gather_rows(trainer: Trainer, rows: list[Row]) -> list[Row]:
    """Join the lists of all processes in rank order, and return the joined list on every process.

    Every process must call this function.

    Args:
        trainer: trainer of the run.
        rows: picklable entries from this process.
    """
    if trainer.world_size == 1:
        return rows
    parts: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(parts, rows)
    return [row for part in parts for row in part]
