"""Local cache of remote tar shards with a size limit.

All processes of a machine share one cache folder. A lock file in this folder guards every change of its contents. A shard that
is being downloaded has its disk space reserved. A shard that is being read is locked, so that no process removes it. All locks
are ``flock`` locks, which the kernel releases when a process ends. Unfinished files of a killed process are removed by the next
process that needs space.

The cache counts and removes files only in subfolders whose names are 16 hexadecimal digits, as returned by
:func:`lightning_mhla.data.remote.kept_at`. Everything else in the folder is left alone. Other users may be able to write to the
folder, so symbolic links are not followed and files of other users are not used.
"""

# Longer than other modules because every change of the folder depends on the same locks.

from __future__ import annotations

import fcntl
import io
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mhla_kernels.own_files import ForeignFileError, check_own, open_own, own_folder

from lightning_mhla.data.remote import (
    LARGEST_SIDE_FILE,
    download,
    is_kept_folder,
    kept_at,
    remote_size,
    side_files,
)
from lightning_mhla.data.source import LargerFileError, ShardUnavailableError
from lightning_mhla.data.tables import INDEX, MemberTable, TarCheck, read_table, scan_shard, table_bytes, table_file
from lightning_mhla.system.files import written_whole

log = logging.getLogger(__name__)

WAIT, PATIENCE = 0.05, 600.0
"""Polling interval while the cache has no room, and timeout, in seconds."""


