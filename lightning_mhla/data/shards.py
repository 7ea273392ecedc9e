"""Reading of WebDataset tar shards by sample index, without running shell commands or unpickling.

A shard is an uncompressed tar file. The files of one sample are stored one after the other, and their names are equal up to the
first dot, such as ``0007.jpg`` and ``0007.cls``.
"""

# Longer than other modules because it finds shards in all supported locations, downloads them, and reads them.

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from braceexpand import alphabet, braceexpand
from mhla_kernels.own_files import check_own, own_folder
from rich.progress import track

from lightning_mhla.data.cache import ShardCache
from lightning_mhla.data.remote import download, kept_at, side_files, url_scheme
from lightning_mhla.data.source import LARGEST_SAMPLE, BrokenSampleError, ShardUnavailableError
from lightning_mhla.data.tables import MemberTable, TarCheck, default_cache, load_table, scan_shard
from lightning_mhla.system.files import written_whole
from lightning_mhla.system.listing import is_visible
from lightning_mhla.system.untrusted import parse_array, reason

T = TypeVar("T")

LARGEST_SHARD = 1 << 44
"""Maximum size of a downloaded shard, in bytes."""

MOST_SHARDS, LONGEST_PATTERN, LONGEST_NAMES = 1 << 20, 1 << 12, 1 << 28
"""Limits of brace expansion: number of names, characters of the pattern, and characters of all names."""

OPEN_FILES = 64
"""Number of shards that a process keeps open."""

TRIED = 100
"""Number of samples that are read to find one that is not damaged."""


def find_shards(
    where: str | Sequence[str], cache: Path | None = None, streamed: ShardCache | None = None
) -> list[Path]:
    """Find local shards and download remote shards, and return the local paths of all of them.

    Args:
        where: location of the shards, or a list of locations. A location has one of these forms:

            - path of a shard
            - folder that contains ``*.tar`` files
            - path with wildcards
            - path with braces, such as ``train-{0000..1023}.tar``
            - URL (http, https, s3, gs, hf), which may have braces
        cache: folder for downloads; None for the user's cache folder.
        streamed: cache that downloads remote shards only when they are read; None to download them now.

    Returns:
        Local paths of the shards, in the order of the locations. With ``streamed``, the files of remote shards may not exist
        yet.

    Raises:
        FileNotFoundError: if a folder, path or pattern matches no shard, or the list of locations is empty.
        ValueError: if the scheme of a URL is not allowed, or braces cannot be expanded.
    """
    names = [where] if isinstance(where, str) else list(where)
    if not names:
        raise FileNotFoundError("the list of locations of shards is empty; give a folder, a pattern or URLs")
    # The braces and backslashes of an existing path belong to its name.
    expanded = [part for name in map(str, names) for part in ([name] if os.path.exists(name) else expand_braces(name))]
    remote = [name for name in expanded if url_scheme(name)]
    folder = (cache or default_cache()) / "shards"
    paths = (_download(remote, folder) if streamed is None else streamed.add(remote)) if remote else []
    fetched = dict(zip(remote, paths, strict=True))
    return [path for name in expanded for path in ([fetched[name]] if name in fetched else _local(name))]


def expand_braces(name: str) -> list[str]:
    """Expand a path or URL with braces, such as ``train-{0000..1023}.tar``, into the list of names that it stands for.

    Raises:
        ValueError: if the braces are not balanced, ``name`` has more than 4,096 characters, or the result would be too long,
            for example with more than 1,048,576 names.
    """
    start = name if len(name) <= 100 else f"{name[:100]}.."
    count = _count_names(name) if len(name) <= LONGEST_PATTERN else None
    if count is None or count > MOST_SHARDS or count * len(name) > LONGEST_NAMES:
        many = f"{len(name)} characters" if count is None else f"{count} names"
        raise ValueError(
            f"{start}: {many} are too many for a list of shards (at most {MOST_SHARDS} names); check the braces"
        )
    try:
        return list(braceexpand(name))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{start}: the braces cannot be read ({reason(error)}); write a backslash before one that belongs to a name"
        ) from error


