"""Replacement of former option names, which configuration files and the command line may use until the next release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning_mhla.checkpoints.former_names import MOVED, in_groups, moved_options
from mhla_tasks.commandline.arguments import UsageError
from mhla_tasks.commandline.merging import ROOTS
from mhla_tasks.commandline.sources import Source, class_path_of, mapping
from mhla_tasks.commandline.trust import AllowError, find_class, subclass_named


@dataclass(frozen=True)
class Move:
    """Former option name that was found in a configuration file or on the command line.

    Attributes:
        old: former name, such as ``data.cache_dir``.
        new: current name, such as ``data.shards.cache_dir``.
        origin: name of the file, or ``the command line``.
    """

    old: str
    new: str
    origin: str


def move_keys(sources: Sequence[Source]) -> tuple[list[Source], list[Move]]:
    """Replace the former names of renamed options with their current names.

    Whether an option was renamed depends on the class that it belongs to. This class may be named in the same source, or else
    in the nearest source of lower priority that names one, or else in the nearest source of higher priority.

    Args:
        sources: configuration files and command-line options, from lowest to highest priority.

    Returns:
        The sources with current names only, and the former names that were replaced.

    Raises:
        UsageError: if the same file, or the command line, sets an option under both its former and its current name.
    """
    moves: list[Move] = []
    renamed = list(sources)
    for root in MOVED:
        if not any(_former_names(source, root) for source in sources):
            continue  # without former names there is no need to import a class
        present = {(_giver(source), f"{root}.{new}") for source in sources for new in _present_names(source, root)}
        for index, kind in enumerate(_kinds(sources, root)):
            source = renamed[index]
            moved = moved_options(root, kind) if kind is not None else {}
            names = {old: new for old, new in _former_names(source, root).items() if old in moved}
            renamed[index] = _renamed(source, root, names)
            moves += [Move(f"{root}.{old}", f"{root}.{new}", _giver(source)) for old, new in names.items()]
        for move in moves:
            if (move.origin, move.new) in present:
                raise UsageError(
                    f"{move.origin} gives {move.new} also by its former name, {move.old}; leave {move.old} out"
                )
    return renamed, moves


def notice(moves: Sequence[Move]) -> str:
    """Return a warning that lists former option names with their current names, and the places where they are used."""
    renamed = dict.fromkeys(f"{move.old} is now {move.new}" for move in moves)
    origins = dict.fromkeys(move.origin for move in moves)
    return f"{', '.join(renamed)} (from {', '.join(origins)}); the next release will reject the former names"


def present_word(word: str) -> str:
    """Replace a former option name in a command-line argument such as ``--name=value`` with the current name.

    The class that the option belongs to is not checked. Arguments without a former name are returned unchanged.
    """
    name, sign, value = word.partition("=")
    path: tuple[str | int, ...] = tuple(name.removeprefix("--").split("."))
    for root, names in MOVED.items():
        path = _new_path(path, root, names)
    return f"--{'.'.join(map(str, path))}{sign}{value}" if word.startswith("--") else word


def _giver(source: Source) -> str:
    """Return the origin of a source as it is named in messages: the name of a file, or ``the command line``."""
    return "the command line" if source.typed else source.origin


def _arguments(source: Source, root: str) -> Iterator[Mapping[str, Any]]:
    """Yield the two mappings that may contain class arguments: the options below the key ``root``, and their ``init_args``."""
    options = mapping(source.values.get(root))
    yield options
    yield mapping(options.get("init_args"))


def _former_names(source: Source, root: str) -> dict[str, str]:
    """Return a mapping from the former names in the options below the key ``root`` to the corresponding current names."""
    return {old: new for old, new in MOVED[root].items() if any(old in options for options in _arguments(source, root))}


def _present_names(source: Source, root: str) -> Iterator[str]:
    """Yield the current names under which a source sets renamed options below the key ``root``.

    Current names have the form ``group.name``. If the value of the group is not a mapping, all options in the group count as
    set.
    """
    for arguments in _arguments(source, root):
        for new in MOVED[root].values():
            group, name = new.split(".")
            if group in arguments and (not isinstance(arguments[group], dict) or name in arguments[group]):
                yield new


def _kinds(sources: Sequence[Source], root: str) -> list[type | None]:
    """Return, for each source, the class of the model or data module to which its options belong.

    Args:
        sources: configuration files and command-line options, from lowest to highest priority.
        root: ``model`` or ``data``.

    Returns:
        One class per source, in the order of ``sources``. All are None if no source names a class that may be imported.
    """
    named = [_named_class(source, root) for source in sources]
    current = next((kind for kind in named if kind is not None), None)
    kinds = []
    for kind in named:
        current = kind or current
        kinds.append(current)
    return kinds


def _named_class(source: Source, root: str) -> type | None:
    name = class_path_of(source.values.get(root))
    if not isinstance(name, str):
        return None
    if "." not in name:
        return subclass_named(name, ROOTS[root])
    with suppress(AllowError):  # a later check of the sources reports the error
        return find_class(name, ROOTS[root], source.typed)
    return None


def _renamed(source: Source, root: str, names: Mapping[str, str]) -> Source:
    """Return a copy of a source in which current option names replace former ones.

    Args:
        source: configuration file or command-line option.
        root: key that contains the options, such as ``data``.
        names: mapping from former to current names.
    """
    if not names:
        return source
    options = in_groups(source.values[root], names)
    if isinstance(options.get("init_args"), dict):
        options["init_args"] = in_groups(options["init_args"], names)
    option = source.option
    if option is not None:
        path = _new_path(tuple(option.name.split(".")), root, names)
        option = replace(option, name=".".join(str(key) for key in path))
    lines = {_new_path(path, root, names): line for path, line in source.lines.items()}
    return replace(source, values={**source.values, root: options}, lines=lines, option=option)


def _new_path(path: tuple[str | int, ...], root: str, names: Mapping[str, str]) -> tuple[str | int, ...]:
    """Replace a former option name in a path of keys with the current name.

    Args:
        path: keys that lead to an option.
        root: key that contains the renamed options, such as ``data``. Paths with a different first key are returned unchanged.
        names: mapping from former to current names.
    """
    at = 2 if path[1:2] == ("init_args",) else 1
    if path[0] != root or len(path) <= at or path[at] not in names:
        return path
    return (*path[:at], *names[str(path[at])].split("."), *path[at + 1 :])
