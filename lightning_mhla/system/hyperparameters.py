"""Hyperparameters of a module or data module as plain data, for checkpoints and loggers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from types import FrameType
from typing import Any

from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin

from lightning_mhla.system.lightning_private import saved_hyperparameters
from lightning_mhla.system.redaction import redacted


def keep_plain(module: Any) -> None:
    """Convert dataclasses among the saved hyperparameters to dicts, so that reading a checkpoint runs no code.

    Args:
        module: LightningModule or LightningDataModule that has called ``save_hyperparameters``.
    """
    for saved in saved_hyperparameters(module):
        for key, value in saved.items():
            if is_dataclass(value) and not isinstance(value, type):
                saved[key] = _with_text_paths(asdict(value))


def _with_text_paths(value: Any) -> Any:
    """Convert paths in a value to strings, also inside lists, tuples and dicts, so that a checkpoint can hold the value."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) in (list, tuple):
        return type(value)(map(_with_text_paths, value))
    return {key: _with_text_paths(part) for key, part in value.items()} if type(value) is dict else value


def plain(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested options to one dict with dotted names as keys, such as ``network.dim``; tuples become lists.

    Args:
        options: nested dicts and dataclasses.
        prefix: text before each name, such as ``"network."``.
    """
    flat: dict[str, Any] = {}
    for name, value in options.items():
        value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        if isinstance(value, dict) and value:
            flat |= plain(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat


class LoggedApart(HyperparametersMixin):
    """Mixin that logs hyperparameters without secrets, under separate prefixes for modules and data modules.

    Lightning merges the hyperparameters of the module and the data module for loggers, and fails if a name has two values. For
    example, the option ``train`` of a module is the part of the network to train, but the option ``train`` of a data module is
    a folder. Names in checkpoints have no prefix.

    Attributes:
        logged_as: prefix, ``"model"`` or ``"data"``. Loggers get names such as ``model/train``.
    """

    logged_as: str

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of ``__init__`` as Lightning does, with paths as strings, so that checkpoints hold plain data.

        ``self.hparams`` also holds paths as strings. A configuration object of OmegaConf stays as it is.

        Args:
            args: names of the arguments to save, or a single object with all hyperparameters; all arguments by default.
            ignore: names of arguments that are not saved; None if there are none.
            frame: frame of ``__init__``, from which the arguments are read; None for the frame of the caller.
            logger: whether loggers also get the hyperparameters.
        """
        caller = inspect.currentframe()
        frame = frame or (caller and caller.f_back)
        super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        for saved in saved_hyperparameters(self) if isinstance(self.hparams, dict) and self.hparams else ():
            saved.update({key: _with_text_paths(value) for key, value in saved.items()})

    @property
    def hparams_initial(self) -> Any:
        """Dict of the hyperparameters for loggers, under names such as ``model/train``.

        Secrets are replaced with ``***``. Hyperparameters whose names start with ``_`` are left out.
        """
        options = redacted(dict(super().hparams_initial))
        return {f"{self.logged_as}/{name}": value for name, value in options.items() if name[0] != "_"}
