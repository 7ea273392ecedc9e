"""Member tables of tar shards: scanned once, checked, and saved beside the shard or in the cache folder."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import tarfile
import threading
import zlib
from collections import OrderedDict
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
"""Of a member, in characters; kinds of members; bytes of zeros at a tar file's end. A shard beyond them is rejected."""

MOST_MEMBERS = 100_000
"""Maximum number of members of a shard, which takes two seconds to scan."""

LONGEST_HEADER, MOST_HEADERS = 1 << 20, 1 << 24
"""Bytes of a header that carries a long name or attributes (PAX, GNU), which is read into memory, and of all of a shard."""

PARSING = threading.Lock()
"""Held while NumPy reads array headers, which it parses as Python: threads that do so at once disturb each other before
Python 3.11.8 and 3.12.2 (python/cpython #106905)."""

INDEX = ".index.npz"
"""Suffix of the file beside a shard with its member table."""


def default_cache() -> Path:
    """Return the folder for downloaded shards and member tables: ``$XDG_CACHE_HOME/lightning-mhla``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-mhla"


@dataclass(frozen=True, eq=False)
class MemberTable:
    """Member table of one shard.

    Attributes:
        keys: ``[n]`` str, the samples.
        extensions: the member extensions of the shard, lower case.
        offsets: ``[n, len(extensions)]`` int64, first byte; -1 where a sample has no such member.
        sizes: number of bytes of each, in the same shape.
        size: bytes of the shard.
        written: when it was last written, in nanoseconds.
    """

    keys: np.ndarray
    extensions: tuple[str, ...]
    offsets: np.ndarray
    sizes: np.ndarray
    size: int
    written: int

    def agrees(self, other: MemberTable) -> bool:
        """Check whether two tables have the same members at the same offsets."""
        arrays = ((self.keys, other.keys), (self.offsets, other.offsets), (self.sizes, other.sizes))
        same = (self.size, self.extensions) == (other.size, other.extensions)
        return same and all(np.array_equal(one, two) for one, two in arrays)


class _Member(tarfile.TarInfo):
    """A member whose further headers are read up to a size."""

    def _proc_member(self, archive: Any) -> Any:  # which tarfile's own comments name as what subclasses override
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
"""Types of tar headers followed by text that applies to the next header."""


class TarCheck:
    """Follows the headers of a tar file while its bytes come in, so that the download of anything else ends early.

    Args:
        name: of the file, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._header, self._further = bytearray(), bytearray()
        self._left, self._kept = 0, False
        self._zeros = self._members = 0

    def __call__(self, data: bytes) -> None:
        """Process the next bytes.

        Raises:
            BrokenContentError: naming the file, when they do not continue a shard.
        """
        rest = memoryview(data)
        while rest:
            if self._left:
                part, rest = rest[: self._left], rest[self._left :]
                self._left -= len(part)
                if self._kept:
                    self._further += part
                continue
            count = tarfile.BLOCKSIZE - len(self._header)
            self._header += rest[:count]
            rest = rest[count:]
            if len(self._header) == tarfile.BLOCKSIZE:
                block = bytes(self._header)
                self._header.clear()
                self._take(block)

    def _take(self, block: bytes) -> None:
        if block.count(0) == len(block):
            self._zeros += len(block)
            if self._zeros > LONGEST_TAIL or not self._members:
                raise BrokenContentError(f"{self.name} is not a tar file: zeros where a member belongs")
            return
        try:
            if self._zeros:
                raise tarfile.ReadError("something follows its end")
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if member.size < 0 or (member.type in FURTHER and member.size > LONGEST_HEADER):
                raise tarfile.ReadError(f"a header of {member.size} bytes, at most {LONGEST_HEADER} are read")
        except (tarfile.TarError, *BROKEN) as error:
            raise BrokenContentError(f"{self.name} is not a whole tar file ({reason(error)})") from error
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise BrokenContentError(f"{self.name} has more than {MOST_MEMBERS} members; write smaller shards")
        size = member.size
        if self._kept and (given := re.search(rb"\d+ size=(\d{1,18})\n", self._further)):
            size = int(given[1])  # of a member of more than 8 GiB
        self._kept = member.type == tarfile.XHDTYPE
        self._further.clear()
        has_content = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES or member.type in FURTHER
        self._left = -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE if has_content else 0


