"""WebDataset tar shards read by index: safe members only, no shell, no pickle.

A shard is an uncompressed tar file; the members of one sample follow each other and share a name up to the first dot
(``0007.jpg``, ``0007.cls``). Its member table is scanned once and kept beside it (or in the cache folder).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tarfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import fsspec
import numpy as np
from braceexpand import braceexpand
from rich.progress import track

from lightning_mhla.data.source import BrokenSampleError
from lightning_mhla.system.untrusted import BROKEN, parse_array, reason

log = logging.getLogger(__name__)

SCHEMES = ("http", "https", "s3", "gs", "hf")
"""Remote locations that shards may come from; everything else but a plain path is rejected, ``pipe:`` above all."""

LONGEST_NAME, MOST_EXTENSIONS, LONGEST_TAIL = 1024, 64, 1 << 24
"""Of a member, in characters; kinds of members; bytes of zeros at a tar file's end. A shard beyond them is rejected."""

OPEN_FILES = 64
"""Shards that one process keeps open."""


def default_cache() -> Path:
    """Folder for downloaded shards and member tables: ``$XDG_CACHE_HOME/lightning-mhla``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-mhla"


def find_shards(where: str | Sequence[str], cache: Path | None = None) -> list[Path]:
    """Local paths of the shards that ``where`` names.

    Args:
        where: a folder of ``*.tar``, a path or URL with braces (``train-{0000..1023}.tar``), a name with wildcards, or a list.
            URLs (http, https, s3, gs, hf) are downloaded once, atomically.
        cache: folder for downloads; None for :func:`default_cache`.

    Raises:
        FileNotFoundError: when a folder, file or pattern gives no shard.
        ValueError: for a URL scheme that is not allowed.
    """
    names = [where] if isinstance(where, str) else list(where)
    expanded = [part for name in names for part in braceexpand(str(name))]
    remote = [name for name in expanded if _scheme(name)]
    fetched = dict(zip(remote, _download(remote, (cache or default_cache()) / "shards"), strict=True))
    return [path for name in expanded for path in ([fetched[name]] if name in fetched else _local(name))]


def _scheme(name: str) -> str | None:
    match = re.match(r"^([A-Za-z][A-Za-z0-9+.-]+):", name)
    if match is None:
        return None
    if match[1] not in SCHEMES or not name.startswith(f"{match[1]}://"):
        raise ValueError(
            f"{name!r}: shards come from a local path or one of {', '.join(SCHEMES)}; nothing else is opened"
        )
    return match[1]


def _local(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        found = sorted(path.glob("*.tar"))
    elif path.is_file():
        found = [path]
    else:
        found = sorted(path.parent.glob(path.name)) if any(c in path.name for c in "*?[") else []
    if not found:
        what = "holds no *.tar files" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{name} {what}; give a folder of shards, a pattern such as DIR/train-{{0000..0009}}.tar, or URLs; images also as "
            "a folder with one folder for each class"
        )
    return found


def _download(urls: list[str], cache: Path) -> list[Path]:
    targets = [cache / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rsplit("/", 1)[-1] for url in urls]
    missing = [(url, target) for url, target in zip(urls, targets, strict=True) if not target.exists()]
    for url, target in track(missing, "downloading shards", disable=not missing):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            with fsspec.open(url, "rb") as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
            scan_shard(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return targets


@dataclass(frozen=True)
class MemberTable:
    """Where the members of one shard lie.

    Attributes:
        keys: ``[n]`` str, the samples.
        extensions: the member extensions of the shard, lower case.
        offsets: ``[n, len(extensions)]`` int64, first byte; -1 where a sample has no such member.
        sizes: number of bytes of each, in the same shape.
    """

    keys: np.ndarray
    extensions: tuple[str, ...]
    offsets: np.ndarray
    sizes: np.ndarray


def scan_shard(path: Path) -> MemberTable:
    """Read a shard's member table from its headers.

    Raises:
        ValueError: naming the shard, when it is no tar file, or cut short.
    """
    samples: OrderedDict[str, dict[str, tuple[int, int]]] = OrderedDict()
    total = path.stat().st_size
    end = 0
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
    return MemberTable(np.array(list(samples), dtype=np.str_), extensions, spans[..., 0], spans[..., 1])


def load_table(path: Path, cache: Path | None = None) -> MemberTable:
    """The member table of a shard, from the file that keeps it if that is as old as the shard, else scanned and kept."""
    stat = path.stat()
    stamp = np.array([stat.st_size, stat.st_mtime_ns], dtype=np.int64)
    hidden = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    candidates = [path.with_name(path.name + ".index.npz"), (cache or default_cache()) / "tables" / f"{hidden}.npz"]
    for table_file in candidates:
        try:
            with ZipFile(table_file) as archive:
                if sum(info.file_size for info in archive.infolist()) > max(1 << 26, stat.st_size):
                    raise ValueError("larger than the shard")
            with np.load(table_file, allow_pickle=False) as kept:
                if kept["stamp"].shape == stamp.shape and (kept["stamp"] == stamp).all():
                    return _checked_table(kept, stat.st_size)
        except FileNotFoundError:
            continue
        except (OSError, BadZipFile, zlib.error, NotImplementedError, *BROKEN) as error:
            log.warning("member table %s is rebuilt: %s", table_file, reason(error))
    table = scan_shard(path)
    for table_file in candidates:
        try:
            table_file.parent.mkdir(parents=True, exist_ok=True)
            aside = table_file.with_name(f"{table_file.name}.{os.getpid()}.part.npz")
            np.savez(
                aside,
                stamp=stamp,
                keys=table.keys,
                extensions=np.array(table.extensions, dtype=np.str_),
                offsets=table.offsets,
                sizes=table.sizes,
            )
            aside.replace(table_file)
            break
        except OSError as error:
            log.info("member table of %s not kept at %s: %s", path, table_file, error)
    return table


def _checked_table(kept: Mapping[str, np.ndarray], total: int) -> MemberTable:
    """A kept member table, if every entry of it lies in a shard of ``total`` bytes."""
    keys, extensions, offsets, sizes = (kept[name] for name in ("keys", "extensions", "offsets", "sizes"))
    shape = (len(keys), len(extensions))
    plain = keys.ndim == extensions.ndim == 1 and keys.dtype.kind == extensions.dtype.kind == "U"
    whole = offsets.dtype == sizes.dtype == np.int64 and offsets.shape == sizes.shape == shape
    if not (plain and whole and (offsets >= -1).all() and (sizes >= 0).all()):
        raise ValueError("no member table")
    if (offsets > total).any() or (sizes > total - np.maximum(offsets, 0)).any():
        raise ValueError("members outside the shard")
    return MemberTable(keys, tuple(extensions.tolist()), offsets, sizes)


def beside_shard(shard: Path, name: str) -> Path:
    """A file that belongs to all shards of one prefix: ``train-manifest.json`` beside ``train-00017.tar``."""
    return shard.with_name(f"{shard.stem.rpartition('-')[0]}-{name}")


class ShardReader:
    """Members of samples by index, over many shards. Safe to share between processes.

    Args:
        shards: local paths, see :func:`find_shards`.
        cache: folder for member tables where the shards' own folder cannot be written.
    """

    def __init__(self, shards: Sequence[Path], cache: Path | None = None) -> None:
        self.shards = list(shards)
        with ThreadPoolExecutor(8) as pool:
            tables = pool.map(lambda path: load_table(path, cache), self.shards)
            few = len(self.shards) < 32
            self.tables = list(track(tables, "reading shard tables", total=len(self.shards), disable=few))
        self.shard_sizes = [len(table.keys) for table in self.tables]
        self._ends = np.cumsum(self.shard_sizes)
        self._open: OrderedDict[int, int] = OrderedDict()
        self._owner = os.getpid()

    def __len__(self) -> int:
        """Samples in all shards."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def describe(self, index: int) -> str:
        """Shard and key of a sample, for messages."""
        shard, row = self._find(index)
        key = str(self.tables[shard].keys[row])
        return f"{self.shards[shard]}: sample {key if key.isprintable() and len(key) < 200 else repr(key)[:200]}"

    def extension(self, index: int, wanted: Sequence[str]) -> str:
        """The first of ``wanted`` that the sample has.

        Raises:
            BrokenSampleError: if it has none of them.
        """
        shard, row = self._find(index)
        table = self.tables[shard]
        for name in wanted:
            if name in table.extensions and table.offsets[row, table.extensions.index(name)] >= 0:
                return name
        has = [name for name, at in zip(table.extensions, table.offsets[row], strict=True) if at >= 0]
        raise BrokenSampleError(f"{self.describe(index)} has no .{' or .'.join(wanted)}, only {has}")

    def size(self, index: int, extension: str) -> int:
        """Bytes of one member that the sample has."""
        shard, row = self._find(index)
        table = self.tables[shard]
        return int(table.sizes[row, table.extensions.index(extension)])

    def read(self, index: int, extension: str, start: int = 0, count: int | None = None) -> bytes:
        """The bytes of one member that the sample has: all, or ``count`` of them from ``start`` on."""
        shard, row = self._find(index)
        table = self.tables[shard]
        rest = max(0, self.size(index, extension) - start)
        size = rest if count is None else min(count, rest)
        offset = int(table.offsets[row, table.extensions.index(extension)])
        data = os.pread(self._file(shard), size, offset + start)
        if len(data) < size:
            raise BrokenSampleError(f"{self.describe(index)}: .{extension} is cut short, {len(data)} of {size} bytes")
        return data

    def array(self, index: int, extension: str) -> np.ndarray:
        """The array of one ``.npy`` member.

        Raises:
            BrokenSampleError: if it is missing, or no array of finite floating-point numbers.
        """
        data = self.read(index, self.extension(index, (extension,)))
        try:
            values = parse_array(data)
        except ValueError as error:
            raise BrokenSampleError(f"{self.describe(index)}: .{extension} is no array ({error})") from error
        if values.dtype.kind != "f" or not np.isfinite(values).all():
            raise BrokenSampleError(
                f"{self.describe(index)}: .{extension} holds {values.dtype}, not finite numbers only"
            )
        return values

    def label(self, index: int, num_classes: int) -> int:
        """The class label in a sample's ``.cls``.

        Raises:
            BrokenSampleError: if it is not one of 0 to ``num_classes - 1``, or missing.
        """
        text = self.read(index, self.extension(index, ("cls",)), count=32)
        label = int(text) if re.fullmatch(rb"\s*\d{1,9}\s*", text) else -1
        if not 0 <= label < num_classes:
            raise BrokenSampleError(
                f"{self.describe(index)}: label {text[:20]!r} is not one of the classes 0 to {num_classes - 1}"
            )
        return label

    def _find(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    def _file(self, shard: int) -> int:
        if self._owner != os.getpid():
            self._open, self._owner = OrderedDict(), os.getpid()
        if shard not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[shard] = os.open(self.shards[shard], os.O_RDONLY)
        self._open.move_to_end(shard)
        return self._open[shard]

    def __getstate__(self) -> dict[str, Any]:
        """Without open files, for worker processes that are started afresh."""
        return {**self.__dict__, "_open": OrderedDict()}
