"""Where options come from: the files that a command line names, and the options that were typed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_mhla.system.untrusted import YAML_CHARACTERS, check_yaml, reason
from mhla_tasks.commandline.arguments import CommandLine, Option
from mhla_tasks.commandline.shipped import PREFIX, names

INCLUDES = ("model", "data", "trainer", "init_args", "config")
"""Keys whose value may be the name of a file that holds the options; of other keys, one that ends in .yaml."""

DEPTH = 5
"""Files that name one another, at most."""

NUMBER = re.compile(
    r"""^( [-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)? | [-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    | [-+]?\.(inf|Inf|INF) | \.(nan|NaN|NAN) )$""",
    re.VERBOSE,
)
"""Numbers that are not integers, as YAML 1.2 writes them: ``1e-3`` is one."""


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen when this is imported
    """Plain values of YAML as jsonargparse reads them: ``1e-3`` is a number, ``2026-11-25`` a text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  the name is yaml's
        letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":float", ":timestamp"))]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for tag in ("binary", "set", "timestamp", "omap", "pairs"):  # values that no option takes
    Loader.add_constructor(f"tag:yaml.org,2002:{tag}", Loader.construct_undefined)
Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+0123456789."))


@dataclass(frozen=True)
class Source:
    """One source of options.

    Attributes:
        origin: for messages: a file name, or the option as typed.
        values: nested options; those that a file named in them holds are a source of their own.
        lines: line of each key in the file, by its path; a number stands for a place in a list.
        problem: why the file cannot be read; empty if it can.
        typed: whether the user typed it, on the command line.
        option: the option that was typed; None for files, and for options that stand where a file could.
    """

    origin: str
    values: dict[str, Any]
    lines: dict[tuple[str | int, ...], int] = field(default_factory=dict)
    problem: str = ""
    typed: bool = False
    option: Option | None = None


def read_sources(line: CommandLine) -> list[Source]:
    """The sources of a command line, the weakest first: files in order, then the typed options in order.

    A file comes before those that it names. Without ``--config``, the first file is the configuration that the run of
    ``--run_dir`` was started with.
    """
    files: list[Source] = []
    if not line.asks_for("config") and (folder := line.last("run_dir")):
        kept = Path(folder) / "config.yaml"
        files += _with_included(_read(kept, ()), kept.parent) if kept.is_file() else []
    for text, option in ((option.value, option) for option in line.options if option.name == "config"):
        if text is not None and text.lstrip().startswith("{"):
            files += _with_included(_inline(option.text, text), Path())
        else:
            files += _with_included(_read(Path(text or ""), ()), Path(text or "").parent)
    typed: list[Source] = []
    for option in line.options:
        if option.name != "config" and option.value is not None:
            typed += _with_included(_typed(option), Path())
    return [*(_inside(source, line.command) for source in files), *typed]


def _typed(option: Option) -> Source:
    nested: Any = literal(option.value or "")
    for part in reversed(option.name.split(".")):
        nested = {part: nested}
    return Source(option.text, nested, typed=True, option=option)


def _inside(source: Source, command: str) -> Source:
    """The options of a command, where a file keeps them under its name."""
    options = source.values.get(command)
    if set(source.values) != {command} or not isinstance(options, dict):
        return source
    lines = {path[1:]: line for path, line in source.lines.items() if len(path) > 1}
    return replace(source, values=options, lines=lines)


def mapping(value: Any) -> dict[str, Any]:
    """A value that is a mapping; an empty one for any other."""
    return value if isinstance(value, dict) else {}


def _read(path: Path, keys: tuple[str, ...]) -> Source:
    """The options in a file, which belong under ``keys``."""
    try:
        if not path.exists():
            return Source(str(path), {}, problem=_missing(str(path)))
        values, lines = _parse(path)
    except OSError as error:
        return Source(str(path), {}, problem=f"{path} cannot be read ({reason(error)})")
    except UnicodeDecodeError as error:
        return Source(str(path), {}, problem=f"{path} is not text in UTF-8 ({error.reason} at byte {error.start})")
    except yaml.YAMLError as error:
        return Source(str(path), {}, problem=f"{path}: {_where(error)}{_tab_hint(path)}")
    except (ValueError, RecursionError) as error:
        return Source(str(path), {}, problem=f"{path}: {reason(error)}")
    for key in reversed(keys):
        values = {key: values}
    return Source(str(path), values, {(*keys, *place): line for place, line in lines.items()})


