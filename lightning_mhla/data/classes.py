"""Names of classes: each data set has one list, by which the labels of all its folders and shards are matched."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lightning_mhla.system.files import write_whole
from lightning_mhla.system.listing import shown, visible_folders, without_controls

log = logging.getLogger(__name__)


MOST_CLASSES = 1 << 24
"""Maximum number of classes of a data set."""

LARGEST_LIST = 1 << 26
"""Maximum size of a ``PREFIX-classes.txt``, in bytes."""


def check_count(num_classes: int) -> int:
    """Check that a number of classes is within the allowed range, and return it.

    Raises:
        ValueError: if the number is not positive, or above :data:`MOST_CLASSES`.
    """
    if not 1 <= num_classes <= MOST_CLASSES:
        raise ValueError(f"num_classes={num_classes} must be 1 to {MOST_CLASSES}")
    return num_classes


def folder_classes(folder: Path) -> list[str]:
    """List the class names of a folder with one subfolder per class, in alphabetical order."""
    return [shown(path.name) for path in visible_folders(folder)]


def read_classes(file: Path) -> list[str] | None:
    """Read the class names in a file ``PREFIX-classes.txt``, one per line; None if there is no such file.

    Raises:
        ValueError: if a name occurs twice, or the file has more than :data:`LARGEST_LIST` bytes.
    """
    if not file.is_file():
        return None
    if (size := file.stat().st_size) > LARGEST_LIST:
        raise ValueError(f"{file} has {size} bytes, at most {LARGEST_LIST} are read; write one name per line")
    names = file.read_text(encoding="utf-8").split("\n")
    names = names[:-1] if names and not names[-1] else names
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"{file} lists {twice!r} twice")
    return names


def write_classes(file: Path, names: Sequence[str]) -> None:
    """Write class names to a file ``PREFIX-classes.txt``, one per line; control characters become escapes such as ``\\n``."""
    write_whole(file, "".join(f"{without_controls(name)}\n" for name in names))


def data_set_classes(folder: Path, prefix: str) -> list[str] | None:
    """Read the class names that a folder lists for shards of a different prefix; None if there is no such list.

    Args:
        folder: folder of the shards, with a file ``PREFIX-classes.txt`` for each prefix whose classes have names.
        prefix: prefix whose list is ignored.

    Raises:
        ValueError: if there are several lists, and they differ.
    """
    lists = {file: read_classes(file) for file in sorted(folder.glob("*-classes.txt"))}
    lists.pop(folder / f"{prefix}-classes.txt", None)
    files = list(lists)
    for file in files[1:]:
        if lists[file] != lists[files[0]]:
            raise ValueError(f"{files[0]} and {file} do not list the same classes; choose a list with --classes FILE")
    return lists[files[0]] if files else None


def match_classes(part_names: Sequence[str], all_names: Sequence[str], where: str) -> list[int]:
    """Map the labels of part of a data set, such as a validation set, to those of the complete data set, by class name.

    Args:
        part_names: class names of the part, in the order of its labels.
        all_names: class names of the complete data set, in the order of its labels.
        where: location of the part, for messages.

    Returns:
        List whose entry i is the label in the complete data set for label i of the part.

    Raises:
        ValueError: if the part has a class that the data set does not have.
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
