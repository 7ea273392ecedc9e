"""Options of runs: nested configurations as dotted keys, short names of keys, and values as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

PLACES = re.compile(r"run_dir|ckpt_path|trainer\.default_root_dir|trainer\.logger.*|trainer\.callbacks\..*\.dirpath")
"""Configuration keys of loggers, and of paths to which a run writes. They do not count as differences between runs."""

SEED = "seed_everything"
"""Configuration key of the seed. Runs that differ only in its value are averaged."""


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to one dict with dotted keys, such as ``model.attention.kind``.

    In a list of objects with ``class_path``, such as callbacks, the class name becomes the key of each object. The value of
    this key is the ``class_path``, so that an object without options counts as a difference, too.

    Args:
        values: nested mappings, lists and plain values.
        prefix: dotted key that precedes all keys of the result; empty at the top level.
    """
    if isinstance(values, Mapping) and values:
        parts = (flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items())
        return {key: value for part in parts for key, value in part.items()}
    if (
        isinstance(values, list)
        and values
        and all(isinstance(value, Mapping) and "class_path" in value for value in values)
    ):
        by_class: dict[str, Any] = {}
        for value in values:
            name = str(value["class_path"]).rpartition(".")[2]
            # Further objects of the same class get the keys NAME-2, NAME-3 and so on.
            number = sum(key == name or key.startswith(f"{name}-") for key in by_class)
            by_class[f"{name}-{number + 1}" if number else name] = value
        result: dict[str, Any] = {}
        for name, value in by_class.items():
            result[f"{prefix}.{name}"] = value["class_path"]
            for options in filter(None, (value.get("init_args"), value.get("dict_kwargs"))):
                result |= flat(options, f"{prefix}.{name}")
        return result
    return {prefix: values}


def plain(value: Any) -> str:
    """Return the value of an option as a JSON string, so that values of any type can be compared. 1.0 becomes 1."""
    return json.dumps(_with_whole_numbers(value), default=str)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def option_text(value: Any) -> str:
    """Return the value of an option as text for tables and labels; empty for None."""
    return "" if value is None else value if isinstance(value, str) else plain(value)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Shorten dotted configuration keys to the fewest last parts that still distinguish them.

    Args:
        keys: dotted keys, such as ``model.optimizer.lr``.

    Returns:
        The short name of each key, such as ``lr`` for ``model.optimizer.lr`` if no other key ends in ``lr``.
    """
    names = {}
    for key in keys:
        parts = key.replace(".init_args", "").split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            # With the dots, only complete parts count: the key x.min_lr does not end in lr.
            if sum(f".{other.replace('.init_args', '')}".endswith(f".{name}") for other in keys) == 1:
                break
        names[key] = name
    return names
