"""Output folders of a run, and gathering of lists from all processes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

Row = TypeVar("Row")


_DISCARDED: WeakKeyDictionary[Trainer, TemporaryDirectory[str]] = WeakKeyDictionary()
"""Folders of trials with ``fast_dev_run``. A folder is removed with its trainer, at the latest when the process ends."""


def run_folder(trainer: Trainer) -> Path:
    """Return the log folder of a run, the same on every process. Every process must call this function.

    A trial with ``fast_dev_run`` writes nothing that remains. Its callbacks write to a temporary folder of the process, so that
    their code is tried, too.
    """
    if is_trial(trainer):
        if trainer not in _DISCARDED:
            _DISCARDED[trainer] = TemporaryDirectory(prefix="fast-dev-run-", ignore_cleanup_errors=True)
        return Path(_DISCARDED[trainer].name)
    return Path(trainer.log_dir or trainer.default_root_dir)


def is_trial(trainer: Trainer) -> bool:
    """Return whether the run is a trial of a few batches with ``fast_dev_run``, which writes nothing that remains."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set when the trainer is created


def is_run_folder(trainer: Trainer, folder: Path) -> bool:
    """Return whether a folder belongs to the run alone, so that files may be written into it.

    Without a logger or ``--run_dir``, a run has no folder of its own. ``fast_dev_run`` writes nothing.

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
