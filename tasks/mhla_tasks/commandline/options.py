"""Preparation of the Trainer's options before the Trainer is built: output folders, checks of intervals, removed callbacks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_mhla.checkpoints.io import RECOVERY
from lightning_mhla.checkpoints.runs import RunFolder
from lightning_mhla.checkpoints.sharded import is_sharded
from mhla_tasks.commandline.sources import Source, mapping

log = logging.getLogger(__name__)


def use_run_folder(options: Any) -> RunFolder:
    """Make ``fit`` write logs and checkpoints to the folder that ``--run_dir`` names, and lock this folder.

    Args:
        options: parsed options of the command, changed in place.

    Returns:
        The folder, whose lock prevents a second run from using it.

    Raises:
        ValueError: if another run uses the folder, or the folder contains files that do not belong to a run.
    """
    path = Path(options.run_dir)
    folder = RunFolder(path)
    options.trainer.default_root_dir = str(path)
    logger_options = {"save_dir": str(path), "name": "", "version": ""}
    if options.trainer.logger in (None, True):
        options.trainer.logger = [
            Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=Namespace(logger_options))
        ]
    loggers = options.trainer.logger or []
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if logger.class_path.rsplit(".", 1)[-1] in ("TensorBoardLogger", "CSVLogger"):
            logger.init_args.update(Namespace(logger_options))
        elif logger.get("init_args", Namespace()).get("save_dir", path) in (None, "", "."):
            # W&B and others default to the working folder; a logger without parameters has no init_args.
            logger.init_args["save_dir"] = str(path)
    return folder


def write_beside_checkpoint(options: Any, command: str, sources: Sequence[Source]) -> None:
    """Make ``validate`` and ``test`` write to the checkpoint's run folder, and ``predict`` to a new subfolder of it.

    Logging is disabled. Nothing changes if no checkpoint is given, if it is not an existing path, or if a source sets
    ``trainer.logger`` or ``trainer.default_root_dir``.

    Args:
        options: parsed options of the command, changed in place.
        command: ``validate``, ``test`` or ``predict``.
        sources: configuration files and command-line options.
    """
    trainer_options = {name for source in sources for name in mapping(source.values.get("trainer"))}
    checkpoint = options.get("ckpt_path")
    if not checkpoint or trainer_options & {"logger", "default_root_dir"} or not Path(checkpoint).exists():
        return
    folder = Path(checkpoint)
    if folder.is_file() or is_sharded(folder):
        folder = next(
            (parent for parent in folder.parents if parent.name not in ("checkpoints", RECOVERY)), folder.parent
        )
    if command == "predict":
        names = (f"predict-{number}" if number > 1 else "predict" for number in itertools.count(1))
        folder = next(folder / name for name in names if not (folder / name).exists())
    options.trainer.logger, options.trainer.default_root_dir = False, str(folder)


def check_trainer(trainer: Any) -> None:
    """Reject values below 1 for ``accumulate_grad_batches`` and ``check_val_every_n_epoch``, by which Lightning divides.

    Args:
        trainer: parsed options of the Trainer.

    Raises:
        ValueError: if one of these options is below 1.
    """
    for name in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        value = trainer.get(name)
        if value is not None and value < 1:
            raise ValueError(f"--trainer.{name}={value} must be at least 1")


def leave_out_monitors(trainer: Any, command: str) -> None:
    """Remove all ``LearningRateMonitor`` callbacks, which Lightning rejects in a Trainer without a logger.

    Args:
        trainer: parsed options of a Trainer without a logger, changed in place.
        command: ``fit``, ``validate``, ``test`` or ``predict``; only ``fit`` logs a message.
    """
    callbacks = trainer.callbacks if isinstance(trainer.callbacks, list) else []
    remaining = [callback for callback in callbacks if not callback.class_path.endswith("LearningRateMonitor")]
    if len(remaining) < len(callbacks):
        if command == "fit":
            log.info("LearningRateMonitor is disabled, because there is no logger")
        trainer.callbacks = remaining
