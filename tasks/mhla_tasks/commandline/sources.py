"""Reading of options from configuration files and the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_mhla.system.untrusted import YAML_CHARACTERS, parse_yaml, reason
from mhla_tasks.commandline.arguments import CommandLine, Option
from mhla_tasks.commandline.shipped import PREFIX, names

INCLUDES = ("model", "data", "trainer", "init_args", "config")
"""Keys whose value may be the path of any file with options. Other values are paths only if they end in .yaml or .yml."""

DEPTH = 5
"""Maximum nesting depth of files that include one another."""

NUMBER = re.compile(
    r"""^( [-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)? | [-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    | [-+]?\.(inf|Inf|INF) | \.(nan|NaN|NAN) )$""",
    re.VERBOSE,
)
"""Pattern of floating-point numbers in YAML 1.2, where ``1e-3`` is a number; in YAML 1.1 it is a text."""


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen when this is imported
    """Safe YAML loader that interprets plain values as jsonargparse does: ``1e-3`` as a number, ``2026-11-25`` as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  the name is yaml's
        letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":float", ":timestamp"))]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for tag in ("binary", "set", "timestamp", "omap", "pairs"):  # values of types that no option accepts
    Loader.add_constructor(f"tag:yaml.org,2002:{tag}", Loader.construct_undefined)
Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+0123456789."))


@dataclass(frozen=True)
class Source:
    """Configuration file or command-line option, with the option values that it sets.

    Attributes:
        origin: file name, or the option as typed on the command line, for messages.
        values: nested mapping of options. If they refer to another configuration file, that file is a separate source.
        lines: mapping from the path of a key to its line number in the file. A path consists of keys and list indices.
        problem: error message if the file cannot be read, or the text of the option is invalid; otherwise empty.
        typed: whether the source is on the command line.
        option: the parsed command-line option; None for a file, or if ``--config`` is given a YAML mapping instead of a file
            name.
    """

    origin: str
    values: dict[str, Any]
    lines: dict[tuple[str | int, ...], int] = field(default_factory=dict)
    problem: str = ""
    typed: bool = False
    option: Option | None = None


def read_sources(line: CommandLine) -> list[Source]:
    """Read the options of a command from its configuration files and its command line.

    The files are those that ``--config`` names. Without ``--config``, the file is the saved configuration of the run,
    ``config.yaml`` in the folder that ``--run_dir`` names, if it exists. The command line overrides all of them.

    A file may name further files as values. ``config: base.yaml`` names a base file, whose options the referring file
    overrides. A file name at any other key, such as ``model: large.yaml``, stands for the options below that key; they override
    those of the referring file. Options on the command line may name files in the same ways.

    Args:
        line: the parsed command line.

    Returns:
        One source for each file and each command-line option with a value, except ``--config``, from lowest to highest
        priority. A file that cannot be read gives a source with an error message in ``problem``.
    """
    files: list[Source] = []
    if not line.asks_for("config") and (folder := line.last("run_dir")):
        run_configuration = Path(folder) / "config.yaml"
        if run_configuration.is_file():
            files += _with_included(_read(run_configuration, ()), run_configuration.parent)
    typed: list[Source] = []
    for option in line.options:
        text = option.value or ""
        if option.name == "config" and text.lstrip().startswith("{"):
            files += _with_included(_inline(option.text, text), Path())
        elif option.name == "config":
            files += _with_included(_read(Path(text), ()), Path(text).parent)
        elif option.value is not None:
            typed += _with_included(_typed(option), Path())
    return [*(_inside(source, line.command) for source in files), *typed]


def _typed(option: Option) -> Source:
    nested: Any = literal(option.value or "")
    if isinstance(nested, dict | list):
        try:
            _note_lines(yaml.compose(option.value or "", Loader), (), {})
        except ValueError as error:
            return Source(option.text, {}, problem=f"{option.text}: {error}")
    for part in reversed(option.name.split(".")):
        nested = {part: nested}
    return Source(option.text, nested, typed=True, option=option)


def _inside(source: Source, command: str) -> Source:
    """Move options to the top level if all of them are below the name of the command, as in a file that starts with ``fit:``.

    Args:
        source: configuration file. If it has other top-level keys, it is returned unchanged.
        command: name of the command that runs.
    """
    options = source.values.get(command)
    if set(source.values) != {command} or not isinstance(options, dict):
        return source
    lines = {path[1:]: line for path, line in source.lines.items() if len(path) > 1}
    return replace(source, values=options, lines=lines)


def mapping(value: Any) -> dict[str, Any]:
    """Return ``value`` if it is a dict, and an empty dict otherwise."""
    return value if isinstance(value, dict) else {}


def class_path_of(value: Any) -> Any:
    """Return the class path in the options of a model or data module; None if they do not name a class.

    Args:
        value: class path, or mapping with ``class_path`` and ``init_args``.
    """
    return value if isinstance(value, str) else mapping(value).get("class_path")


def _read(path: Path, keys: tuple[str, ...]) -> Source:
    """Read the options in a YAML file. If this fails, the returned source contains an error message instead of options.

    Args:
        path: path of the file.
        keys: keys below which the options are nested in the result; empty for options at the top level.
    """
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
    return Source(str(path), values, {(*keys, *key_path): line for key_path, line in lines.items()})


