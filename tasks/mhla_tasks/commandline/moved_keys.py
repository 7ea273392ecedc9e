"""Options that were renamed. Configurations and the command line may use the former names for one release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning_mhla.checkpoints.former_names import MOVED, in_groups, moved_options
from mhla_tasks.commandline.arguments import UsageError
from mhla_tasks.commandline.merging import ROOTS
from mhla_tasks.commandline.sources import Source, mapping
from mhla_tasks.commandline.trust import AllowError, find_class, subclass_named


@dataclass(frozen=True)
class Move:
    """An option that a source sets by its former name.

    Attributes:
        old: former name, such as ``data.cache_dir``.
        new: present name, such as ``data.shards.cache_dir``.
        origin: file that sets the option, or the command line.
    """

    old: str
    new: str
    origin: str


def move_keys(sources: Sequence[Source]) -> tuple[list[Source], list[Move]]:
    """Replace former names of options by the present ones.

    Whether an option was renamed depends on the class that it belongs to: the class that its source names, else the last one
    that a source of lower priority names, else the first one that a source of higher priority names.

    Args:
        sources: sources of options, in ascending order of priority.

    Returns:
        The sources with present names only, and the options that were renamed.

    Raises:
        UsageError: if one file, or the command line, sets an option by both names.
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
    """Write one message for all options that were set by former names."""
    renamed = dict.fromkeys(f"{move.old} is now {move.new}" for move in moves)
    origins = dict.fromkeys(move.origin for move in moves)
    return f"{', '.join(renamed)} (from {', '.join(origins)}); the next release will reject the former names"


def present_word(word: str) -> str:
    """Return an argument of a command line with the present name of its option, whatever class takes it, for comparisons."""
    name, sign, value = word.partition("=")
    path: tuple[str | int, ...] = tuple(name.removeprefix("--").split("."))
    for root, names in MOVED.items():
        path = _new_path(path, root, names)
    return f"--{'.'.join(map(str, path))}{sign}{value}" if word.startswith("--") else word


def _giver(source: Source) -> str:
    """Return the origin of a source. All options typed on the command line have the same origin."""
    return "the command line" if source.typed else source.origin


def _arguments(source: Source, root: str) -> Iterator[Mapping[str, Any]]:
    """Yield the arguments that a source sets for the class of a root: directly below the root, and in ``init_args``."""
    options = mapping(source.values.get(root))
    yield options
    yield mapping(options.get("init_args"))


def _former_names(source: Source, root: str) -> dict[str, str]:
    """Return the former names that a source uses, each with the present name."""
    return {old: new for old, new in MOVED[root].items() if any(old in each for each in _arguments(source, root))}


def _present_names(source: Source, root: str) -> Iterator[str]:
    """Yield the present names of renamed options that a source sets; all of a group whose value is not a mapping."""
    for arguments in _arguments(source, root):
        for new in MOVED[root].values():
            group, name = new.split(".")
            if group in arguments and (not isinstance(arguments[group], dict) or name in arguments[group]):
                yield new


def _kinds(sources: Sequence[Source], root: str) -> list[type | None]:
    """Return the class that the options of each source belong to; None if no source names one that can be imported."""
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
    with suppress(AllowError):  # a later check of the sources reports the error
        return find_class(name, ROOTS[root], source.typed)
    return None


def _renamed(source: Source, root: str, names: Mapping[str, str]) -> Source:
    """Replace former names in the values, line numbers and typed option of a source; ``names`` maps former to present."""
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
    """Return the path of an option with its present name in place of the former one."""
    at = 2 if path[1:2] == ("init_args",) else 1
    if path[0] != root or len(path) <= at or path[at] not in names:
        return path
    return (*path[:at], *names[str(path[at])].split("."), *path[at + 1 :])
