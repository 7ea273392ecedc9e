"""Where the members of a tar shard lie: scanned once, checked, and kept beside the shard or in the cache folder."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tarfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from zipfile import BadZipFile, ZipFile

import numpy as np
from mhla_kernels.own_files import check_own, own_folder

from lightning_mhla.system.files import written_whole
from lightning_mhla.system.untrusted import BROKEN, reason

log = logging.getLogger(__name__)

LONGEST_NAME, MOST_EXTENSIONS, LONGEST_TAIL = 1024, 64, 1 << 24
"""Of a member, in characters; kinds of members; bytes of zeros at a tar file's end. A shard beyond them is rejected."""

PARSING = threading.Lock()
"""Held while NumPy reads array headers, which it parses as Python: threads that do so at once disturb each other before
Python 3.11.8 and 3.12.2 (python/cpython #106905)."""

INDEX = ".index.npz"
"""Ending of the file beside a shard that keeps its member table."""


def default_cache() -> Path:
    """Folder for downloaded shards and member tables: ``$XDG_CACHE_HOME/lightning-mhla``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-mhla"


@dataclass(frozen=True)
class MemberTable:
    """Where the members of one shard lie.

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


def scan_shard(path: Path) -> MemberTable:
    """Read a shard's member table from its headers.

    Raises:
        ValueError: naming the shard, when it is no tar file, or cut short.
    """
    samples: OrderedDict[str, dict[str, tuple[int, int]]] = OrderedDict()
    stat = path.stat()
    total, end = stat.st_size, 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
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
        raise ValueError(f"{path}: not a whole tar file ({reason(error)}); write or download it again") from error
    extensions = tuple(sorted({extension for members in samples.values() for extension in members}))
    if len(extensions) > MOST_EXTENSIONS:
        raise ValueError(f"{path}: {len(extensions)} kinds of members, at most {MOST_EXTENSIONS} are read")
    if end + 512 > total:
        raise ValueError(
            f"{path}: cut short, {total} bytes where at least {end + 1024} belong; write or download it again"
        )
    if total - end > LONGEST_TAIL:
        raise ValueError(f"{path}: {total - end} bytes follow its last member; write or download it again")
    with path.open("rb") as stream:
        stream.seek(end)
        if any(chunk.count(0) != len(chunk) for chunk in iter(lambda: stream.read(1 << 20), b"")):
            raise ValueError(
                f"{path}: not a whole tar file (no member where byte {end} is); write or download it again"
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
    """Whether a file is there, and nobody else put it into the cache."""
    try:
        check_own(file.parent, is_kind=S_ISDIR)
        check_own(file)
    except OSError:
        return False
    return True


def table_file(shard: Path) -> Path:
    """The file beside a shard that keeps its member table."""
    return shard.with_name(shard.name + INDEX)


def table_bytes(table: MemberTable) -> bytes:
    """The file that keeps a member table."""
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
