"""Tables of the files in tar shards, which give the position of each file in its shard.

A table is saved beside its shard or in the user's cache folder, so that the shard is scanned only once.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import tarfile
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from mhla_kernels.own_files import check_own, own_folder

from lightning_mhla.data.source import BrokenContentError
from lightning_mhla.system.files import written_whole
from lightning_mhla.system.untrusted import BROKEN, reason

log = logging.getLogger(__name__)

LONGEST_NAME, MOST_EXTENSIONS, LONGEST_TAIL = 1024, 64, 1 << 24
"""Limits of a shard: characters of a member's name, number of different extensions, bytes of zeros at the file's end."""

MOST_MEMBERS = 100_000
"""Maximum number of members (files) of a shard. Scanning 100,000 members takes two seconds."""

LONGEST_HEADER, MOST_HEADERS = 1 << 20, 1 << 24
"""Maximum size in bytes of an extended header (PAX, GNU), which is read into memory, and of all such headers in a shard."""

PARSING = threading.Lock()
"""Lock to hold while NumPy parses array headers as Python source, which is not thread-safe before Python 3.11.8 and 3.12.2
(python/cpython #106905)."""

INDEX = ".index.npz"
"""Suffix of the file beside a shard that contains the table of the files in the shard."""


def default_cache() -> Path:
    """Return the user's cache folder for shards and file tables: ``lightning-mhla`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-mhla"


@dataclass(frozen=True, eq=False)
class MemberTable:
    """Table with the position and size of each file in a tar shard, with one row per sample and one column per extension.

    Attributes:
        keys: keys of the n samples, which are the file names up to the first dot, ``[n]`` str.
        extensions: extensions of the files, in lower case.
        offsets: position of each file's content in the shard in bytes, ``[n, len(extensions)]`` int64; -1 if a sample has no
            file with this extension.
        sizes: size of each file in bytes, ``[n, len(extensions)]`` int64.
        size: size of the shard in bytes.
        written: modification time of the shard, in nanoseconds.
    """

    keys: np.ndarray
    extensions: tuple[str, ...]
    offsets: np.ndarray
    sizes: np.ndarray
    size: int
    written: int

    def agrees(self, other: MemberTable) -> bool:
        """Return whether two tables list the same files with the same positions and sizes. Modification times may differ."""
        arrays = ((self.keys, other.keys), (self.offsets, other.offsets), (self.sizes, other.sizes))
        same = (self.size, self.extensions) == (other.size, other.extensions)
        return same and all(np.array_equal(one, two) for one, two in arrays)


class _Member(tarfile.TarInfo):
    """Tar member that rejects extended headers of more than 1 MiB each, or of more than 16 MiB together in one shard."""

    def _proc_member(self, archive: Any) -> Any:  # tarfile's comments name this method as the one to override
        if self.type in FURTHER:
            archive.further = getattr(archive, "further", 0) + self.size
            if not 0 <= self.size <= LONGEST_HEADER or archive.further > MOST_HEADERS:
                raise tarfile.ReadError(f"a header of {self.size} bytes, at most {LONGEST_HEADER} are read")
        return super()._proc_member(archive)  # type: ignore[misc]


FURTHER = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Types of extended tar headers, whose content applies to the next header."""


class TarCheck:
    """Validator of a tar file during its download, which raises an error as soon as the file cannot be a valid shard.

    Call the object with each piece of the file, in order.

    Args:
        name: name of the file, for error messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._header, self._further = bytearray(), bytearray()
        self._left, self._kept = 0, False
        self._zeros = self._members = 0

    def __call__(self, data: bytes) -> None:
        """Check the next piece of a tar file that is being downloaded.

        Raises:
            BrokenContentError: if the file cannot be a valid shard.
        """
        remaining = memoryview(data)
        while remaining:
            if self._left:
                part, remaining = remaining[: self._left], remaining[self._left :]
                self._left -= len(part)
                if self._kept:
                    self._further += part
                continue
            count = tarfile.BLOCKSIZE - len(self._header)
            self._header += remaining[:count]
            remaining = remaining[count:]
            if len(self._header) == tarfile.BLOCKSIZE:
                block = bytes(self._header)
                self._header.clear()
                self._take(block)

    def _take(self, block: bytes) -> None:
        if block.count(0) == len(block):
            self._zeros += len(block)
            if self._zeros > LONGEST_TAIL:
                raise BrokenContentError(f"{self.name} is not a tar file: zeros in place of a member")
            return
        try:
            if self._zeros:
                raise tarfile.ReadError("data follows its end")
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if member.size < 0 or (member.type in FURTHER and member.size > LONGEST_HEADER):
                raise tarfile.ReadError(f"a header of {member.size} bytes, at most {LONGEST_HEADER} are read")
        except (tarfile.TarError, *BROKEN) as error:
            raise BrokenContentError(f"{self.name} is not a complete tar file ({reason(error)})") from error
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise BrokenContentError(f"{self.name} has more than {MOST_MEMBERS} members; write smaller shards")
        size = member.size
        if self._kept and (size_record := re.search(rb"\d+ size=(\d{1,18})\n", self._further)):
            size = int(size_record[1])  # members of more than 8 GiB have their size in a PAX header
        self._kept = member.type == tarfile.XHDTYPE
        self._further.clear()
        # As in tarfile: links, folders and devices have no content, whatever their size field says.
        has_content = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES or member.type in FURTHER
        self._left = -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE if has_content else 0


def scan_shard(path: Path, name: str | None = None) -> MemberTable:
    """Read the headers of a tar shard, and return a table of the files in it.

    Args:
        path: path of the shard.
        name: URL that the shard was downloaded from, for error messages; None to use ``path`` in messages.

    Raises:
        ValueError: if the file is not a complete tar file, or exceeds a limit such as 100,000 files.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    stat = path.stat()
    total, end, where = stat.st_size, 0, name or str(path)
    try:
        with tarfile.open(path, "r:", tarinfo=_Member) as tar:
            for number, member in enumerate(tar):
                if number >= MOST_MEMBERS:
                    raise tarfile.ReadError(f"more than {MOST_MEMBERS} members; write smaller shards")
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every member in memory
                if member.size < 0 or member.issparse():
                    raise tarfile.ReadError(f"{member.name[:80]!r} is sparse, or of negative size")
                if len(member.name) > LONGEST_NAME:
                    raise tarfile.ReadError(f"a name of {len(member.name)} characters, at most {LONGEST_NAME} are read")
                end = member.offset_data + -(-member.size // 512) * 512
                folder, _, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if member.isfile() and dot and stem:
                    key = f"{folder}/{stem}" if folder else stem
                    samples.setdefault(key, {})[extension.lower()] = (member.offset_data, member.size)
    except PermissionError:
        raise
    except (tarfile.TarError, OSError, *BROKEN) as error:
        raise ValueError(f"{where}: not a complete tar file ({reason(error)}); write or download it again") from error
    extensions = tuple(sorted({extension for members in samples.values() for extension in members}))
    if len(extensions) > MOST_EXTENSIONS:
        raise ValueError(f"{where}: {len(extensions)} different extensions, at most {MOST_EXTENSIONS} are read")
    if end + 512 > total:
        raise ValueError(
            f"{where}: cut short, {total} bytes instead of at least {end + 1024}; write or download it again"
        )
    if total - end > LONGEST_TAIL:
        raise ValueError(f"{where}: {total - end} bytes follow its last member; write or download it again")
    with path.open("rb") as stream:
        stream.seek(end)
        if any(chunk.count(0) != len(chunk) for chunk in iter(lambda: stream.read(1 << 20), b"")):
            raise ValueError(
                f"{where}: not a complete tar file (no member where byte {end} is); write or download it again"
            )
    missing = (-1, 0)
    table = [[members.get(extension, missing) for extension in extensions] for members in samples.values()]
    spans = np.array(table, dtype=np.int64).reshape(len(samples), len(extensions), 2)
    keys = np.array(list(samples), dtype=np.str_)
    return MemberTable(keys, extensions, spans[..., 0], spans[..., 1], total, stat.st_mtime_ns)


def load_table(path: Path, cache: Path | None = None) -> MemberTable:
    """Return the table of the files in a local shard, from a saved copy if possible and otherwise by scanning the shard.

    A saved table is used if the shard still has the same size and modification time. A new table is saved beside the shard or,
    if that folder is read-only, in the cache folder.

    Args:
        path: path of the shard.
        cache: cache folder; None for the user's cache folder.

    Raises:
        ValueError: if the shard is not a valid tar file.
    """
    stat = path.stat()
    # Tables of shards in different folders must not overwrite each other.
    hidden = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    root = cache or default_cache()
    candidates = [table_file(path), root / "tables" / f"{hidden}.npz"]
    for file in candidates:
        if file.is_relative_to(root) and not _is_own(file):
            continue
        saved = read_table(file)
        if saved is not None and (saved.size, saved.written) == (stat.st_size, stat.st_mtime_ns):
            return saved
    table = scan_shard(path)
    for file in candidates:
        try:
            if file.is_relative_to(root):
                own_folder(file.parent, root)
            with written_whole(file) as aside:
                aside.write_bytes(table_bytes(table))
            break
        except OSError as error:
            log.info("member table of %s could not be saved at %s: %s", path, file, error)
    return table


def _is_own(file: Path) -> bool:
    """Return whether a file can be trusted: it exists, and this user owns the file and its folder."""
    try:
        check_own(file.parent, is_kind=S_ISDIR)
        check_own(file)
    except OSError:
        return False
    return True


def table_file(shard: Path) -> Path:
    """Return the path beside a shard at which the table of the files in the shard is saved."""
    return shard.with_name(shard.name + INDEX)


def table_bytes(table: MemberTable) -> bytes:
    """Encode the table of the files in a shard as the content of an ``.npz`` file."""
    stream = io.BytesIO()
    np.savez(
        stream,
        stamp=np.array([table.size, table.written], dtype=np.int64),
        keys=table.keys,
        extensions=np.array(table.extensions, dtype=np.str_),
        offsets=table.offsets,
        sizes=table.sizes,
    )
    return stream.getvalue()


def read_table(file: Path) -> MemberTable | None:
    """Read the table of the files in a shard from an ``.npz`` file.

    Returns:
        The table. None if the ``.npz`` file does not exist or, after a warning, if it is not a valid table.
    """
    try:
        with PARSING, ZipFile(file) as archive, np.load(file, allow_pickle=False) as arrays:
            # a table is saved uncompressed; a compressed one could expand to fill the memory
            if sum(info.file_size for info in archive.infolist()) > file.stat().st_size:
                raise ValueError("its arrays are larger than the file")
            stamp = arrays["stamp"]
            if stamp.shape != (2,) or stamp.dtype != np.int64 or stamp[0] < 0:
                raise ValueError("no member table")
            return _checked_table(arrays, int(stamp[0]), int(stamp[1]))
    except FileNotFoundError:
        return None
    except (OSError, BadZipFile, zlib.error, NotImplementedError, *BROKEN) as error:
        log.warning("member table %s is rebuilt: %s", file, reason(error))
        return None


def _checked_table(arrays: Mapping[str, np.ndarray], total: int, written: int) -> MemberTable:
    """Check the arrays of an ``.npz`` file, and build the table of the files in a shard from them.

    Args:
        arrays: arrays ``keys``, ``extensions``, ``offsets`` and ``sizes`` by name.
        total: size of the shard in bytes.
        written: modification time of the shard, in nanoseconds.

    Raises:
        ValueError: if the arrays do not form a table, or a file in the table lies outside the shard.
    """
    keys, extensions, offsets, sizes = (arrays[name] for name in ("keys", "extensions", "offsets", "sizes"))
    shape = (len(keys), len(extensions))
    plain = keys.ndim == extensions.ndim == 1 and keys.dtype.kind == extensions.dtype.kind == "U"
    if len(keys) > MOST_MEMBERS:
        raise ValueError(f"more than {MOST_MEMBERS} samples")
    matches = offsets.dtype == sizes.dtype == np.int64 and offsets.shape == sizes.shape == shape
    if not (plain and matches and (offsets >= -1).all() and (sizes >= 0).all()):
        raise ValueError("no member table")
    if len(keys) * 512 > total or (len(keys) and not len(extensions)) or len(extensions) > MOST_EXTENSIONS:
        raise ValueError("more samples or different extensions than a shard of its size can have")
    if max(keys.dtype.itemsize, extensions.dtype.itemsize) > 4 * LONGEST_NAME:
        raise ValueError("names longer than a shard may have")
    if (offsets > total).any() or (sizes > total - np.maximum(offsets, 0)).any():
        raise ValueError("members outside the shard")
    return MemberTable(keys, tuple(extensions.tolist()), offsets, sizes, total, written)
