"""Configurations that the package brings: ``mhla://classification/mnist.yaml``."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "mhla://"


def folder() -> Path:
    """Where they are: in the installed package, or in the checkout that it was installed from."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "configs"


def names() -> list[str]:
    """All of them, as they follow ``mhla://``."""
    return sorted(str(path.relative_to(folder())) for path in folder().rglob("*.yaml"))


def resolve(words: Sequence[str]) -> list[str]:
    """A command line with the paths of the configurations that it names by ``mhla://``; without a name, lists them and ends.

    Raises:
        FileNotFoundError: for one that is not there.
    """
    found = []
    for word in words:
        before, prefix, name = word.partition(PREFIX)
        if prefix and before in ("", "--config=", "-c="):
            known = names()
            if not name:
                sys.stdout.write("".join(f"{PREFIX}{each}\n" for each in known))
                sys.exit(0)
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {PREFIX}{near[0]}?" if near else f"; there are {', '.join(known)}"
                raise FileNotFoundError(f"{word} is no configuration of the package{hint}")
            word = f"{before}{folder() / name}"
        found.append(word)
    return found
