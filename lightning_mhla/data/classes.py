"""Class names of labeled data sets: reading, writing and comparing lists of names."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lightning_mhla.data.lines import read_text
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.listing import shown, visible_folders, without_controls

log = logging.getLogger(__name__)


CLASSES = "classes.txt"
"""Ending of the file name ``PREFIX-classes.txt``. The file lists the classes of the shards ``PREFIX-*.tar``, one per line."""

MOST_CLASSES = 1 << 24
"""Maximum number of classes of a data set."""

LARGEST_LIST = 1 << 26
"""Maximum size in bytes of the file ``PREFIX-classes.txt``, which lists class names."""


def check_count(num_classes: int) -> int:
    """Return a number of classes unchanged after checking that it is within the allowed range.

    Raises:
        ValueError: if the number is below 1 or above 16,777,216.
    """
    if not 1 <= num_classes <= MOST_CLASSES:
        raise ValueError(f"num_classes={num_classes} must be 1 to {MOST_CLASSES}")
    return num_classes


def folder_classes(folder: Path) -> list[str]:
    """List the class names of a folder that has one subfolder per class, in alphabetical order."""
    return [shown(path.name) for path in visible_folders(folder)]


def read_classes(file: Path) -> list[str] | None:
    """Read class names from a text file with one name per line.

    Args:
        file: path of the file, such as ``train-classes.txt``.

    Returns:
        Class names in the order of their labels, 0 for the first line; None if the file does not exist.

    Raises:
        ValueError: if a name occurs twice, a line before the last name is blank, the file is larger than 64 MiB, or it is not
            text in UTF-8, UTF-16 or UTF-32.
    """
    if not file.is_file():
        return None
    if (size := file.stat().st_size) > LARGEST_LIST:
        raise ValueError(f"{file} has {size} bytes, at most {LARGEST_LIST} are read; write one name per line")
    names = read_text(file).split("\n")
    while names and not names[-1]:  # the line feed at the end, and blank lines after it
        names.pop()
    if "" in names:
        raise ValueError(f"{file}: line {names.index('') + 1} is blank; write one name on each line")
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"{file} lists {twice!r} twice")
    return names


def write_classes(file: Path, names: Sequence[str]) -> None:
    """Write class names to a text file atomically, one name per line.

    Args:
        file: path of the file.
        names: class names in the order of their labels. Control characters are written as escapes such as ``\\n``.
    """
    write_whole(file, "".join(f"{without_controls(name)}\n" for name in names))


def data_set_classes(folder: Path, prefix: str) -> list[str] | None:
    """Read the class names that a folder of shards lists for prefixes other than ``prefix``.

    The shards ``PREFIX-0000.tar`` and so on may have a list of class names in ``PREFIX-classes.txt``. The lists of all prefixes
    in a folder should agree.

    Args:
        folder: folder of the shards.
        prefix: prefix of the shards whose own list is ignored.

    Returns:
        Class names in the order of their labels; None if the folder has no list for a different prefix.

    Raises:
        ValueError: if several such lists exist and differ.
    """
    lists = {file: read_classes(file) for file in sorted(folder.glob(f"*-{CLASSES}"))}
    lists.pop(folder / f"{prefix}-{CLASSES}", None)
    files = list(lists)
    for file in files[1:]:
        if lists[file] != lists[files[0]]:
            raise ValueError(f"{files[0]} and {file} do not list the same classes; choose a list with --classes FILE")
    return lists[files[0]] if files else None


def match_classes(part_names: Sequence[str], all_names: Sequence[str], where: str) -> list[int]:
    """Map the labels in a part of a data set to the labels in the complete data set, by class name.

    A warning names the classes that the part lacks.

    Args:
        part_names: class names of the part, such as a validation set, in the order of its labels.
        all_names: class names of the complete data set, in the order of its labels.
        where: location of the part, for messages.

    Returns:
        List whose entry i is the label in the complete data set for label i of the part.

    Raises:
        ValueError: if the part has a class that the complete data set does not have.
    """
    numbers = {name: number for number, name in enumerate(all_names)}
    unknown = [name for name in part_names if name not in numbers]
    if unknown:
        raise ValueError(
            f"{where} has classes that the training data does not have: {_some(unknown)}; it has {_some(all_names)}"
        )
    present = set(part_names)
    missing = [name for name in all_names if name not in present]
    if missing:
        log.warning("%s has no images of the classes %s", where, _some(missing))
    return [numbers[name] for name in part_names]


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f", .. ({len(names)} in all)" if len(names) > 5 else "")
