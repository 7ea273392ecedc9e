"""Where options come from: the words of a command line, and the files that it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_mhla.system.untrusted import YAML_CHARACTERS, check_yaml, reason

INCLUDES = ("model", "data", "trainer", "init_args", "config")
"""Keys whose value may be the name of a file that holds the options; of other keys, one that ends in .yaml."""

DEPTH = 5
"""Files that name one another, at most."""


@dataclass(frozen=True)
class Source:
    """One source of options.

    Attributes:
        origin: for messages: a file name, or the argument as typed.
        values: nested options; those that a file named in them holds are a source of their own.
        lines: line of each key in the file, by its path; a number stands for a place in a list.
        problem: why the file cannot be read; empty if it can.
        typed: whether the user typed it, on the command line.
    """

    origin: str
    values: dict[str, Any]
    lines: dict[tuple[str | int, ...], int] = field(default_factory=dict)
    problem: str = ""
    typed: bool = False


def read_sources(arguments: Sequence[str]) -> list[Source]:
    """Every ``--config`` file and every ``--key=value`` of a command line in order, each before the files that it names."""
    sources: list[Source] = []
    for index, word in enumerate(arguments):
        if not word.startswith("-"):
            continue
        key, equals, value = word.partition("=")
        key = key.lstrip("-")
        if not equals:
            following = arguments[index + 1 : index + 2]
            value = following[0] if following and not following[0].startswith("--") else ""
        if key in ("config", "c") and value.lstrip().startswith("{"):  # the options themselves
            sources += _with_included(_inline(word if equals else f"{word} {value}", value), Path())
            continue
        if key in ("config", "c"):
            sources += _with_included(_read(Path(value), ()), Path(value).parent)
            continue
        nested: Any = _literal(value)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        sources += _with_included(Source(word if equals else f"{word} {value}".strip(), nested, typed=True), Path())
    return sources


def strongest(sources: Sequence[Source], name: str) -> str | None:
    """The text that the strongest source gives for an option; None where no source does."""
    texts = [value for source in sources if isinstance(value := source.values.get(name), str)]
    return texts[-1] if texts else None


def mapping(value: Any) -> dict[str, Any]:
    """A value that is a mapping; an empty one for any other."""
    return value if isinstance(value, dict) else {}


def _read(path: Path, keys: tuple[str, ...]) -> Source:
    """The options in a file, which belong under ``keys``."""
    if not path.exists() or not str(path).strip(". "):
        return Source(str(path), {})  # the caller says that it is not there
    try:
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


def _inline(origin: str, text: str) -> Source:
    """Options that stand on the command line where the name of a file could."""
    origin = origin if len(origin) <= 60 else f"{origin[:60]}..."
    try:
        check_yaml(text)
        return Source(origin, yaml.safe_load(text), typed=True)
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
    root = yaml.compose(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if root is not None:
        _note_lines(root, (), lines)
    loaded = yaml.safe_load(text)
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
    """A source without the names of files in it, and those files."""
    values, found = _split(source.values, folder, ())
    yield replace(source, values=values)
    for keys, path in found:
        if depth == DEPTH:
            yield Source(str(path), {}, problem=f"{path}: more than {DEPTH} configurations name one another")
            return
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


def _literal(text: str) -> Any:
    try:
        check_yaml(text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