def _missing(path: str) -> str:
    near = path.partition("configs/")[2]
    hint = f"the package brings it as {PREFIX}{near}" if near in names() else f"{PREFIX} lists those of the package"
    return f"--config={path}: the file does not exist; {hint}"


def _inline(origin: str, text: str) -> Source:
    """Parse a YAML mapping that is given on the command line in place of a file name.

    Args:
        origin: option as typed on the command line, for messages.
        text: YAML text of the mapping.

    Returns:
        Source with the options or, if the text is invalid, with an error message in ``problem`` instead.
    """
    origin = origin if len(origin) <= 60 else f"{origin[:60]}..."
    try:
        values = parse_yaml(text, Loader)
        _note_lines(yaml.compose(text, Loader), (), {})
        return Source(origin, values, typed=True)
    except yaml.YAMLError as error:
        return Source(origin, {}, problem=f"{origin}: {_where(error)}")
    except (ValueError, RecursionError) as error:
        return Source(origin, {}, problem=f"{origin}: {reason(error)}")


def _parse(path: Path) -> tuple[dict[str, Any], dict[tuple[str | int, ...], int]]:
    """Parse a configuration file.

    Returns:
        Nested options, and a mapping from the path of each key to its line number.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the path is not that of a regular file, or the file is too large, is not UTF-8, contains no options, or
            sets a key twice.
        yaml.YAMLError: if the file is not valid YAML.
    """
    if path.is_dir():
        raise ValueError("is a folder, not a file; name the file in it")
    if not path.is_file():
        raise ValueError("is not a regular file; write its content to one, because each process of a run reads it")
    if path.stat().st_size > YAML_CHARACTERS:
        raise ValueError(f"is too large for a configuration: {path.stat().st_size} bytes (at most {YAML_CHARACTERS})")
    # Some editors put a byte order mark in front of the text.
    text = path.read_text(encoding="utf-8-sig")
    loaded = parse_yaml(text, Loader)
    lines: dict[tuple[str | int, ...], int] = {}
    # The nodes give line numbers and repeated keys, which yaml.load discards; the loaded values are used for everything else.
    _note_lines(yaml.compose(text, Loader), (), lines)
    if loaded is None:
        raise ValueError("contains no options: it is empty or has only comments")
    if not isinstance(loaded, dict):
        raise ValueError(f"must contain named options (KEY: VALUE), not a {type(loaded).__name__}")
    return loaded, lines


def _note_lines(node: yaml.Node, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*path, index), lines)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        key_path, line = (*path, str(key.value)), key.start_mark.line + 1
        if key_path in lines and key.value != "<<":
            places = " and in line ".join(map(str, sorted({lines[key_path], line})))
            raise ValueError(f"{'.'.join(map(str, key_path))} is given twice, in line {places}; remove one")
        lines[key_path] = line
        _note_lines(value, key_path, lines)


def _where(error: yaml.YAMLError) -> str:
    """Describe a YAML error in one line, with its line and column number."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or reason(error)
    if mark is None:
        return f"is not YAML ({problem})"
    context = getattr(error, "context", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {f'{context}: ' if context else ''}{problem}"


def _tab_hint(path: Path) -> str:
    """Return a hint that a line of a file is indented with a tab, which YAML does not allow; empty if no line is."""
    lines = path.read_bytes().splitlines()
    number = next((number for number, line in enumerate(lines, 1) if b"\t" in line[: -len(line.lstrip()) or None]), 0)
    return f"; line {number} is indented by a tab: YAML accepts only spaces" if number else ""


def _with_included(source: Source, folder: Path, depth: int = 0) -> Iterator[Source]:
    """Yield a source and the files that it refers to as separate sources, from lowest to highest priority.

    A file that the top-level key ``config`` names has a lower priority than the source. A file that any other key names, such
    as ``model``, has a higher priority.

    Args:
        source: source whose values may refer to files.
        folder: folder to which relative file names refer.
        depth: number of references that lead from the command line to the source.
    """
    values, named_files = _split(source.values, folder, ())
    bases = [path for keys, path in named_files if keys == ("config",)]
    parts = [(keys, path) for keys, path in named_files if keys != ("config",)]
    if named_files and depth == DEPTH:
        path = named_files[0][1]
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
    plain_values: dict[str, Any] = {}
    named_files: list[tuple[tuple[str, ...], Path]] = []
    for name, value in values.items():
        key = str(name)
        if isinstance(value, dict):
            plain_values[name], inner = _split(value, folder, (*keys, key))
            named_files += inner
        elif isinstance(value, str) and _names_a_file(key, value, folder):
            named_files.append(((*keys, key), folder / value))
        else:
            plain_values[name] = value
    return plain_values, named_files


def _names_a_file(key: str, value: str, folder: Path) -> bool:
    if key not in INCLUDES and not value.endswith((".yaml", ".yml")):
        return False
    return os.path.isfile(folder / value)  # Path.is_file raises an error if the value is too long


def literal(text: str) -> Any:
    """Parse a string as YAML; return the string itself if it is not valid YAML."""
    try:
        return parse_yaml(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
