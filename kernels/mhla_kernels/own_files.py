"""Safe access to a cache folder that others may write to. Links are not followed, and files of untrusted users are not used.

Files of the user who runs this process and of root are trusted. Some file systems show one owner for all files (FUSE, NFS that
maps root to nobody). On these file systems, the owner of a newly made file is trusted too.
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
    """Error for a cache file or folder that must not be used, for example a link or a file of an untrusted user."""


def own_folder(path: Path, root: Path) -> Path:
    """Create a folder in a cache, and check that it and all folders between it and ``root`` belong to a trusted user.

    Args:
        path: folder below ``root``, or ``root`` itself.
        root: root folder of the cache, which is created if necessary and is not checked; its own path may contain links.

    Returns:
        ``path``.

    Raises:
        ForeignFileError: if a folder is a link, or belongs to an untrusted user.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root
    for name in path.relative_to(root).parts:
        folder /= name
        folder.mkdir(exist_ok=True)  # one by one: parents=True would follow links on the way
        check_own(folder, is_kind=stat.S_ISDIR)
    return path


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file in a cache without following links, and return its file descriptor.

    Args:
        path: path of the file.
        flags: flags for ``os.open``; with ``os.O_CREAT``, a missing file is created.

    Raises:
        ForeignFileError: if the path is a link, is not a regular file, or belongs to an untrusted user. With flags for writing,
            also if the file has a second hard link, whose name may be outside the cache.
        OSError: if the file cannot be opened for a different reason, for example because it does not exist.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # NONBLOCK: opening a pipe would wait
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            check_own(path)
        raise
    try:
        status = os.fstat(descriptor)  # of the open file: the path may be replaced between check and use
        check_own(path, status)
        if flags & WRITES and status.st_nlink > 1:
            raise ForeignFileError(
                f"{path} has a second name (a hard link), so the cache does not write to it: {REMEDY}"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_own(path: Path, status: os.stat_result | None = None, is_kind: Callable[[int], bool] = stat.S_ISREG) -> None:
    """Check that a cache entry has the expected type, is not a link, and belongs to a trusted user.

    Trusted users are the one who runs this process, root, and the owner that the file system shows for new files.

    Args:
        path: path of the file or folder.
        status: result of ``os.lstat`` or ``os.fstat`` for the entry; None to call ``os.lstat`` here.
        is_kind: function that tests ``st_mode`` for the expected type: ``stat.S_ISREG`` or ``stat.S_ISDIR``.

    Raises:
        ForeignFileError: if the path is a link, has a different type, or belongs to an untrusted user.
        FileNotFoundError: if the path does not exist.
    """
    status = path.lstat() if status is None else status
    if not is_kind(status.st_mode):
        problem = "is a link" if stat.S_ISLNK(status.st_mode) else "is not of the expected type"
        raise ForeignFileError(f"{path} {problem}, and nothing is read or written through it: {REMEDY}")
    # The probe writes a file, so it comes last.
    if status.st_uid not in (os.geteuid(), 0) and status.st_uid != _owner_of_new_files(path.parent):
        raise ForeignFileError(f"{path} belongs to another user ({status.st_uid}) and is not used: {REMEDY}")


def _owner_of_new_files(folder: Path) -> int | None:
    try:  # the file system may show another owner than os.geteuid()
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:
        return None
