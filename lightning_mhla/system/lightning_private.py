"""Private names of Lightning that the suite uses; ``tests/test_private_names.py`` says what each is for."""

from __future__ import annotations

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


def subcommand_parsers(cli: Any) -> dict[str, Any]:
    """The parsers of a LightningCLI by subcommand."""
    return cli._subcommand_parsers


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


def steps_between_saves(callback: ModelCheckpoint) -> int:
    """``every_n_train_steps`` of a ModelCheckpoint; 0 for none."""
    return callback._every_n_train_steps
