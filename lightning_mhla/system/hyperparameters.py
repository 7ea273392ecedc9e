"""Arguments of a module or data module, remembered in checkpoints and shown to loggers as plain data."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin

from lightning_mhla.system.lightning_private import saved_hyperparameters
from lightning_mhla.system.redaction import redacted


def keep_plain(module: Any) -> None:
    """Turn configurations among the saved hyperparameters into dicts, so that reading a checkpoint runs no code.

    Args:
        module: a LightningModule or LightningDataModule, after its ``save_hyperparameters``.
    """
    for saved in saved_hyperparameters(module):
        for key, value in saved.items():
            if is_dataclass(value) and not isinstance(value, type):
                saved[key] = asdict(value)


def plain(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by dotted name, tuples as lists."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        if isinstance(value, dict) and value:
            flat |= plain(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat


class LoggedApart(HyperparametersMixin):
    """Hyperparameters that loggers get under ``PREFIX/``, so that those of module and data never meet, without secrets.

    Lightning logs both as one, and stops where a name has two values: ``train`` is a part of the network to one and a folder
    to the other. Checkpoints keep the plain names.
    """

    logged_as: str

    @property
    def hparams_initial(self) -> Any:
        """Hyperparameters for loggers, with their prefix."""
        options = redacted(dict(super().hparams_initial))
        return {f"{self.logged_as}/{name}": value for name, value in options.items() if name[0] != "_"}
