"""Writing, renaming and removal of files and folders, with atomic replacement where possible."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

UNFINISHED = re.compile(r"(.+)\.mhla-[0-9a-f]{12}\.\d+\.part", re.DOTALL)
"""Pattern of the temporary names that :func:`beside` gives to files and folders while they are written; the group is the final
name. No other program uses this pattern, so leftovers of a killed process cannot be mistaken for the user's downloads and
backups (``thesis.zip.part``, ``last.ckpt.old``)."""

REPLACED = re.compile(r"(.+)\.mhla-[0-9a-f]{12}\.\d+\.old", re.DOTALL)
"""Pattern of the temporary names of folders that :func:`exchange` is replacing; the group is the original name."""


def beside(path: Path, ending: str = "part") -> Path:
    """Return an unused temporary path in the same folder as ``path``.

    Args:
        path: the final path.
        ending: ending of the temporary name: ``part`` for new content that will be renamed to ``path``, or ``old`` for
            previous content that is being replaced.
    """
    return path.with_name(f"{path.name}.mhla-{secrets.token_hex(6)}.{os.getpid()}.{ending}")


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically, and create missing folders. An interrupted write leaves the old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as aside:
        aside.write_text(text, encoding="utf-8")


def to_json(value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Format a value as standard JSON, in which NaN and infinity become ``null``, because JSON has no such numbers.

    Args:
        value: nested dicts, lists, strings, numbers, booleans and None.
        indent: number of spaces per level; None for a single line.
        default: function that replaces a value of a different type; None to raise TypeError.
    """
    return json.dumps(_without_nan(value), indent=indent, default=default, allow_nan=False)


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity in nested dicts, lists and tuples with None; tuples become lists."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> None:
    """Write a value to a JSON file atomically, and create missing folders. NaN and infinity become ``null``.

    Args:
        path: path of the file.
        value: nested dicts, lists, strings, numbers, booleans and None.
        indent: number of spaces per level; None for a single line.
        default: function that replaces a value of a different type; None to raise TypeError.
    """
    write_whole(path, to_json(value, indent, default) + "\n")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Context manager that writes a file atomically: it yields a temporary path to write to, and then renames it to ``path``.

    The file is flushed to disk before it is renamed. If the process stops or an error occurs, ``path`` stays unchanged.

    Args:
        path: path of the file. Its folder must exist.
    """
    aside = beside(path)
    # Exclusive creation: another user of the folder cannot have placed a link there that redirects the write.
    aside.touch(exist_ok=False)
    try:
        yield aside
        flush(aside)
        aside.replace(path)
        flush(path.parent)  # without this, a power failure can undo the rename although the contents are on the disk
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def rebuilt_folder(folder: Path, replaced: Callable[[Path], bool] = lambda _: False) -> Iterator[Path]:
    """Context manager that replaces the files of a folder: it yields an empty folder to write to, and then puts it in place.

    If the process stops or an error occurs inside the ``with`` block, ``folder`` stays unchanged. Files of ``folder`` that are
    not written again, such as notes or a ``.git``, are kept, except those for which ``replaced`` returns True. The new folder
    is put in place by renaming. If ``folder`` cannot be renamed, for example because it is a mount point, its files are
    replaced one by one.

    Args:
        folder: the folder to replace; created if missing.
        replaced: function that takes the path of an old file, relative to the folder, and returns whether a new file with a
            different name supersedes it.

    Raises:
        FileExistsError: if ``folder`` is a file, or a kept file and a new folder have the same name.
    """
    folder = folder.resolve()  # a link to the folder must keep pointing to it, so replace the folder and not the link
    _restore(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True)
    # A mount point cannot be renamed, a shell would lose its working directory, and renaming needs a writable parent. In these
    # cases the files are replaced one by one, which is atomic for each file but not for the folder.
    fixed = folder.is_dir() and (
        os.path.ismount(folder) or Path.cwd().is_relative_to(folder) or not os.access(folder.parent, os.W_OK)
    )
    aside = folder / beside(folder).name if fixed else beside(folder)
    aside.mkdir()
    try:
        yield aside
        written = set(_files_below(aside))
        for path in written:
            if not (aside / path).is_symlink():
                flush(aside / path)

        def is_carried(path: Path) -> bool:
            left_by_a_killed_export = UNFINISHED.fullmatch(path.parts[0])
            return path not in written and not replaced(path) and not left_by_a_killed_export

        if fixed:
            for path in _files_below(folder):
                if replaced(path) and path not in written and aside.name not in path.parts:
                    (folder / path).unlink()
            for path in written:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (aside / path).replace(folder / path)
            return
        if folder.is_dir():
            _carry(folder, aside, is_carried, _link)
        old = exchange(aside, folder, keep=True)
        if old is not None:
            # Files that were written to the old folder after the first pass.
            _carry(old, folder, is_carried, os.replace)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _carry(
    source: Path, target: Path, is_carried: Callable[[Path], bool], move: Callable[[Path, Path], object]
) -> None:
    """Move or link files from one folder into another, and recreate the first folder's empty subfolders there.

    Args:
        source: folder to take files from.
        target: folder to put them in.
        is_carried: function that takes the path of a file or an empty folder, relative to ``source``, and returns whether to
            transfer it.
        move: function that takes the old and the new path of a file, and links or renames the file.

    Raises:
        FileExistsError: if ``target`` has a folder where ``source`` has a file, or the reverse.
    """
    for parent, folders, files in os.walk(source):
        empty = Path(parent).relative_to(source)
        if not (folders or files) and empty.parts and is_carried(empty):
            (target / empty).mkdir(parents=True, exist_ok=True)
    for path in filter(is_carried, _files_below(source)):
        new = target / path
        # The first pass linked this file already.
        if os.path.lexists(new) and os.path.samestat(new.lstat(), (source / path).lstat()):
            continue
        if new.is_dir() and not new.is_symlink():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        new.parent.mkdir(parents=True, exist_ok=True)
        move(source / path, new)


def _restore(folder: Path) -> None:
    """Rename a temporarily renamed folder back to ``folder`` if a process was killed while it replaced the folder."""
    if os.path.lexists(folder) or not folder.parent.is_dir():
        return
    with suppress(PermissionError):
        for old in folder.parent.iterdir():
            if (match := REPLACED.fullmatch(old.name)) and match[1] == folder.name:
                old.rename(folder)
                return


def _files_below(folder: Path) -> list[Path]:
    """List all files and links below a folder, as paths relative to the folder."""
    paths = (Path(parent) / name for parent, folders, files in os.walk(folder) for name in (*files, *folders))
    return [path.relative_to(folder) for path in paths if path.is_symlink() or not path.is_dir()]


def exchange(new: Path, path: Path, keep: bool = False) -> Path | None:
    """Rename a complete file or folder to ``path``, replacing an existing file or folder.

    Replacing a file with a file is atomic. A file is removed before a folder takes its place. A folder to replace is first
    renamed to a temporary name. If the process dies before the new folder has its name, the old folder is renamed back by
    :class:`lightning_mhla.checkpoints.runs.RunFolder` or by the next call of :func:`rebuilt_folder`.

    Args:
        new: complete file or folder.
        path: path to rename it to.
        keep: whether to keep a replaced folder under its temporary name rather than remove it.

    Returns:
        Path of the replaced folder if it is kept, otherwise None.
    """
    old = None
    if path.is_dir():  # rename() replaces a file in one step, but not a folder with content: two steps, see REPLACED
        old = beside(path, "old")
        path.rename(old)
    elif new.is_dir():
        path.unlink(missing_ok=True)
    new.replace(path)
    flush(path.parent)
    if old is not None and not keep:
        remove(old)
        return None
    return old


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents. A missing path and errors inside a folder are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def give_second_name(path: Path, name: Path) -> None:
    """Make a file or folder available under a second path. An incomplete file or folder never appears there.

    A file gets a hard link, which needs no additional space. A folder becomes a new folder of hard links. Files are copied if
    the file system does not support hard links, or if the second path is on a different file system.

    Args:
        path: existing file or folder.
        name: second path; an existing file or folder at this path is replaced, as by :func:`exchange`.
    """
    name.parent.mkdir(parents=True, exist_ok=True)
    aside = beside(name)
    try:
        if path.is_dir():
            shutil.copytree(path, aside, copy_function=_link)
        else:
            _link(path, aside)
        exchange(aside, name)
    finally:
        remove(aside)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # not supported, another device, or too many links
        shutil.copy2(source, target, follow_symlinks=False)
        if not Path(target).is_symlink():
            flush(Path(target))


def flush(path: Path) -> None:
    """Flush the contents of a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
