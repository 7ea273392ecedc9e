"""Files in a cache that other users may write to: links are not followed, and files of other users are not read.

Trusted are files of the user who runs this process and of root. Some file systems show all files with one owner (FUSE, NFS
that maps root to nobody); there a file that was just made is what the others are compared with.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

WRITES = os.O_WRONLY | os.O_RDWR
REMEDY = "remove it, or choose another folder for the cache"


class ForeignFileError(PermissionError):
    """Something in a cache that this user's processes did not put there."""


def own_folder(path: Path, root: Path) -> Path:
    """Make a folder of a cache, and check every folder below ``root`` on the way to it.

    Args:
        path: folder below ``root``, or ``root`` itself.
        root: the folder that the user has chosen, which may be reached through links.

    Returns:
        ``path``.

    Raises:
        ForeignFileError: when one of them is a link, or belongs to another user.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root
    for name in path.relative_to(root).parts:
        folder /= name
        folder.mkdir(exist_ok=True)
        check_own(folder, folder.lstat(), stat.S_ISDIR)
    return path


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Descriptor of a file in a cache, made with ``os.O_CREAT`` if missing.

    Raises:
        ForeignFileError: when it is a link, not a regular file, or of another user; for writing, also when it has a second
            name, which may be anywhere.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # a pipe would wait for its other end
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            check_own(path, path.lstat())
        raise
    try:
        status = os.fstat(descriptor)
        check_own(path, status)
        if flags & WRITES and status.st_nlink > 1:
            raise ForeignFileError(f"{path} has a second name, which nothing in a cache has: {REMEDY}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path, most: int) -> bytes:
    """The bytes of a file in a cache.

    Raises:
        ForeignFileError: see :func:`open_own`.
        ValueError: when there are more than ``most``.
    """
    with open(open_own(path), "rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return content


def check_own(path: Path, status: os.stat_result | None = None, is_kind: Callable[[int], bool] = stat.S_ISREG) -> None:
    """Check that nobody else put a file or folder into a cache.

    Args:
        path: path of it.
        status: what the system says about it, links not followed; looked up if it is None.
        is_kind: function of :mod:`stat` for what it has to be, a regular file or a folder.

    Raises:
        ForeignFileError: when it is a link or something else, or belongs to another user.
        FileNotFoundError: when it is not there.
    """
    status = path.lstat() if status is None else status
    if not is_kind(status.st_mode):
        what = "is a link" if stat.S_ISLNK(status.st_mode) else "is not what belongs there"
        raise ForeignFileError(f"{path} {what}, and nothing in a cache is followed elsewhere: {REMEDY}")
    if status.st_uid not in (os.geteuid(), 0) and status.st_uid != _owner_of_new_files(path.parent):
        raise ForeignFileError(f"{path} belongs to another user ({status.st_uid}) and is not used: {REMEDY}")


def _owner_of_new_files(folder: Path) -> int | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:
        return None
