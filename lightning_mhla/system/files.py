"""Atomic writes of files and folders."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = re.compile(r"(.+)\.mhla-[0-9a-f]{12}\.\d+\.part", re.DOTALL)
"""Names of what :func:`beside` names, while it is written. Nobody else gives such names, so what a killed process left can be
told from the downloads and the backups of the user (``thesis.zip.part``, ``last.ckpt.old``)."""

REPLACED = re.compile(r"(.+)\.mhla-[0-9a-f]{12}\.\d+\.old", re.DOTALL)
"""Names of folders that :func:`exchange` is replacing; the group is the name that they had."""


def beside(path: Path, ending: str = "part") -> Path:
    """A new name beside a path, for what becomes it (``part``) or was it (``old``): :data:`UNFINISHED`, :data:`REPLACED`."""
    return path.with_name(f"{path.name}.mhla-{secrets.token_hex(6)}.{os.getpid()}.{ending}")


def write_whole(path: Path, text: str) -> None:
    """Write a text file, its folder too; whoever stops in between leaves the old one, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as aside:
        aside.write_text(text)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives a path beside ``path`` to write a file to; at the end it is flushed to the disk and renamed.

    Whoever stops in between, or fails, leaves ``path`` as it was.
    """
    aside = beside(path)
    aside.touch(exist_ok=False)  # a file of its own: whoever may write here cannot have put a link in its place
    try:
        yield aside
        flush(aside)
        aside.replace(path)
        flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def rebuilt_folder(folder: Path, replaced: Callable[[Path], bool] = lambda _: False) -> Iterator[Path]:
    """Gives an empty folder to write to, which takes the place of ``folder`` at the end.

    Whoever stops in between, or fails, leaves ``folder`` as it was. Files of ``folder`` that are not written again, such as
    notes or a ``.git``, come along, except those that the new ones replace.

    Args:
        folder: made if missing.
        replaced: whether a file of the earlier folder, by its path in it, is one that a new one of another name replaces.

    Raises:
        FileExistsError: when there is a file of this name.
    """
    folder = folder.resolve()  # a link keeps leading to it
    _restore(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True)
    # A mount point cannot be renamed, and a shell would lose its working directory.
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
            _carry(old, folder, is_carried, os.replace)  # what somebody wrote there since
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _carry(
    source: Path, target: Path, is_carried: Callable[[Path], bool], move: Callable[[Path, Path], object]
) -> None:
    """Give the files and the empty folders of ``source`` to ``target``, except those that it has already.

    Raises:
        FileExistsError: when there is a folder where a file belongs, or the other way round.
    """
    for place, folders, files in os.walk(source):
        empty = Path(place).relative_to(source)
        if not (folders or files) and empty.parts and is_carried(empty):
            (target / empty).mkdir(parents=True, exist_ok=True)
    for path in filter(is_carried, _files_below(source)):
        new = target / path
        if os.path.lexists(new) and os.path.samestat(new.lstat(), (source / path).lstat()):
            continue
        if new.is_dir() and not new.is_symlink():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        new.parent.mkdir(parents=True, exist_ok=True)
        move(source / path, new)


def _restore(folder: Path) -> None:
    """Bring back a folder that a process was replacing when it was killed."""
    if os.path.lexists(folder) or not folder.parent.is_dir():
        return
    with suppress(PermissionError):
        for old in folder.parent.iterdir():
            if (match := REPLACED.fullmatch(old.name)) and match[1] == folder.name:
                old.rename(folder)
                return


def _files_below(folder: Path) -> list[Path]:
    """Paths in a folder of all files and links below it."""
    paths = (Path(place) / name for place, folders, files in os.walk(folder) for name in (*files, *folders))
    return [path.relative_to(folder) for path in paths if path.is_symlink() or not path.is_dir()]


def exchange(new: Path, path: Path, keep: bool = False) -> Path | None:
    """Rename a complete file or folder to ``path``, in place of what is there.

    A file replaces a file atomically. A folder that is replaced is called :data:`REPLACED` for a moment, from which
    :class:`lightning_mhla.checkpoints.runs.RunFolder` restores it if the process dies there.

    Args:
        new: the file or folder.
        path: its new name.
        keep: whether a folder that was replaced is kept under its other name, rather than removed.

    Returns:
        Path of the folder that was replaced, if it is kept.
    """
    old = None
    if path.is_dir():
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
    """Remove a file, a link, or a folder with all that it holds; one that is gone, or cannot be removed, is left alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def give_second_name(path: Path, name: Path) -> None:
    """Make ``name`` another name of a file or of all files in a folder, atomically.

    Hard links cost neither time nor space. Where the file system has none, or ``name`` is on another one, it is a copy.
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
    """Flush the contents of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
