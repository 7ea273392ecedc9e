"""Where options come from: the words of a command line, and the files that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_mhla.system.untrusted import YAML_CHARACTERS, check_yaml


@dataclass(frozen=True)
class Source:
    """One source of options.

    Attributes:
        origin: for messages: a file name, or the argument as typed.
        values: nested options.
    """

    origin: str
    values: dict[str, Any]


def read_sources(arguments: Sequence[str]) -> list[Source]:
    """Every ``--config`` file and every ``--key=value`` of a command line, in order; what cannot be read is left out."""
    sources = []
    for index, word in enumerate(arguments):
        if not word.startswith("-"):
            continue
        key, equals, value = word.partition("=")
        key = key.lstrip("-")
        if not equals:
            following = arguments[index + 1 : index + 2]
            value = following[0] if following and not following[0].startswith("--") else ""
        if key in ("config", "c"):
            sources.append(Source(value, _load(Path(value))))
            continue
        nested: Any = _literal(value)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        sources.append(Source(word if equals else f"{word} {value}".strip(), nested))
    return sources


def mapping(value: Any) -> dict[str, Any]:
    """A value that is a mapping; an empty one for any other."""
    return value if isinstance(value, dict) else {}


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size <= YAML_CHARACTERS else ""
        check_yaml(text)
        loaded = yaml.safe_load(text)
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _literal(text: str) -> Any:
    try:
        check_yaml(text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