def _count_names(pattern: str) -> int:
    """Count the names that a pattern with braces expands to, without expanding it.

    The count may be too high for ranges of letters.
    """
    # For each open brace: names of its finished choices, names of the current choice, and where its content starts.
    sums, products, starts = [0], [1], [0]
    for sign in re.finditer(r"\\.|[{},]", pattern):
        if sign[0] == "{":
            sums.append(0)
            products.append(1)
            starts.append(sign.end())
        elif sign[0] == "," and len(sums) > 1:
            sums[-1] += products[-1]
            products[-1] = 1
        elif sign[0] == "}" and len(sums) > 1:
            count = sums.pop() + products.pop()
            inside = pattern[starts.pop() : sign.start()]
            numbers = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?", inside)
            letters = re.fullmatch(r"[A-Za-z]\.\.[A-Za-z](\.\.-?\d+)?", inside)
            if numbers:
                count = abs(int(numbers[2]) - int(numbers[1])) // max(1, int(numbers[3] or 1)) + 1
            elif letters:
                count = len(alphabet)
            products[-1] *= count
    return products[0]


def _local(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        shards = sorted(file for file in path.glob("*.tar") if is_visible(file.name))
    elif path.is_file():
        shards = [path]
    else:
        matches = path.parent.glob(path.name) if any(c in path.name for c in "*?[") else ()
        shards = sorted(file for file in matches if is_visible(file.name))
    if not shards:
        problem = "holds no *.tar files" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{name} {problem}; give a folder of shards, a pattern such as DIR/train-{{0000..0009}}.tar, or URLs; for images, "
            "also a folder with one subfolder for each class"
        )
    return shards


def _download(urls: list[str], folder: Path) -> list[Path]:
    targets = [kept_at(url, folder) for url in urls]
    for target in targets:
        own_folder(target.parent, folder.parent)
        with suppress(FileNotFoundError):
            check_own(target)
    missing = [(url, target) for url, target in zip(urls, targets, strict=True) if not target.exists()]
    for url, target in track(missing, "downloading shards", disable=not missing):
        with written_whole(target) as unfinished:
            with unfinished.open("wb") as sink:
                download(url, sink, LARGEST_SHARD, make_check=partial(TarCheck, url))
            scan_shard(unfinished, url)
    if missing:
        for file, content in side_files(urls, folder):
            with written_whole(file) as unfinished:
                unfinished.write_bytes(content)
    return targets


def holds_shards(folder: Path) -> bool:
    """Return whether a folder contains ``*.tar`` files that are not hidden."""
    return any(is_visible(path.name) for path in folder.glob("*.tar"))


def beside_shard(shard: Path, name: str) -> Path:
    """Return the path of a file that all shards with the same prefix share.

    Args:
        shard: path of one of the shards, such as ``train-00017.tar``.
        name: name of the file without the prefix, such as ``manifest.json`` for ``train-manifest.json``.
    """
    return shard.with_name(f"{shard.stem.rpartition('-')[0]}-{name}")


