"""Private names of Lightning that the suite uses; ``tests/test_private_names.py`` says what each is for."""

from __future__ import annotations

from typing import Any

from lightning import Trainer


def logger_connector(trainer: Trainer) -> Any:
    """What gathers a trainer's metrics."""
    return trainer._logger_connector


def saved_hyperparameters(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two copies that ``save_hyperparameters`` keeps: for checkpoints, and for loggers."""
    return module._hparams, module._hparams_initial


def ddp_options(strategy: Any) -> dict[str, Any]:
    """What a DDP strategy hands to DistributedDataParallel; empty for others."""
    return getattr(strategy, "_ddp_kwargs", {})


def subcommand_parsers(cli: Any) -> dict[str, Any]:
    """The parsers of a LightningCLI by subcommand."""
    return cli._subcommand_parsers
