"""Atomic writes of files and folders."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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
    aside = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.part")
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
    aside = Path(tempfile.mkdtemp(dir=folder if fixed else folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    try:
        aside.chmod(0o777 & ~_umask())  # mkdtemp's is for its owner alone
        yield aside
        for path in aside.rglob("*"):
            if path.is_file():
                flush(path)
        if fixed:
            for path in _files_below(folder):
                if replaced(path) and not (aside / path).exists() and aside.name not in path.parts:
                    (folder / path).unlink()
            for path in _files_below(aside):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (aside / path).replace(folder / path)
            return
        for path in _files_below(folder) if folder.is_dir() else []:
            if not (replaced(path) or (aside / path).exists() or (aside / path).is_symlink()):
                (aside / path).parent.mkdir(parents=True, exist_ok=True)
                _link(folder / path, aside / path)
        exchange(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _restore(folder: Path) -> None:
    """Bring back a folder that a process was replacing when it was killed."""
    old = folder.with_name(f"{folder.name}.old")
    if old.is_dir() and not folder.exists():
        old.rename(folder)


def _files_below(folder: Path) -> list[Path]:
    """Paths in a folder of all files and links below it."""
    paths = (Path(place) / name for place, folders, files in os.walk(folder) for name in (*files, *folders))
    return [path.relative_to(folder) for path in paths if path.is_symlink() or not path.is_dir()]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def exchange(new: Path, path: Path) -> None:
    """Rename a complete file or folder to ``path``; what was there is removed afterwards.

    A file replaces a file atomically. A folder that is replaced is called ``NAME.old`` for a moment, from which
    :class:`lightning_mhla.checkpoints.runs.RunFolder` restores it if the process dies there.
    """
    old = path.with_name(f"{path.name}.old")
    if path.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    elif new.is_dir():
        path.unlink(missing_ok=True)
    new.replace(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def give_second_name(path: Path, name: Path) -> None:
    """Make ``name`` another name of a file or of all files in a folder, atomically.

    Hard links cost neither time nor space. Where the file system has none, or ``name`` is on another one, it is a copy.
    """
    name.parent.mkdir(parents=True, exist_ok=True)
    aside = name.with_name(f"{name.name}.{platform.node()}.{os.getpid()}.part")
    try:
        if path.is_dir():
            shutil.copytree(path, aside, copy_function=_link)
        else:
            _link(path, aside)
        exchange(aside, name)
    finally:
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)


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
