"""Check of configurations for ``null`` in options that do not accept it.

jsonargparse also uses None to mark an argument without a value, and does not check the type of such an argument. It therefore
passes ``null`` on to constructors, which fail with a message about a comparison or a product. Its alternative, a separate mark
(``unset_sentinel``), does not apply to nested dataclasses and writes None as text to saved configurations.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mhla_tasks.commandline.merging import ROOTS, Classes, chosen_classes
from mhla_tasks.commandline.problems import located, message_at, value_at
from mhla_tasks.commandline.signatures import accepts_null, option_classes, parameter_hints, union_members
from mhla_tasks.commandline.sources import Source, literal
from mhla_tasks.commandline.trust import CLASS_OPTIONS


def find_null(configuration: Mapping[str, Any], sources: Sequence[Source]) -> str | None:
    """Find the first option that is null, although its type hint does not include None and its default is not None.

    Args:
        configuration: merged options of a command.
        sources: options from a checkpoint, configuration files and the command line, from lowest to highest priority.

    Returns:
        Error message with the expected type and the file or command-line option that sets the value; None if there is no such
        option.
    """
    for root, classes in ROOTS.items():
        for path, expected in _nulls(configuration.get(root), (root,), classes):
            return _message(path, expected, sources)
    return None


def _nulls(value: Any, path: tuple[str, ...], classes: Classes) -> Iterator[tuple[tuple[str, ...], str]]:
    """Search a value for options that are null although they must not be; yield the path and the expected type of each.

    Args:
        value: options of a class, or a list of them. There is nothing to check in any other value.
        path: keys that lead to the value, without ``init_args`` and list indices.
        classes: classes whose options the value may contain.
    """
    if isinstance(value, list):
        for item in value:
            if item is None and classes:
                yield path, " or ".join(kind.__name__ for kind in classes)
            yield from _nulls(item, path, classes)
    if not isinstance(value, dict) or not classes:
        return
    kinds = chosen_classes(value, classes)
    arguments = {key: item for key, item in value.items() if key not in CLASS_OPTIONS} | (value.get("init_args") or {})
    for key, item in arguments.items():
        name = key.removesuffix("+")
        hints = [parameter_hints(kind)[name] for kind in kinds if name in parameter_hints(kind)]
        accepted = any(accepts_null(kind, name) for kind in kinds if name in parameter_hints(kind))
        if hints and not accepted and _is_null(item, hints):
            yield (*path, name), " or ".join(dict.fromkeys(_spelled(hint) for hint in hints))
        else:
            below = tuple(base for kind in kinds for base in option_classes(kind).get(name, ()))
            yield from _nulls(item, (*path, name), below)


def _is_null(value: Any, hints: Sequence[Any]) -> bool:
    """Return whether a value is None, or a text that the parser reads as None because no type hint accepts text."""
    if value is None:
        return True
    accepts_text = any(str in union_members(hint) for hint in hints)
    return isinstance(value, str) and bool(value.strip()) and not accepts_text and literal(value) is None


def _spelled(hint: Any) -> str:
    """Format a type hint for messages, such as ``int or list[int]``; values of a ``Literal`` are listed."""
    members = (
        member.__name__ if isinstance(member, type) and not typing.get_args(member) else str(member)
        for member in union_members(hint)
    )
    return " or ".join(dict.fromkeys(member.replace("typing.", "") for member in members))


def _message(path: tuple[str, ...], expected: str, sources: Sequence[Source]) -> str:
    text = f"expected {expected}, got null"
    for source in reversed(sources):
        for place in located(source.values, [path[-1]], ()):
            keys = [str(key).removesuffix("+") for key in place if isinstance(key, str) and key != "init_args"]
            value = value_at(source.values, place)
            is_null = value is None or (isinstance(value, str) and literal(value) is None)
            if keys == list(path) and (is_null or (isinstance(value, list) and None in value)):
                return message_at(source, place, text)
    return f"{'.'.join(path)}: {text}"
