"""Where the files of a run go."""

from __future__ import annotations

from pathlib import Path

from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


def run_folder(trainer: Trainer) -> Path:
    """The log folder of this run, the same on every rank (call it on every rank)."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def checkpoint_folder(trainer: Trainer) -> Path:
    """Where checkpoints of this run go (call it on every rank)."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            return Path(callback.dirpath)
    return run_folder(trainer) / "checkpoints"
