"""Options of configurations as dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

Options = TypeVar("Options")


def as_dataclass(kind: type[Options], value: Any, name: str = "") -> Options:
    """A dataclass from a mapping, as configurations and checkpoints hold it; an instance stays as it is.

    Args:
        kind: the dataclass.
        value: mapping or instance.
        name: name of the options, for errors.

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
            choices = get_args(types[key]) if get_origin(types[key]) is Literal else ()
            wanted = (
                f"one of {', '.join(map(repr, choices))}" if choices else getattr(types[key], "__name__", types[key])
            )
            raise ValueError(f"{name}: {key}={given!r} is not {wanted}")
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