def _missing(path: str) -> str:
    near = path.partition("configs/")[2]
    hint = f"the package brings it as {PREFIX}{near}" if near in names() else f"{PREFIX} lists those of the package"
    return f"--config={path}: the file does not exist; {hint}"


def _inline(origin: str, text: str) -> Source:
    """Options that stand on the command line where the name of a file could."""
    origin = origin if len(origin) <= 60 else f"{origin[:60]}..."
    try:
        check_yaml(text)
        return Source(origin, yaml.load(text, Loader), typed=True)
    except yaml.YAMLError as error:
        return Source(origin, {}, problem=f"{origin}: {_where(error)}")
    except (ValueError, RecursionError) as error:
        return Source(origin, {}, problem=f"{origin}: {reason(error)}")


def _parse(path: Path) -> tuple[dict[str, Any], dict[tuple[str | int, ...], int]]:
    """Nested options in a file, and the line of each.

    Raises:
        ValueError: for a file that is not a configuration, and for a key that comes twice.
    """
    if not path.is_file():
        raise ValueError("is a folder, not a file; name the file in it" if path.is_dir() else "does not exist")
    if path.stat().st_size > YAML_CHARACTERS:
        raise ValueError(f"is no configuration: {path.stat().st_size} bytes (at most {YAML_CHARACTERS})")
    text = path.read_text(encoding="utf-8-sig")
    check_yaml(text)
    lines: dict[tuple[str | int, ...], int] = {}
    root = yaml.compose(text, Loader)
    if root is not None:
        _note_lines(root, (), lines)
    loaded = yaml.load(text, Loader)
    if loaded is None:
        raise ValueError("holds no options: it is empty, or holds comments alone")
    if not isinstance(loaded, dict):
        raise ValueError(f"holds a {type(loaded).__name__}, where named options (KEY: VALUE) are needed")
    return loaded, lines


def _note_lines(node: yaml.Node, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*path, index), lines)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        place, line = (*path, str(key.value)), key.start_mark.line + 1
        if lines.setdefault(place, line) != line and key.value != "<<":
            raise ValueError(
                f"{'.'.join(map(str, place))} is given twice, in line {lines[place]} and in line {line}; remove one"
            )
        _note_lines(value, place, lines)


def _where(error: yaml.YAMLError) -> str:
    """Describe what is wrong with the text of a file, and where."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or reason(error)
    if mark is None:
        return f"is not YAML ({what})"
    context = getattr(error, "context", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {f'{context}: ' if context else ''}{what}"


def _tab_hint(path: Path) -> str:
    """The cause of most such errors that nobody sees, if a file has it."""
    lines = path.read_bytes().splitlines()
    number = next((number for number, line in enumerate(lines, 1) if b"\t" in line[: -len(line.lstrip()) or None]), 0)
    return f"; line {number} is indented by a tab: YAML takes spaces alone" if number else ""


def _with_included(source: Source, folder: Path, depth: int = 0) -> Iterator[Source]:
    """A source without the names of files in it, and those files; a base that it names by ``config`` is weaker than it."""
    values, found = _split(source.values, folder, ())
    bases = [path for keys, path in found if keys == ("config",)]
    parts = [(keys, path) for keys, path in found if keys != ("config",)]
    if found and depth == DEPTH:
        path = found[0][1]
        yield Source(str(path), {}, problem=f"{path}: more than {DEPTH} configurations name one another")
        return
    for path in bases:
        yield from _with_included(_read(path, ()), path.parent, depth + 1)
    yield replace(source, values=values)
    for keys, path in parts:
        yield from _with_included(_read(path, keys), path.parent, depth + 1)


def _split(
    values: dict[str, Any], folder: Path, keys: tuple[str, ...]
) -> tuple[dict[str, Any], list[tuple[tuple[str, ...], Path]]]:
    rest: dict[str, Any] = {}
    found: list[tuple[tuple[str, ...], Path]] = []
    for name, value in values.items():
        key = str(name)
        if isinstance(value, dict):
            rest[name], inner = _split(value, folder, (*keys, key))
            found += inner
        elif isinstance(value, str) and _names_a_file(key, value, folder):
            found.append(((*keys, key), folder / value))
        else:
            rest[name] = value
    return rest, found


def _names_a_file(key: str, value: str, folder: Path) -> bool:
    if key not in INCLUDES and not value.endswith((".yaml", ".yml")):
        return False
    try:
        return (folder / value).is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def literal(text: str) -> Any:
    """The value that a text means in YAML; the text itself where it means none."""
    try:
        check_yaml(text)
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