def scan_shard(path: Path, name: str | None = None) -> MemberTable:
    """Read a shard's member table from its headers.

    Args:
        path: the shard.
        name: address that it came from, for messages; None for its path.

    Raises:
        ValueError: naming the shard, when it is no tar file, cut short, or has more members than a shard has.
    """
    samples: OrderedDict[str, dict[str, tuple[int, int]]] = OrderedDict()
    stat = path.stat()
    total, end, where = stat.st_size, 0, name or str(path)
    try:
        with tarfile.open(path, "r:", tarinfo=_Member) as tar:
            for number, member in enumerate(tar):
                if number >= MOST_MEMBERS:
                    raise tarfile.ReadError(f"more than {MOST_MEMBERS} members; write smaller shards")
                tar.members = []  # type: ignore[attr-defined]  # or it keeps them all
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
        raise ValueError(f"{where}: not a whole tar file ({reason(error)}); write or download it again") from error
    extensions = tuple(sorted({extension for members in samples.values() for extension in members}))
    if len(extensions) > MOST_EXTENSIONS:
        raise ValueError(f"{where}: {len(extensions)} kinds of members, at most {MOST_EXTENSIONS} are read")
    if end + 512 > total:
        raise ValueError(
            f"{where}: cut short, {total} bytes where at least {end + 1024} belong; write or download it again"
        )
    if total - end > LONGEST_TAIL:
        raise ValueError(f"{where}: {total - end} bytes follow its last member; write or download it again")
    with path.open("rb") as stream:
        stream.seek(end)
        if any(chunk.count(0) != len(chunk) for chunk in iter(lambda: stream.read(1 << 20), b"")):
            raise ValueError(
                f"{where}: not a whole tar file (no member where byte {end} is); write or download it again"
            )
    missing = (-1, 0)
    table = [[members.get(extension, missing) for extension in extensions] for members in samples.values()]
    spans = np.array(table, dtype=np.int64).reshape(len(samples), len(extensions), 2)
    keys = np.array(list(samples), dtype=np.str_)
    return MemberTable(keys, extensions, spans[..., 0], spans[..., 1], total, stat.st_mtime_ns)


def load_table(path: Path, cache: Path | None = None) -> MemberTable:
    """The member table of a shard, from the file that keeps it if that is as old as the shard, else scanned and kept."""
    stat = path.stat()
    hidden = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    root = cache or default_cache()
    candidates = [table_file(path), root / "tables" / f"{hidden}.npz"]
    for file in candidates:
        if file.is_relative_to(root) and not _is_own(file):
            continue
        kept = read_table(file)
        if kept is not None and (kept.size, kept.written) == (stat.st_size, stat.st_mtime_ns):
            return kept
    table = scan_shard(path)
    for file in candidates:
        try:
            if file.is_relative_to(root):
                own_folder(file.parent, root)
            with written_whole(file) as aside:
                aside.write_bytes(table_bytes(table))
            break
        except OSError as error:
            log.info("member table of %s not kept at %s: %s", path, file, error)
    return table


def _is_own(file: Path) -> bool:
    """Check whether a file exists and was not put into the cache by a different user."""
    try:
        check_own(file.parent, is_kind=S_ISDIR)
        check_own(file)
    except OSError:
        return False
    return True


def table_file(shard: Path) -> Path:
    """Return the path of the member table beside a shard."""
    return shard.with_name(shard.name + INDEX)


def table_bytes(table: MemberTable) -> bytes:
    """Return the path of a saved member table."""
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
    """A kept member table; None, after a warning, where it is no such file or its entries lie outside the shard."""
    try:
        with PARSING, ZipFile(file) as archive, np.load(file, allow_pickle=False) as kept:
            if sum(info.file_size for info in archive.infolist()) > file.stat().st_size:
                raise ValueError("its arrays are larger than the file")
            stamp = kept["stamp"]
            if stamp.shape != (2,) or stamp.dtype != np.int64 or stamp[0] < 0:
                raise ValueError("no member table")
            return _checked_table(kept, int(stamp[0]), int(stamp[1]))
    except FileNotFoundError:
        return None
    except (OSError, BadZipFile, zlib.error, NotImplementedError, *BROKEN) as error:
        log.warning("member table %s is rebuilt: %s", file, reason(error))
        return None


def _checked_table(kept: Mapping[str, np.ndarray], total: int, written: int) -> MemberTable:
    """A kept member table, if every entry of it lies in a shard of ``total`` bytes."""
    keys, extensions, offsets, sizes = (kept[name] for name in ("keys", "extensions", "offsets", "sizes"))
    shape = (len(keys), len(extensions))
    plain = keys.ndim == extensions.ndim == 1 and keys.dtype.kind == extensions.dtype.kind == "U"
    if len(keys) > MOST_MEMBERS:
        raise ValueError(f"more than {MOST_MEMBERS} samples")
    whole = offsets.dtype == sizes.dtype == np.int64 and offsets.shape == sizes.shape == shape
    if not (plain and whole and (offsets >= -1).all() and (sizes >= 0).all()):
        raise ValueError("no member table")
    if len(keys) * 512 > total or (len(keys) and not len(extensions)) or len(extensions) > MOST_EXTENSIONS:
        raise ValueError("more samples or kinds of members than a shard of its size has")
    if max(keys.dtype.itemsize, extensions.dtype.itemsize) > 4 * LONGEST_NAME:
        raise ValueError("names longer than a shard has")
    if (offsets > total).any() or (sizes > total - np.maximum(offsets, 0)).any():
        raise ValueError("members outside the shard")
    return MemberTable(keys, tuple(extensions.tolist()), offsets, sizes, total, written)
