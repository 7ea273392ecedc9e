"""Options as dataclasses, and as the plain data that checkpoints and loggers keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin

from lightning_mhla.system.lightning_private import saved_hyperparameters

Options = TypeVar("Options")


def as_dataclass(kind: type[Options], value: Any, name: str = "") -> Options:
    """A dataclass from a mapping, as configurations and checkpoints hold it; an instance stays as it is.

    Args:
        kind: the dataclass.
        value: mapping or instance.
        name: of the options, for errors.

    Raises:
        ValueError: for an option that does not exist, or a number, word or truth value of another type.
    """
    if isinstance(value, kind):
        return value
    name = name or kind.__name__
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} takes options by name, not {value!r}")
    known = [field.name for field in fields(cast(Any, kind)) if field.init]
    types = get_type_hints(kind)
    for key, given in value.items():
        if key not in known:
            close = get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known) or 'none'}"
            raise ValueError(f"{name} has no option {key!r}; {hint}")
        if not _fits(given, types[key]):
            raise ValueError(f"{name}: {key}={given!r} is not {getattr(types[key], '__name__', types[key])}")
    return kind(**value)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a plain value is of a plain type; of others nothing is said."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    choices = get_args(kind) if get_origin(kind) is not None and type(None) in get_args(kind) else (kind,)
    if any(choice not in (bool, int, float, str, type(None)) for choice in choices):
        return True
    if isinstance(value, bool):
        return bool in choices
    return isinstance(value, choices) or (isinstance(value, int) and float in choices)


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
    """Hyperparameters that loggers get under ``PREFIX/``, so that those of module and data never meet.

    Lightning logs both as one, and stops where a name has two values: ``train`` is a part of the network to one and a folder
    to the other. Checkpoints keep the plain names.
    """

    logged_as: str

    @property
    def hparams_initial(self) -> Any:
        """Hyperparameters for loggers, with their prefix."""
        return {f"{self.logged_as}/{name}": value for name, value in super().hparams_initial.items() if name[0] != "_"}
