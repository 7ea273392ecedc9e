"""Functions that list the visible files of a folder, and functions that make names printable or distinct."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from unicodedata import category

log = logging.getLogger(__name__)

NOISE = ("Thumbs.db", "desktop.ini", "__MACOSX", "__pycache__")
"""Names of files and folders that Python and operating systems leave behind. Names such as ``.DS_Store`` are not listed,
because files whose names begin with a dot are hidden anyway."""


LONGEST_NAME = 250
"""Maximum length of a file name in bytes; file systems limit it to 255."""


def is_file_name(name: str) -> bool:
    """Return whether a string is a valid name of a visible file: one path component, not hidden, at most 250 bytes long."""
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return 0 < length <= LONGEST_NAME and not name.startswith(".") and not set("/\0") & set(name)


def is_visible(name: str) -> bool:
    """Return whether a file name is visible: without a leading dot, and not a leftover such as ``Thumbs.db``."""
    return not name.startswith(".") and name not in NOISE


def files_named(folder: Path, name: str) -> list[Path]:
    """Return the sorted paths of all files called ``name`` in a folder and its subfolders.

    Links to folders are followed, but each folder is searched only once.
    """
    paths: list[Path] = []
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited:
            folders.clear()
        elif name in names:
            paths.append(Path(parent, name))
        visited.add(real)
        folders.sort()  # of several links to a folder, the first by name counts
    return sorted(paths)


def visible_files(folder: Path, hidden: list[Path] | None = None) -> list[Path]:
    """List all visible files below a folder, sorted.

    Names with a leading dot, and leftovers of operating systems or Python, such as ``Thumbs.db``, are hidden. Links are
    followed, except a link to a folder that contains the link.

    Args:
        folder: folder to search.
        hidden: list to which the paths of hidden files and folders are appended; None to ignore them.

    Raises:
        OSError: if the folder or one below it cannot be read.
    """
    files: list[Path] = []

    def walk(current: Path, above: frozenset[tuple[int, int]]) -> None:
        status = current.stat()
        # Paths cannot reveal a loop of links, since each round makes a longer path; device and inode can.
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            log.warning("%s is a link to a folder above it and is skipped", shown(current))
            return
        with os.scandir(current) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = current / entry.name
                if not is_visible(entry.name):
                    if hidden is not None:
                        hidden.append(path)
                    continue
                if entry.is_dir():
                    walk(path, above | {identity})
                elif entry.is_file():
                    files.append(path)
                else:
                    log.warning("%s is skipped: it is not a regular file, or it is a broken link", shown(path))

    walk(folder, frozenset())
    return sorted(files)


def visible_folders(folder: Path) -> list[Path]:
    """List the visible folders directly inside a folder, including links to folders, sorted by name."""
    return sorted(path for path in folder.iterdir() if is_visible(path.name) and path.is_dir())


def with_extension(paths: Sequence[Path], extensions: Collection[str]) -> list[Path]:
    """Select the paths with one of the given extensions, in upper or lower case.

    Args:
        paths: paths to select from.
        extensions: extensions in lower case, without the dot.
    """
    return [path for path in paths if path.suffix.lower().lstrip(".") in extensions]


def without_controls(text: str) -> str:
    r"""Return a text as one line, with escapes such as ``\n`` in place of line breaks and control characters."""
    return "".join(
        sign.encode("unicode_escape").decode() if category(sign) in ("Cc", "Cs", "Zl", "Zp") else sign for sign in text
    )


def shown(name: str | os.PathLike[str]) -> str:
    r"""Return a file name as printable text, with escapes such as ``\xe9`` for invalid UTF-8 and unprintable characters."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def distinct_names(names: Sequence[str], reserved: Sequence[str] = ()) -> list[str]:
    """Make class names distinct by adding the label to names that are repeated or reserved, as in ``crane (134)``.

    Args:
        names: class names in the order of their labels, 0 for the first.
        reserved: further names that no class may have.

    Returns:
        Distinct names in the same order, none of which is in ``reserved``.
    """
    results = list(names)
    while True:
        counts = Counter([*reserved, *results])
        equal = [label for label, name in enumerate(names) if counts[results[label]] > 1 and results[label] == name]
        if not equal:
            return results
        for label in equal:  # the new name may be that of a class that has no label yet, such as `crane (134)`
            results[label] = f"{names[label]} ({label})"
