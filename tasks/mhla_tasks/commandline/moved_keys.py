"""Options that have moved: sources may give them by their former names for one release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mhla_tasks.commandline.arguments import UsageError
from mhla_tasks.commandline.merging import ROOTS
from mhla_tasks.commandline.signatures import option_names
from mhla_tasks.commandline.sources import Source, mapping
from mhla_tasks.commandline.trust import AllowError, find_class, subclass_named

MOVED: Mapping[str, Mapping[str, str]] = {
    "data": {
        "max_skipped": "shards.max_skipped",
        "shuffle_window": "shards.shuffle_window",
        "cache_dir": "shards.cache_dir",
        "cache_bytes": "shards.cache_bytes",
    },
}
"""Former and present names of the options below ``model`` and ``data``; a present name is ``GROUP.NAME``.

They hold for classes that take the group and not the former name: ``PythonSource`` keeps its ``cache_dir``.
"""


@dataclass(frozen=True)
class Move:
    """An option that a source gives by its former name.

    Attributes:
        old: former name, such as ``data.cache_dir``.
        new: present name, such as ``data.shards.cache_dir``.
        origin: the file that gives it, or the command line.
    """

    old: str
    new: str
    origin: str


def move_keys(sources: Sequence[Source]) -> tuple[list[Source], list[Move]]:
    """Rename the options of sources that have moved.

    The class that an option belongs to is the one that its source names, else the last one that a weaker source names,
    else the first one that a stronger source names.

    Args:
        sources: the weakest first.

    Returns:
        The sources with present names alone, and what was renamed.

    Raises:
        UsageError: when one file, or the command line, gives an option by both names.
    """
    moves: list[Move] = []
    renamed = list(sources)
    for root in MOVED:
        if not any(_former_names(source, root) for source in sources):
            continue  # so that no class is imported
        present = {(_giver(source), f"{root}.{new}") for source in sources for new in _present_names(source, root)}
        for index, kind in enumerate(_kinds(sources, root)):
            source = renamed[index]
            names = {old: new for old, new in _former_names(source, root).items() if _has_moved(kind, old, new)}
            renamed[index] = _renamed(source, root, names)
            moves += [Move(f"{root}.{old}", f"{root}.{new}", _giver(source)) for old, new in names.items()]
        for move in moves:
            if (move.origin, move.new) in present:
                raise UsageError(
                    f"{move.origin} gives {move.new} also by its former name, {move.old}; leave {move.old} out"
                )
    return renamed, moves


def move_arguments(root: str, kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a class by their present names.

    Args:
        root: a key of :data:`MOVED`.
        kind: the class.
        arguments: as an earlier version may have named them.
    """
    return _with_groups(arguments, {old: new for old, new in MOVED[root].items() if _has_moved(kind, old, new)})


def notice(moves: Sequence[Move]) -> str:
    """One message for all options that were given by former names."""
    renamed = dict.fromkeys(f"{move.old} is now {move.new}" for move in moves)
    origins = dict.fromkeys(move.origin for move in moves)
    return f"{', '.join(renamed)} (from {', '.join(origins)}); the next release will reject the former names"


def _giver(source: Source) -> str:
    """Name the origin of a source; all typed options have the same."""
    return "the command line" if source.typed else source.origin


def _arguments(source: Source, root: str) -> Iterator[Mapping[str, Any]]:
    """The arguments that a source gives for the class of a root, in their short form and in the long one."""
    options = mapping(source.values.get(root))
    yield options
    yield mapping(options.get("init_args"))


def _former_names(source: Source, root: str) -> dict[str, str]:
    """Former names by which a source gives options that may have moved, each with the present one."""
    return {old: new for old, new in MOVED[root].items() if any(old in each for each in _arguments(source, root))}


def _present_names(source: Source, root: str) -> Iterator[str]:
    """Present names by which a source gives options that have moved; all of a group whose value is not a mapping."""
    for arguments in _arguments(source, root):
        for new in MOVED[root].values():
            group, name = new.split(".")
            if group in arguments and (not isinstance(arguments[group], dict) or name in arguments[group]):
                yield new


def _kinds(sources: Sequence[Source], root: str) -> list[type | None]:
    """The class that the options of each source belong to; None where no source names one that can be imported."""
    named = [_named_class(source, root) for source in sources]
    current = next((kind for kind in named if kind is not None), None)
    kinds = []
    for kind in named:
        current = kind or current
        kinds.append(current)
    return kinds


def _named_class(source: Source, root: str) -> type | None:
    value = source.values.get(root)
    name = value if isinstance(value, str) else mapping(value).get("class_path")
    if not isinstance(name, str):
        return None
    if "." not in name:
        return subclass_named(name, ROOTS[root])
    with suppress(AllowError):  # the check of the sources says what is wrong
        return find_class(name, ROOTS[root], source.typed)
    return None


def _has_moved(kind: type | None, old: str, new: str) -> bool:
    """Whether a class takes an option by its present name, and not by the former one."""
    names = option_names(kind) if kind is not None else None
    if names is None:
        return False
    return old not in names and new.partition(".")[0] in names


def _renamed(source: Source, root: str, names: Mapping[str, str]) -> Source:
    """A source with present names, by former ones, in its values, its lines and its typed option."""
    if not names:
        return source
    options = _with_groups(source.values[root], names)
    if isinstance(options.get("init_args"), dict):
        options["init_args"] = _with_groups(options["init_args"], names)
    option = source.option
    if option is not None:
        path = _new_path(tuple(option.name.split(".")), root, names)
        option = replace(option, name=".".join(str(key) for key in path))
    lines = {_new_path(path, root, names): line for path, line in source.lines.items()}
    return replace(source, values={**source.values, root: options}, lines=lines, option=option)


def _with_groups(arguments: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Arguments in which options that have moved stand in their groups, by their present names."""
    result = {name: value for name, value in arguments.items() if name not in names}
    for old, new in names.items():
        if old in arguments:
            group, name = new.split(".")
            result[group] = {**mapping(result.get(group)), name: arguments[old]}
    return result


def _new_path(path: tuple[str | int, ...], root: str, names: Mapping[str, str]) -> tuple[str | int, ...]:
    """The path of an option by its present name."""
    at = 2 if path[1:2] == ("init_args",) else 1
    if path[0] != root or len(path) <= at or path[at] not in names:
        return path
    return (*path[:at], *names[str(path[at])].split("."), *path[at + 1 :])
