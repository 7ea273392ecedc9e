"""Files of a folder as a user means them: without hidden ones, links followed, names of any encoding."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from unicodedata import category

log = logging.getLogger(__name__)

NOISE = ("Thumbs.db", "desktop.ini", "__MACOSX", "__pycache__")
"""Files and folders that Python and other systems leave behind; those of macOS (``._a.jpg``, ``.DS_Store``) are hidden."""


LONGEST_NAME = 250
"""Bytes of the name of a file, which file systems limit to 255."""


def is_file_name(name: str) -> bool:
    """Whether a text can be the name of a visible file: one part of a path, so that it leads nowhere else."""
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return 0 < length <= LONGEST_NAME and not name.startswith(".") and not set("/\0") & set(name)


def is_visible(name: str) -> bool:
    """Whether a file or folder of this name is the user's: neither hidden (``.git``, ``.ipynb_checkpoints``) nor noise."""
    return not name.startswith(".") and name not in NOISE


def visible_files(folder: Path, hidden: list[Path] | None = None) -> list[Path]:
    """All visible files below a folder, sorted; links to files and folders are followed, a link to a folder above is not.

    Args:
        folder: where to look.
        hidden: list that takes the hidden files and folders, for messages.

    Raises:
        OSError: for a folder below that cannot be read.
    """
    found: list[Path] = []

    def walk(place: Path, above: frozenset[tuple[int, int]]) -> None:
        status = place.stat()
        here = (status.st_dev, status.st_ino)
        if here in above:
            log.warning("%s is a link to a folder above it, and is left out", shown(place))
            return
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = place / entry.name
                if not is_visible(entry.name):
                    if hidden is not None:
                        hidden.append(path)
                    continue
                if entry.is_dir():
                    walk(path, above | {here})
                elif entry.is_file():
                    found.append(path)
                else:
                    log.warning("%s is left out: it is not a file, or a link to nothing", shown(path))

    walk(folder, frozenset())
    return sorted(found)


def visible_folders(folder: Path) -> list[Path]:
    """Visible folders directly inside a folder, links to folders included, sorted by name."""
    return sorted(path for path in folder.iterdir() if is_visible(path.name) and path.is_dir())


def with_extension(paths: Sequence[Path], extensions: Collection[str]) -> list[Path]:
    """Select the paths that end in one of the extensions, in lower or upper case."""
    return [path for path in paths if path.suffix.lower().lstrip(".") in extensions]


def without_controls(text: str) -> str:
    r"""Text in one line: line breaks and other control characters as ``\n``, all others as they are."""
    return "".join(
        sign.encode("unicode_escape").decode() if category(sign) in ("Cc", "Cs", "Zl", "Zp") else sign for sign in text
    )


def shown(name: str | os.PathLike[str]) -> str:
    r"""A file name as text: bytes that are not UTF-8 as ``\xe9``, control characters as ``\n``."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
