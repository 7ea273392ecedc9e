"""The parameters of a class that configurations give options for."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

PLAIN = ("builtins", "pathlib", "datetime", "os")
"""Modules whose classes are plain values in a configuration."""


@cache
def parameter_hints(kind: type) -> dict[str, Any]:
    """Type hints of the parameters of a class, those of its bases included where it passes options of any name on."""
    hints: dict[str, Any] = {}
    passes_on = True
    for each in kind.__mro__:
        if each is object or "__init__" not in vars(each):
            continue
        if not passes_on:
            break
        passes_on = option_names(each) is None
        scope = vars(import_module(each.__module__))
        parameters = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
        variadic = {one.name for one in parameters if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
        for name, annotation in getattr(inspect.unwrap(vars(each)["__init__"]), "__annotations__", {}).items():
            if name == "return" or name in variadic:
                continue
            try:
                hint = typing.get_type_hints(types.SimpleNamespace(__annotations__={name: annotation}), scope)[name]
            except NameError:  # imported for type checkers alone
                continue
            hints.setdefault(name, hint)
    return hints


@cache
def parameter_bases(kind: type) -> dict[str, tuple[type, ...]]:
    """Classes of which a parameter takes instances, alone or inside a container, by the parameter's name."""
    return {name: tuple(dict.fromkeys(_classes(hint, True))) for name, hint in parameter_hints(kind).items()}


@cache
def option_classes(kind: type) -> dict[str, tuple[type, ...]]:
    """Classes whose own options may stand below a parameter, by the parameter's name; the items of a list count."""
    return {name: tuple(dict.fromkeys(_classes(hint, False))) for name, hint in parameter_hints(kind).items()}


@cache
def option_names(kind: type) -> frozenset[str] | None:
    """Names of the parameters of a class; None if it takes options of any name."""
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return None
    return frozenset(parameters) - {"self"}


def option_dataclasses(kind: type, name: str) -> list[type]:
    """Dataclasses whose options may stand below a parameter."""
    return [each for each in option_classes(kind).get(name, ()) if dataclasses.is_dataclass(each)]


def takes_options_alone(kind: type, name: str) -> bool:
    """Whether a parameter takes a dataclass, or None, and no plain value."""
    hint = parameter_hints(kind).get(name)
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    others = [each for each in kinds if each is not types.NoneType]
    return bool(others) and all(isinstance(each, type) and dataclasses.is_dataclass(each) for each in others)


def _classes(hint: Any, inside_mappings: bool) -> Iterator[type]:
    """Classes in a hint, those of unions and containers included; plain values and functions are left out."""
    origin = typing.get_origin(hint)
    if isinstance(hint, type) and not origin:
        if hint is not Any and hint.__module__ not in PLAIN:
            yield hint
    elif isinstance(origin, type) and issubclass(origin, collections.abc.Mapping) and not inside_mappings:
        return  # the keys of a mapping are its user's
    elif origin not in (collections.abc.Callable, type, typing.Literal):
        for inner in typing.get_args(hint):
            yield from _classes(inner, inside_mappings)
