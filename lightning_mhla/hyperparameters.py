"""Arguments of a module or data module, remembered in checkpoints as plain data."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any


def keep_plain(module: Any) -> None:
    """Turn configurations among the saved hyperparameters into dicts, so that reading a checkpoint runs no code.

    Args:
        module: a LightningModule or LightningDataModule, after its ``save_hyperparameters``.
    """
    for saved in (module._hparams, module._hparams_initial):
        for key, value in saved.items():
            if is_dataclass(value) and not isinstance(value, type):
                saved[key] = asdict(value)
