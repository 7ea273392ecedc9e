"""Configuration files of this package, which the command line accepts as names such as ``mhla://classification/mnist.yaml``."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "mhla://"


def folder() -> Path:
    """Return the folder of the configuration files in the installed package or its source checkout."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "configs"


def names() -> list[str]:
    """Return the names of all configuration files in the package, sorted and without the prefix ``mhla://``."""
    return sorted(str(path.relative_to(folder())) for path in folder().rglob("*.yaml"))


def resolve(arguments: Sequence[str]) -> list[str]:
    """Replace names such as ``mhla://classification/mnist.yaml`` in command-line arguments with the paths of the files.

    If an argument is ``mhla://`` without a name, all names are printed and the program exits.

    Args:
        arguments: command-line arguments without the name of the program.

    Raises:
        FileNotFoundError: if an argument names a file that the package does not have. The message suggests a similar name, or
            lists all names.
    """
    resolved = []
    for word in arguments:
        option, prefix, name = word.partition(PREFIX)
        if prefix and option in ("", "--config=", "-c="):
            available = names()
            if not name:
                sys.stdout.write("".join(f"{PREFIX}{path}\n" for path in available))
                sys.exit(0)
            if name not in available:
                near = difflib.get_close_matches(name, available, 1)
                hint = f"; did you mean {PREFIX}{near[0]}?" if near else f"; there are {', '.join(available)}"
                raise FileNotFoundError(f"{word} is not a configuration of the package{hint}")
            word = f"{option}{folder() / name}"
        resolved.append(word)
    return resolved