class ShardCache:
    """Local cache of remote shards that stays below a size limit by removing the least recently used shards.

    For each shard, the cache also stores a :class:`lightning_mhla.data.tables.MemberTable`, which lists the files in the shard.

    Args:
        folder: folder of the cache, which several processes may share.
        limit: maximum total size of all shards and tables in bytes, at least twice the size of the largest shard.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.urls: dict[Path, str] = {}
        self.sizes: dict[Path, int] = {}
        self.ahead: object = None
        self._used: dict[Path, float] = {}

    def add(self, urls: Sequence[str]) -> list[Path]:
        """Register remote shards for download on first use.

        Small files that accompany the shards, such as lists of class names, are downloaded at once.

        Args:
            urls: URLs of the shards.

        Returns:
            Path in the cache at which each shard will be stored, in the order of ``urls``. The shards are not downloaded yet.
        """
        paths = [kept_at(url, self.folder) for url in urls]
        if not set(paths) <= set(self.urls):
            self.urls |= dict(zip(paths, urls, strict=True))
            for file, content in side_files(urls, self.folder):
                self._keep(file, content)
        return paths

    def table(self, path: Path) -> MemberTable:
        """Return the table of the files in a remote shard, from the cache if possible and otherwise from the server.

        If the cache has no table, the file with the shard's name and the suffix ``.index.npz`` is downloaded. If the server
        does not have this file, the shard itself is downloaded and scanned.

        Args:
            path: path of the shard in the cache, as returned by :meth:`add`.

        Returns:
            Table with the position and size of each file in the shard.

        Raises:
            ShardUnavailableError: if the download fails.
            ValueError: if the shard is not a valid tar file, or the cache limit is less than twice the size of the shard.
            ForeignFileError: if a file in the cache belongs to a different user.
        """
        file = table_file(path)
        self._folder(path.parent)
        with suppress(FileNotFoundError):
            check_own(file)
        table = read_table(file)
        if table is None:
            downloaded = io.BytesIO()
            with suppress(FileNotFoundError):
                address, mark, query = self.urls[path].partition("?")
                download(f"{address}{INDEX}{mark}{query}", downloaded, min(LARGEST_SIDE_FILE, self.limit))
                self._keep(file, downloaded.getvalue())
                table = read_table(file)
        if table is None:
            with self.open(path):
                table = scan_shard(path, self.urls[path])
            self._keep(file, table_bytes(table))
        self.sizes[path] = table.size
        self._check_size(path, self.limit)
        return table

    def _keep(self, file: Path, content: bytes) -> None:
        """Write a small file to the cache atomically, after removing unused shards if space is needed."""
        # Inside this lock, no other process takes the temporary file for one that a killed process left behind.
        with self._room_for(len(content), None):
            self._folder(file.parent)
            with written_whole(file) as aside:
                aside.write_bytes(content)

    def _folder(self, folder: Path) -> None:
        """Create a folder of the cache if it does not exist, and check that it belongs to this user.

        Raises:
            ForeignFileError: if the folder is a symbolic link, or belongs to a different user.
        """
        own_folder(folder, self.folder.parent)

    @contextmanager
    def open(self, path: Path) -> Iterator[int]:
        """Context manager that protects a shard from removal, and yields a file descriptor for reading the shard.

        The shard is downloaded if it is not in the cache.

        Args:
            path: path of the shard in the cache.

        Raises:
            ShardUnavailableError: if the download fails, or no space becomes free.
            ValueError: if the cache limit is less than twice the size of the shard.
            ForeignFileError: if the file in the cache belongs to a different user.
        """
        try:
            # If the shard is removed before it is locked, its data stays readable through the descriptor.
            descriptor = _open(path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except FileNotFoundError:
            fetched = self.fetch(path)
            assert fetched is not None
            descriptor = fetched
        try:
            now = time.monotonic()
            # the modification time is the time of last use, by which shards are removed; once a second is enough
            if now - self._used.get(path, -1.0) >= 1:
                self._used[path] = now
                os.utime(descriptor)
            yield descriptor
        finally:
            _close(descriptor)

    def fetch(
        self, path: Path, keep: Collection[Path] | None = None, stop: threading.Event | None = None
    ) -> int | None:
        """Download a shard into the cache unless it is already there, and return an open file descriptor of the shard.

        The least recently used shards are removed if space is needed.

        Args:
            path: path of the shard in the cache.
            keep: shards that must not be removed. If this argument is given, the method gives up instead of waiting for free
                space or for another process. With None, it may remove any shard that no process reads, and waits if necessary.
            stop: event that cancels the download; None if nothing cancels it.

        Returns:
            File descriptor of the shard, which is locked against removal until the descriptor is closed. The result is None if
            ``keep`` is given and there is not enough space or another process is downloading the shard.

        Raises:
            ShardUnavailableError: if the download fails, or no space becomes free.
            ValueError: if the cache limit is less than twice the size of the shard.
            DownloadStoppedError: if ``stop`` is set.
            ForeignFileError: if a file in the cache belongs to a different user.
        """
        part = path.with_name(f"{path.name}.part")
        self._folder(path.parent)
        while True:
            descriptor, is_current, complete = _open(part, os.O_RDWR | os.O_CREAT), False, False
            try:
                # A reader waits for a download of another process; a thread that downloads ahead takes a different shard.
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if keep is None else fcntl.LOCK_NB))
                # while this one waited for the lock, a different process may have renamed or removed the file
                is_current = _is_at(descriptor, part)
                if is_current and not os.path.lexists(path):
                    if not self._fill(descriptor, path, keep, stop):
                        return None
                    with self._changing():  # a process that adds up sizes must not see both names, or neither
                        part.rename(path)
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                    complete = True
                    return descriptor
            except BlockingIOError:
                return None
            finally:
                if not complete:
                    if is_current and _is_at(descriptor, part):
                        part.unlink()
                    _close(descriptor)
            with suppress(FileNotFoundError):
                descriptor = _open(path, os.O_RDONLY)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                return descriptor

    def fetch_ahead(self, path: Path, keep: Collection[Path], stop: threading.Event) -> bool:
        """Download a shard before it is needed, and return whether it is now in the cache.

        Args:
            path: path of the shard in the cache.
            keep: shards that must not be removed to free space.
            stop: event that cancels the download.

        Returns:
            False if there is not enough space without removing a shard in ``keep``, or if another process is downloading the
            shard; otherwise True.

        Raises:
            ShardUnavailableError: if the download fails.
            ValueError: if the cache limit is less than twice the size of the shard.
            DownloadStoppedError: if ``stop`` is set.
            ForeignFileError: if a file in the cache belongs to a different user.
        """
        descriptor = self.fetch(path, keep, stop)
        if descriptor is not None:
            _close(descriptor)
        return descriptor is not None

    def _fill(self, descriptor: int, path: Path, keep: Collection[Path] | None, stop: threading.Event | None) -> bool:
        """Download a shard into an open file, after freeing space for it in the cache.

        Args:
            descriptor: descriptor of the file to write to.
            path: path of the shard in the cache.
            keep: shards that must not be removed to free space; None to remove any unused shard and to wait if necessary.
            stop: event that cancels the download; None if nothing cancels it.

        Returns:
            True if the shard was downloaded; False if there is not enough space without removing a shard in ``keep``.
        """
        url, size = self.urls[path], self._size(path)
        with self._room_for(size, keep) as has_room:
            if not has_room:
                return False
            os.ftruncate(descriptor, size)  # reserves the room: other processes count the size of the file
        with open(descriptor, "r+b", closefd=False) as sink:
            try:
                download(url, sink, size, stop, make_check=partial(TarCheck, url))
            except FileNotFoundError as error:
                raise ShardUnavailableError(f"{url} no longer exists; it did when its member table was read") from error
            except LargerFileError as error:
                raise self._resized(path, str(error)) from error
            if sink.tell() < size:
                raise self._resized(path, f"{url} has {sink.tell()} bytes, not the expected {size}")
        self._check_table(path)
        return True

    def _resized(self, path: Path, problem: str) -> ShardUnavailableError:
        """Delete the saved tables of a remote folder in which the size of a shard has changed, and return the error to raise.

        The tables of the other shards are deleted, too, because the shards of a data set are usually replaced together.

        Args:
            path: path of the shard in the cache.
            problem: description of the two sizes, for the error message.
        """
        with self._changing():  # the next run reads the tables, and with them the sizes, from the server again
            for table in path.parent.glob(f"*{INDEX}"):
                table.unlink(missing_ok=True)
        return ShardUnavailableError(f"{problem}; it has changed on the server; start again")

    def _check_table(self, path: Path) -> None:
        """Check that a downloaded shard matches the saved table of its files, and replace the table if it does not.

        Raises:
            ShardUnavailableError: if shard and table differ, because the shard on the server has changed since the table was
                made.
        """
        saved_table = read_table(table_file(path))
        if saved_table is None:
            return
        table = scan_shard(path.with_name(f"{path.name}.part"), self.urls[path])
        if not saved_table.agrees(table):
            self._keep(table_file(path), table_bytes(table))
            raise ShardUnavailableError(
                f"{self.urls[path]} is not the shard that its table was made of: it has changed on the server; start again"
            )

    def check_window(self, paths: Sequence[Path], window: int | None) -> None:
        """Check that the cache has room for all shards that are shuffled together, plus one shard that is downloaded ahead.

        Args:
            paths: paths of the data set's shards in the cache.
            window: number of shards that are shuffled together; None for all.

        Raises:
            ValueError: if the ``window + 1`` largest shards do not fit in the cache.
        """
        sizes = sorted((self.sizes[path] for path in paths if path in self.sizes), reverse=True)
        shards = min(len(sizes), (len(sizes) if window is None else window) + 1)
        needed = sum(sizes[:shards])
        if needed > self.room:
            fitting = int(np.searchsorted(np.cumsum(sizes), self.room, side="right"))
            raise ValueError(
                f"shuffle_window={'null' if window is None else window} shuffles more shards together than fit in "
                f"cache_bytes={self.limit}: they and one prefetched shard have up to {needed} bytes; set shuffle_window to "
                f"{max(1, fitting - 1)}, or preferably half of that, or raise cache_bytes"
            )

    @property
    def room(self) -> int:
        """Space available for shards in bytes: the limit of the cache minus the total size of files that are not shards."""
        other_bytes = 0
        for file in _files(self.folder):
            with suppress(FileNotFoundError):
                other_bytes += 0 if _is_shard(file) else file.lstat().st_size
        return self.limit - other_bytes

    def _check_size(self, path: Path, room: int) -> None:
        if 2 * self.sizes[path] > room:
            tables = f", and the tables of all shards {self.limit - room}" if room < self.limit else ""
            raise ValueError(
                f"cache_bytes={self.limit} is less than two shards: {self.urls[path]} has {self.sizes[path]} bytes{tables}; "
                "set it to several times that"
            )

    def _size(self, path: Path) -> int:
        if path not in self.sizes:
            self.sizes[path] = remote_size(self.urls[path])
        self._check_size(path, self.room)
        return self.sizes[path]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Context manager that locks the cache folder, so that no other process changes its contents at the same time."""
        self._folder(self.folder)
        lock = _open(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            _close(lock)

    @contextmanager
    def _room_for(self, size: int, keep: Collection[Path] | None) -> Iterator[bool]:
        """Context manager that frees space for a new file, and keeps the cache folder locked while the caller creates the file.

        Args:
            size: size of the file in bytes.
            keep: shards that must not be removed; None to remove any shard that no process reads, and to wait for free space.

        Yields:
            Whether there is enough space. This is always True if ``keep`` is None.

        Raises:
            ShardUnavailableError: if ``keep`` is None and not enough space becomes free within ten minutes.
            ValueError: if the file can never fit, because ``size`` exceeds the limit minus the size of all tables.
        """
        if self.folder.exists() and size > self.room:
            raise ValueError(
                f"cache_bytes={self.limit} has no room for {size} bytes beside the {self.limit - self.room} of tables in "
                f"{self.folder}; raise it"
            )
        end = time.monotonic() + PATIENCE
        while True:
            with self._changing():
                has_room = self._make_room(size, keep)
                if has_room or keep is not None:
                    yield has_room
                    return
            if time.monotonic() > end:
                raise ShardUnavailableError(
                    f"{self.folder}: no room for {size} bytes within cache_bytes={self.limit} for {PATIENCE:.0f} s; other runs "
                    "may use the folder with a higher limit: give each run its own cache_dir"
                )
            time.sleep(WAIT)

    def _make_room(self, size: int, keep: Collection[Path] | None) -> bool:
        """Remove unused shards, least recently used first, until the cache has ``size`` free bytes.

        Unfinished downloads of killed processes are removed too. Shards in ``keep`` stay; None protects no shard.

        Returns:
            Whether ``size`` bytes are now free.
        """
        used, shards = 0, []
        for file in _files(self.folder):
            with suppress(FileNotFoundError):
                stat = file.lstat()
                if file.suffix == ".part" and _remove_unlocked(file):
                    continue  # an unfinished file without a lock was left behind by a killed process
                used += stat.st_size
                if file.suffix == ".tar" and (keep is None or file not in keep):
                    shards.append((stat.st_mtime_ns, file, stat.st_size))
        for _, file, file_size in sorted(shards):
            if used + size <= self.limit:
                break
            with suppress(FileNotFoundError):
                if _remove_unlocked(file):
                    used -= file_size
        return used + size <= self.limit

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_used": {}, "ahead": None}


def _files(folder: Path) -> list[Path]:
    """List all files in the subfolders of a cache folder that may contain downloaded shards."""
    inner = [path for path in folder.iterdir() if is_kept_folder(path.name) and path.is_dir() and not path.is_symlink()]
    return [Path(entry.path) for path in inner for entry in os.scandir(path)]


def _is_shard(file: Path) -> bool:
    return file.suffix == ".tar" or (file.suffix == ".part" and file.stem.endswith(".tar"))


def _open(path: Path, flags: int) -> int:
    """Open a cache file and return its descriptor, which is closed automatically in forked child processes.

    A copy of the descriptor in a child process would keep the file locked after this process has released the lock. It would
    also keep the disk space of a removed file in use.

    Args:
        path: path of the file.
        flags: flags for ``os.open``, such as ``os.O_RDONLY``.

    Raises:
        ForeignFileError: if the path is a symbolic link, or the file belongs to a different user.
    """
    with _holding:
        descriptor = open_own(path, flags)
        _held.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    with _holding:
        _held.discard(descriptor)
        os.close(descriptor)


def _close_held() -> None:
    while _held:
        os.close(_held.pop())
    _holding.release()


# The fork waits for the lock, so that the child sees every open descriptor in the set.
_held: set[int] = set()
_holding = threading.Lock()
os.register_at_fork(before=_holding.acquire, after_in_parent=_holding.release, after_in_child=_close_held)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` still refers to the open file ``descriptor``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _remove_unlocked(file: Path) -> bool:
    """Remove a file unless it belongs to another user or a process has locked it; return whether it was removed."""
    try:
        descriptor = _open(file, os.O_RDONLY)
    except ForeignFileError:
        return False
    try:
        # A shard that a process reads has a shared lock, and an unfinished one the exclusive lock of its download.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
    except BlockingIOError:
        return False
    finally:
        _close(descriptor)
    return True
