"""Names and types of constructor parameters, which are the valid options of a class in a configuration."""

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
"""Modules whose classes, such as ``Path``, are written as plain values in a configuration."""


@cache
def parameter_hints(kind: type) -> dict[str, Any]:
    """Return a mapping from the name of each constructor parameter of a class to its type hint.

    If the constructor has ``**kwargs``, the parameters of the base class are included.
    """
    hints: dict[str, Any] = {}
    passes_on = True
    for base in kind.__mro__:
        if base is object or "__init__" not in vars(base):
            continue
        if not passes_on:
            break
        passes_on = option_names(base) is None
        scope = vars(import_module(base.__module__))
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        variadic = {item.name for item in parameters if item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD)}
        for name, annotation in getattr(inspect.unwrap(vars(base)["__init__"]), "__annotations__", {}).items():
            if name == "return" or name in variadic:
                continue
            try:
                # One at a time, because a single name that is missing makes the call fail for all.
                hint = typing.get_type_hints(types.SimpleNamespace(__annotations__={name: annotation}), scope)[name]
            except NameError:  # the name is imported only under TYPE_CHECKING
                continue
            hints.setdefault(name, hint)
    return hints


@cache
def parameter_bases(kind: type) -> dict[str, tuple[type, ...]]:
    """Return a mapping from the name of each constructor parameter of a class to the classes in the parameter's type hint.

    Classes inside unions and containers are included. Classes of plain values, such as ``int``, are omitted.
    """
    return {name: tuple(dict.fromkeys(_classes(hint, True))) for name, hint in parameter_hints(kind).items()}


@cache
def option_classes(kind: type) -> dict[str, tuple[type, ...]]:
    """Return a mapping from each constructor parameter of a class to the classes whose options may stand below it.

    In a configuration, the options of ``Callback`` may stand below a parameter of type ``list[Callback]``. A parameter of type
    ``dict[str, Callback]`` has no such class, because the keys below it are arbitrary names and not options.
    """
    return {name: tuple(dict.fromkeys(_classes(hint, False))) for name, hint in parameter_hints(kind).items()}


@cache
def option_names(kind: type) -> frozenset[str] | None:
    """Return the names of a class's constructor parameters; None if the constructor accepts any name (``**kwargs``)."""
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters) - {"self"}


def option_dataclasses(kind: type, name: str) -> list[type]:
    """Return the dataclasses whose options may stand below a constructor parameter in a configuration.

    Args:
        kind: class with the parameter.
        name: name of the parameter.
    """
    return [
        option_class for option_class in option_classes(kind).get(name, ()) if dataclasses.is_dataclass(option_class)
    ]


def takes_options_alone(kind: type, name: str) -> bool:
    """Return whether a constructor parameter accepts only dataclass instances or None, and thus no plain value.

    Args:
        kind: class with the parameter.
        name: name of the parameter.
    """
    members = union_members(parameter_hints(kind).get(name))
    option_kinds = [member for member in members if member is not types.NoneType]
    return bool(option_kinds) and all(
        isinstance(member, type) and dataclasses.is_dataclass(member) for member in option_kinds
    )


def accepts_null(kind: type, name: str) -> bool:
    """Return whether None is a valid value of a constructor parameter, by its type hint or as its default.

    Args:
        kind: class with the parameter.
        name: name of the parameter. A parameter without a type hint accepts None.
    """
    hint = parameter_hints(kind).get(name, Any)
    if any(member in (Any, object, None, types.NoneType) for member in union_members(hint)):
        return True
    for base in kind.__mro__:
        if "__init__" in vars(base) and name in (parameters := inspect.signature(base.__init__).parameters):  # type: ignore[misc]
            return parameters[name].default is None
    return True


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the types in a union or the values in a ``Literal``; any other type hint gives a tuple with only the hint.

    Args:
        hint: type hint of a parameter.
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(member for inner in typing.get_args(hint) for member in union_members(inner))
    if origin is typing.Annotated:
        return union_members(typing.get_args(hint)[0])
    if isinstance(hint, typing.TypeVar):
        return (Any,)
    if hasattr(hint, "__value__"):  # an alias by a type statement, which Python 3.11 does not have
        return union_members(hint.__value__)
    return typing.get_args(hint) if origin is typing.Literal else (hint,)


def _classes(hint: Any, inside_mappings: bool) -> Iterator[type]:
    """Yield the classes in a type hint, including those in unions and containers.

    Callables are omitted. Classes such as ``int`` and ``Path`` are omitted because configurations write their instances as
    plain values.

    Args:
        hint: type hint of a parameter.
        inside_mappings: whether to include the classes in hints such as ``dict[str, Callback]``.
    """
    origin = typing.get_origin(hint)
    if isinstance(hint, type) and not origin:
        if hint is not Any and hint.__module__ not in PLAIN:
            yield hint
    elif isinstance(origin, type) and issubclass(origin, collections.abc.Mapping) and not inside_mappings:
        return  # the keys of a mapping are free, so they are not options of a class
    elif origin not in (collections.abc.Callable, type, typing.Literal):
        for inner in typing.get_args(hint):
            yield from _classes(inner, inside_mappings)