class _OpenFile:
    """File that is open for reading until the last reference to this object is dropped."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "descriptor"):  # opening may have failed
            close(self.descriptor)


class ShardReader:
    """Reader of WebDataset shards, which returns any file of a sample, given the index of the sample and the file's extension.

    Samples are numbered from 0 across all shards. The files of one sample have the same name and different extensions.

    Args:
        shards: local paths of the shards.
        cache: folder for saved tables of the files in shards, used if the shards' own folder is read-only; None for the user's
            cache folder.
        streamed: cache that downloads a remote shard when it is read; None if all shards are local files.
    """

    def __init__(self, shards: Sequence[Path], cache: Path | None = None, streamed: ShardCache | None = None) -> None:
        self.shards, self.streamed = list(shards), streamed
        self._urls = {} if streamed is None else streamed.urls

        def load(path: Path) -> MemberTable:
            return streamed.table(path) if streamed is not None and path in self._urls else load_table(path, cache)

        with ThreadPoolExecutor(8) as pool:
            tables = pool.map(load, self.shards)
            is_quick = len(self.shards) < 32
            self.tables = list(track(tables, "reading shard tables", total=len(self.shards), disable=is_quick))
        self.shard_sizes = [len(table.keys) for table in self.tables]
        self._ends = np.cumsum(self.shard_sizes)
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._owner = os.getpid()

    def __len__(self) -> int:
        """Return the number of samples in all shards."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def is_streamed(self, shard: Path) -> bool:
        """Return whether a shard is remote and streamed, which means that reading it downloads it if it is not in the cache."""
        return shard in self._urls

    def describe(self, index: int) -> str:
        """Describe a sample for messages, by the location of its shard and its key (its file names up to the first dot)."""
        shard, row = self._find(index)
        return f"{self._urls.get(self.shards[shard], self.shards[shard])}: {self._sample(shard, row)}"

    def name(self, index: int) -> str:
        """Return the name of a sample: the file name of its shard, and its key (its own file names up to the first dot)."""
        shard, row = self._find(index)
        return f"{self.shards[shard].name}: {self._sample(shard, row)}"

    def _sample(self, shard: int, row: int) -> str:
        key = str(self.tables[shard].keys[row])
        return f"sample {key if key.isprintable() and len(key) < 200 else repr(key)[:200]}"

    def extension(self, index: int, extensions: Sequence[str]) -> str:
        """Return the first of several extensions for which a sample has a file.

        Args:
            index: index of the sample.
            extensions: extensions to look for, without the dot, in order of preference.

        Raises:
            BrokenSampleError: if the sample has no file with any of these extensions.
        """
        shard, row = self._find(index)
        table = self.tables[shard]
        for name in extensions:
            if name in table.extensions and table.offsets[row, table.extensions.index(name)] >= 0:
                return name
        has = [name for name, at in zip(table.extensions, table.offsets[row], strict=True) if at >= 0]
        raise BrokenSampleError(f"{self.describe(index)} has no .{' or .'.join(extensions)}, only {has}")

    def sort_members(self, pattern: str) -> tuple[list[str], np.ndarray]:
        """Find, for each sample, the extension of its file that matches a regular expression.

        Args:
            pattern: regular expression for the complete extension.

        Returns:
            Sorted list of all matching extensions, and the index into this list for each sample, ``[samples]`` int64. A sample
            without a matching file has the index 0 too. If a sample has several, the index is that of any one of them.
        """
        names = sorted({name for table in self.tables for name in table.extensions if re.fullmatch(pattern, name)})
        extension_numbers = np.zeros(len(self), np.int64)
        for table, end in zip(self.tables, self._ends, strict=True):
            for name in set(names) & set(table.extensions):
                has = table.offsets[:, table.extensions.index(name)] >= 0
                extension_numbers[end - len(table.keys) : end][has] = names.index(name)
        return names, extension_numbers

    def count_members(self, pattern: str) -> np.ndarray:
        """Count, for each sample, the files whose extension matches a regular expression.

        Args:
            pattern: regular expression for the complete extension.

        Returns:
            Number of matching files of each sample, ``[samples]`` int64.
        """
        counts = np.zeros(len(self), np.int64)
        for table, end in zip(self.tables, self._ends, strict=True):
            columns = [number for number, name in enumerate(table.extensions) if re.fullmatch(pattern, name)]
            counts[end - len(table.keys) : end] = (table.offsets[:, columns] >= 0).sum(1)
        return counts

    def size(self, index: int, extension: str) -> int:
        """Return the size in bytes of a file of a sample.

        Args:
            index: index of the sample.
            extension: extension of the file, which must occur in the sample's shard. If the sample has no such file, the size
                is 0.
        """
        shard, row = self._find(index)
        table = self.tables[shard]
        return int(table.sizes[row, table.extensions.index(extension)])

    def read(self, index: int, extension: str, start: int = 0, count: int | None = None) -> bytes:
        """Read a file of a sample, or part of it.

        Args:
            index: index of the sample.
            extension: extension of the file, which the sample must have.
            start: position in the file of the first byte to read.
            count: maximum number of bytes to read; None for the rest of the file.

        Raises:
            BrokenSampleError: if the shard is truncated, or more than 1 GiB would be read at once.
            ShardUnavailableError: if the shard has changed since this reader was created, or cannot be downloaded.
        """
        shard, row = self._find(index)
        table = self.tables[shard]
        remaining = max(0, self.size(index, extension) - start)
        size = remaining if count is None else min(count, remaining)
        if size > LARGEST_SAMPLE:
            raise BrokenSampleError(
                f"{self.describe(index)}: .{extension} has {size} bytes, at most {LARGEST_SAMPLE} are read at once"
            )
        offset = int(table.offsets[row, table.extensions.index(extension)])
        with self._file(shard) as descriptor:
            # pread does not move the file position, which threads and forked processes share.
            data = os.pread(descriptor, size, offset + start)
            status = os.fstat(descriptor)
        if len(data) < size:
            raise BrokenSampleError(f"{self.describe(index)}: .{extension} is cut short, {len(data)} of {size} bytes")
        # The cache changes the modification time of a streamed shard at each use.
        written = table.written if self.shards[shard] not in self._urls else status.st_mtime_ns
        if (status.st_size, status.st_mtime_ns) != (table.size, written):
            raise ShardUnavailableError(
                f"{self.shards[shard]} was rewritten while it is in use, so the positions of its members have changed; leave "
                "shards unchanged, and run the same command again"
            )
        return data

    def array(self, index: int, extension: str) -> np.ndarray:
        """Read a floating-point array from a sample's file in NumPy's ``.npy`` format.

        Args:
            index: index of the sample.
            extension: extension of the file.

        Returns:
            Array with the shape and dtype that the file states.

        Raises:
            BrokenSampleError: if the file is missing, or is not an array of finite floating-point numbers.
        """
        data = self.read(index, self.extension(index, (extension,)))
        try:
            values = parse_array(data)
        except ValueError as error:
            raise BrokenSampleError(f"{self.describe(index)}: .{extension} is not an array ({error})") from error
        if values.dtype.kind != "f" or not np.isfinite(values).all():
            raise BrokenSampleError(
                f"{self.describe(index)}: .{extension} holds {values.dtype}, not finite numbers only"
            )
        return values

    def first_readable(self, read: Callable[[int], T]) -> tuple[int, T] | None:
        """Find the first sample that is not damaged.

        Args:
            read: function that reads a sample, given its index. It raises :class:`BrokenSampleError` for a damaged one.

        Returns:
            Index of the sample and the result of ``read``; None if there are no samples.

        Raises:
            BrokenSampleError: if the first 100 samples, or all samples of a smaller data set, are damaged.
        """
        for index in range(len(self)):
            try:
                return index, read(index)
            except BrokenSampleError:
                if index + 1 == min(len(self), TRIED):
                    raise
        return None

    def label(self, index: int, num_classes: int, labels: Sequence[int] | None = None) -> int:
        """Read the class label of a sample from its ``.cls`` file.

        Args:
            index: index of the sample.
            num_classes: number of classes. It is ignored if ``labels`` is given.
            labels: list whose entry i replaces label i of the shards; None to leave labels unchanged.

        Raises:
            BrokenSampleError: if the label is missing, or is not in the range 0 to ``num_classes - 1``. With ``labels``, the
                range is 0 to ``len(labels) - 1``.
        """
        num_classes = num_classes if labels is None else len(labels)
        # 32 bytes: a label has at most nine digits, and an error message shows the beginning.
        text = self.read(index, self.extension(index, ("cls",)), count=32)
        label = int(text) if re.fullmatch(rb"\s*\d{1,9}\s*", text) else -1
        if not 0 <= label < num_classes:
            raise BrokenSampleError(
                f"{self.describe(index)}: label {text[:20]!r} is not one of the classes 0 to {num_classes - 1}"
            )
        return label if labels is None else labels[label]

    def _find(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    @contextmanager
    def _file(self, shard: int) -> Iterator[int]:
        if self.streamed is not None and self.shards[shard] in self._urls:
            with self.streamed.open(self.shards[shard]) as descriptor:
                yield descriptor
            return
        if self._owner != os.getpid():  # a worker process opens the shards itself
            self._open, self._owner = OrderedDict(), os.getpid()
        # Several threads may read. Each keeps its file open by a reference, even if another one drops it from the dict.
        file = self._open.pop(shard, None) or _OpenFile(self.shards[shard])
        self._open[shard] = file  # the last one, which is dropped last
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)
        yield file.descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}
