"""Conversion of configuration options to dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

Options = TypeVar("Options")


def as_dataclass(kind: type[Options], value: Any, name: str = "") -> Options:
    """Convert a mapping from a configuration or checkpoint to a dataclass of options.

    An instance of the dataclass is returned unchanged. Mappings in fields that take a dataclass are converted, too.

    Args:
        kind: dataclass to create.
        value: mapping from option names to values, or an instance of the dataclass.
        name: name of the options in error messages; empty for the name of the dataclass.

    Raises:
        ValueError: if ``value`` is neither a mapping nor an instance, or if an option is unknown. Also if the value of an
            option is not one of its choices, or does not have the expected type (number, string or Boolean).
    """
    if isinstance(value, kind):
        return value
    name = name or kind.__name__
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} takes options by name, not {value!r}")
    names = [field.name for field in fields(cast(Any, kind)) if field.init]
    types = get_type_hints(kind)
    for key, item in value.items():
        if key not in names:
            close = get_close_matches(str(key), names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names) or 'none'}"
            raise ValueError(f"{name} has no option {key!r}; {hint}")
        if not _fits(item, types[key]):
            choices = get_args(types[key]) if get_origin(types[key]) is Literal else ()
            requirement = (
                f"one of {', '.join(map(repr, choices))}" if choices else getattr(types[key], "__name__", types[key])
            )
            raise ValueError(f"{name}: {key}={item!r} is not {requirement}")
    return kind(**{key: _converted(item, types[key], f"{name}.{key}") for key, item in value.items()})


def _converted(value: Any, kind: Any, name: str) -> Any:
    """Convert the value of a field to a dataclass if it is a mapping and the field's type is or includes a dataclass.

    Args:
        value: value of the field. A value that is not converted is returned unchanged.
        kind: type of the field.
        name: dotted name of the field in error messages.
    """
    group = next((choice for choice in (get_args(kind) or (kind,)) if is_dataclass(choice)), None)
    return as_dataclass(cast(Any, group), value, name) if group is not None and isinstance(value, Mapping) else value


def _fits(value: Any, kind: Any) -> bool:
    """Return whether the value of a field has the expected type.

    Args:
        value: value of the field.
        kind: type of the field. Only numbers, strings, Booleans, ``Literal`` and unions of these with None are checked; the
            result for any other type is True.
    """
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    # Only unions with None, such as `X | None`, are taken apart. Other unions, lists and dataclasses are not checked here.
    choices = get_args(kind) if get_origin(kind) is not None and type(None) in get_args(kind) else (kind,)
    if any(choice not in (bool, int, float, str, type(None)) for choice in choices):
        return True
    # A bool is an int for isinstance.
    if isinstance(value, bool):
        return bool in choices
    return isinstance(value, choices) or (isinstance(value, int) and float in choices)
