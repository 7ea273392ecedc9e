"""Preparation of the Trainer's options before the Trainer is built: output folders, checks, removed callbacks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, ModelPruning, StochasticWeightAveraging

from lightning_mhla.checkpoints.io import RECOVERY
from lightning_mhla.checkpoints.runs import RunFolder
from lightning_mhla.checkpoints.sharded import is_sharded
from lightning_mhla.training.module import TrainingModule
from mhla_tasks.commandline.sources import Source, mapping
from mhla_tasks.commandline.trust import subclass_named

log = logging.getLogger(__name__)

UNSUPPORTED: Mapping[type[Callback], str] = {
    StochasticWeightAveraging: "computes the average after the last checkpoint was saved, so that export, validate and predict "
    "would use the last weights; use --model.training.ema_decay, or with ema_decay=null Lightning's WeightAveraging",
    BackboneFinetuning: "requires an attribute `backbone`, which the models of this package do not have; to train some of the "
    "weights, derive a callback from Lightning's BaseFinetuning and name it with --allow",
    ModelPruning: "renames the weights, so that the moving average and the checkpoints no longer match the model; prune the "
    "exported model with torch.nn.utils.prune",
}
"""Callbacks of Lightning that do not work with the models of this package, each with the reason and the way out."""


def use_run_folder(options: Any) -> RunFolder:
    """Make ``fit`` write logs and checkpoints to the folder that ``--run_dir`` names, and lock this folder.

    Args:
        options: parsed options of the command (a jsonargparse Namespace), changed in place.

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
    """Make ``validate`` and ``test`` write to the run folder of the checkpoint, and ``predict`` to a new subfolder of it.

    Loggers are disabled. Nothing changes if no checkpoint is given, if its path does not exist, or if a source sets
    ``trainer.logger`` or ``trainer.default_root_dir``.

    Args:
        options: parsed options of the command (a jsonargparse Namespace), changed in place.
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
        trainer: parsed options of the Trainer (a jsonargparse Namespace).

    Raises:
        ValueError: if one of these options is below 1.
    """
    for name in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        value = trainer.get(name)
        if value is not None and value < 1:
            raise ValueError(f"--trainer.{name}={value} must be at least 1")


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the options of each callback in the options of a Trainer, which may name one callback without a list."""
    callbacks = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
    return [callback for callback in callbacks if callback is not None]


def check_callbacks(options: Any) -> None:
    """Reject callbacks of Lightning that do not work with a model of this package.

    With any other model, all callbacks are accepted.

    Args:
        options: parsed options of ``fit`` (a jsonargparse Namespace).

    Raises:
        ValueError: if the model is one of this package, and the class of a callback or one of its base classes is listed in
            :data:`UNSUPPORTED`.
    """
    if subclass_named((options.get("model") or {}).get("class_path"), (TrainingModule,)) is None:
        return
    for callback in callbacks_of(options.trainer):
        for kind, reason in UNSUPPORTED.items():
            if subclass_named(callback.class_path, (kind,)) is not None:
                raise ValueError(f"trainer.callbacks: {callback.class_path.rpartition('.')[2]} {reason}")


def leave_out_monitors(trainer: Any, command: str) -> None:
    """Remove all ``LearningRateMonitor`` callbacks, which Lightning rejects in a Trainer without a logger.

    Args:
        trainer: parsed options of a Trainer without a logger (a jsonargparse Namespace), changed in place.
        command: ``fit``, ``validate``, ``test`` or ``predict``; only ``fit`` logs a message.
    """
    callbacks = callbacks_of(trainer)
    remaining = [callback for callback in callbacks if not callback.class_path.endswith("LearningRateMonitor")]
    if len(remaining) < len(callbacks):
        if command == "fit":
            log.info("LearningRateMonitor is disabled, because there is no logger")
        trainer.callbacks = remaining
