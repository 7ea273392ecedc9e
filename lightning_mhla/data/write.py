"""Atomic writing of WebDataset shards, so that an interrupted command can be resumed."""

# Longer than other modules because it contains all steps of a command that writes shards, from locking the folder to writing
# each file.

from __future__ import annotations

import errno
import fcntl
import glob
import io
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import webdataset as wds
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from lightning_mhla.data.classes import CLASSES, read_classes, write_classes
from lightning_mhla.data.origins import Origin, ShardSet, check_still_the_same, resume_order, sample_key
from lightning_mhla.data.source import BrokenSampleError, SampleSource
from lightning_mhla.data.tables import load_table
from lightning_mhla.system.files import UNFINISHED, beside, written_whole
from lightning_mhla.system.listing import is_visible, shown, without_controls
from lightning_mhla.system.ranges import check_range

log = logging.getLogger(__name__)

Item = TypeVar("Item")

AT_ONCE = 32
"""Number of samples that threads encode in one batch, before the batch is written."""


class Skipped:
    """Counter of the broken samples that a command skips, up to a limit.

    Args:
        limit: maximum number of samples to skip.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0

    def add(self, error: BrokenSampleError) -> None:
        """Count a broken sample and log its error message as a warning.

        Raises:
            BrokenSampleError: if the number of broken samples exceeds the limit.
        """
        log.warning("skipped: %s", error)
        self.count += 1
        if self.count > self.limit:
            raise BrokenSampleError(
                f"broken samples: {self.count}, more than --max_skipped {self.limit}; the warnings above name them"
            ) from error


class Preparation:
    """Context manager for a command that writes shards ``PREFIX-*.tar``, in one or several processes.

    On entry, it waits until earlier commands for the same prefix have ended. Then it saves the options and the origins (source
    files and other inputs) of the samples or, if shards exist already, compares them with the saved ones. On exit, it checks
    that no source file has changed meanwhile.

    Args:
        folder: folder of the shards, created if it does not exist.
        prefix: prefix of the shard names.
        options: JSON values that the samples depend on.
        origins: files and other inputs of the samples, in the order in which the samples are written.
        per_shard: number of samples in a shard if each sample has its own origin; None if an origin has many samples. With a
            number, the origins of samples in incomplete shards may still change. With None, no origin may change once a shard
            is complete.
        max_skipped: maximum number of broken samples that this process skips.
        force: whether to delete existing shards with the same prefix first, which requires a single process.
        share: rank of this process and number of processes.
        classes: class names in the order of the labels, which are written to ``PREFIX-classes.txt``; None if they are unknown.

    Attributes:
        order: result of :func:`resume_order`, a list with the current index in ``origins`` of each recorded origin; the index
            is None if the origin no longer exists.
        skipped: counter of broken samples.

    Raises:
        ValueError: if an origin is one of the shards to write. On entry, if the options, origins or classes of existing shards
            have changed, or several processes use ``force``. On exit, if a source file has changed.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        options: Mapping[str, Any],
        origins: Sequence[Origin],
        per_shard: int | None = None,
        max_skipped: int = 0,
        force: bool = False,
        share: tuple[int, int] = (0, 1),
        classes: Sequence[str] | None = None,
    ) -> None:
        if per_shard is not None:
            check_per_shard(per_shard)  # here as well, because force deletes the existing shards before any are written
        self.shards, self.options, self.origins, self.per_shard = ShardSet(folder, prefix), options, origins, per_shard
        self.shards.check_not_among(origins)
        check_range(least=0, max_skipped=max_skipped)
        self.skipped, self.force, self.share = Skipped(max_skipped), force, share
        self.classes = classes
        self._previous_list: bytes | None = None
        self.order: list[int | None] = []
        self._locks = ExitStack()

    def __enter__(self) -> Preparation:
        world = self.share[1]
        folder, prefix = self.shards.folder, self.shards.prefix
        # A second process could otherwise delete the shards of a first one that has finished.
        if self.force and world > 1:
            raise ValueError(f"--force is for a single process; delete {folder / prefix}-* instead, then call again")
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as locks:
            locks.enter_context(locked(folder / f".{prefix}.lock", shared=world > 1))
            if self.force:
                self.shards.delete()
            # The first process of a call to get this lock records the origins; the others compare theirs with the record.
            with locked(folder / f".{prefix}.begin.lock", shared=False) if world > 1 else nullcontext():
                self.order = resume_order(self.shards, self.options, self.origins, self.per_shard)
                if self.classes is not None:
                    self._list_classes(self.classes)
            self._locks = locks.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._locks:
            if kind is None and self.share[0] == 0:
                check_still_the_same(self.shards, self.origins, self.per_shard)
            # Later calls for other prefixes would take the labels of the list.
            if kind is not None and self.classes is not None and self.share[1] == 1 and not self.shards.finished():
                if self._previous_list is None:
                    self._class_list.unlink(missing_ok=True)
                else:  # the user's own list, perhaps the one given to this call
                    with written_whole(self._class_list) as aside:
                        aside.write_bytes(self._previous_list)

    @property
    def _class_list(self) -> Path:
        return self.shards.folder / f"{self.shards.prefix}-{CLASSES}"

    def _list_classes(self, names: Sequence[str]) -> None:
        """Write the list of class names, after a check that the labels of existing shards keep their names.

        Raises:
            ValueError: if the list recorded for existing shards is not the beginning of ``names``.
        """
        file = self._class_list
        recorded_names = (read_classes(file) or []) if self.shards.finished() else []
        # A longer list, such as that of the complete data set, may add classes at the end.
        if list(map(without_controls, names[: len(recorded_names)])) != recorded_names:
            raise ValueError(
                f"{file.with_name(self.shards.prefix)}-*.tar have the labels of {file.name}, which lists other classes, or "
                "another order, than this command; --force makes them again, or choose another folder or --prefix"
            )
        self._previous_list = file.read_bytes() if file.is_file() else None
        write_classes(file, names)

    def fill(
        self,
        count: int,
        per_shard: int,
        samples: Callable[[range], Iterable[dict[str, Any]]],
        title: str,
        digits: int = 5,
    ) -> list[Path]:
        """Write the shards that are assigned to this process and do not exist yet: ``folder/prefix-00000.tar`` and so on.

        Args:
            count: number of samples in all shards.
            per_shard: number of samples in a shard.
            samples: function that takes a range of sample numbers, and returns the samples with these numbers. A sample is a
                dict with its key under ``__key__``, and the content of each of its files by file extension.
            title: title of the progress bar.
            digits: number of digits in a shard's name.

        Returns:
            Paths of all shards, including those of other processes.

        Raises:
            BrokenSampleError: if all samples are broken. This is checked only if a single process writes all shards.
        """
        rank, world = self.share
        shards = shard_ranges(self.shards.folder, self.shards.prefix, count, per_shard, digits)
        own_shards = shards[rank::world]
        fill_shards(
            ((path, len(numbers), samples(numbers)) for path, numbers in own_shards),
            title,
            sum(len(numbers) for _, numbers in own_shards),
            quiet=rank > 0,
        )
        # Shards of an earlier, interrupted call may be empty as well, so samples are counted and not what this call skipped.
        if world == 1 and shards and not any(len(load_table(path).keys) for path, _ in shards):
            self.shards.delete()
            raise BrokenSampleError(f"none of the {count} samples can be used; see the warnings above")
        return [path for path, _ in shards]


@contextmanager
def locked(file: Path, shared: bool) -> Iterator[None]:
    """Context manager that locks a file. It logs a warning and waits while another process holds the lock.

    Commands that write the same shards lock a common file. If the file system does not support locks, nothing is locked.
    The shards remain intact even then, because each process writes to a temporary file of its own.

    Args:
        file: path of the lock file, created if it does not exist.
        shared: True for a shared lock, which all processes of one command may hold at once; False for an exclusive lock.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with file.open("a") as stream:
        try:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning(
                "another command writes shards of this prefix in %s; waiting until it has finished", file.parent
            )
            fcntl.flock(stream, kind)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            log.info("%s has no locks (%s)", file.parent, error)
        yield


def write_shards(
    items: Sequence[Item],
    encode: Callable[[Item], dict[str, Any]],
    folder: Path,
    prefix: str,
    per_shard: int,
    max_skipped: int = 0,
    made_with: Mapping[str, Any] | None = None,
    origins: Sequence[Origin] | None = None,
    force: bool = False,
    classes: Sequence[str] | None = None,
) -> list[Path]:
    """Write items as samples of the shards ``folder/prefix-0000.tar``, ``folder/prefix-0001.tar`` and so on, in order.

    A shard gets its final name only when it is complete, and existing shards are not written again. To resume after an
    interruption, call the function again. It waits until earlier calls for the same prefix, in any process, have ended.

    Args:
        items: items to encode, one for each sample. Sample i gets the key ``i`` with eight digits.
        encode: function that takes an item and returns the files of its sample: a dict from file extension to content, which is
            bytes or a number. It runs in threads, and raises BrokenSampleError for a broken item.
        folder: folder of the shards, created if it does not exist.
        prefix: prefix of the shard names.
        per_shard: number of samples in a shard. The last shard, and shards with broken items, may contain fewer.
        max_skipped: maximum number of broken items that are left out, with a warning for each.
        made_with: options that the samples depend on; None if there are none. A later call with different options is an error.
        origins: files and other inputs of each item; None if ``repr(item)`` describes an item completely.
        force: whether to delete existing shards with the same prefix first.
        classes: class names in the order of the labels, which are written to ``PREFIX-classes.txt``; None to write no list.

    Returns:
        Paths of all shards.

    Raises:
        BrokenSampleError: if more than ``max_skipped`` items are broken, or all of them are.
        ValueError: if the folder contains shards with this prefix that were made from different items, with different options
            or with different classes.
    """
    if origins is None:
        origins = [Origin(f"item {number}", note=repr(item)) for number, item in enumerate(items)]
    options = {"per_shard": per_shard, **(made_with or {})}

    def attempt(item: Item | None) -> dict[str, Any] | BrokenSampleError | None:
        try:
            return None if item is None else encode(item)
        except BrokenSampleError as error:
            return error

    with (
        Preparation(folder, prefix, options, origins, per_shard, max_skipped, force, classes=classes) as call,
        ThreadPoolExecutor() as pool,
    ):

        def samples(here: range) -> Iterator[dict[str, Any]]:
            # `pool.map` encodes all its items ahead of the writer, so it gets only as many as may be in memory.
            for batch in (here[i : i + AT_ONCE] for i in range(0, len(here), AT_ONCE)):
                numbers = [call.order[number] for number in batch]
                chosen = [None if number is None else items[number] for number in numbers]
                for number, members in zip(batch, pool.map(attempt, chosen), strict=True):
                    if isinstance(members, BrokenSampleError):
                        call.skipped.add(members)
                    elif members is not None:
                        yield {"__key__": sample_key(number), **members}

        return call.fill(len(call.order), per_shard, samples, f"writing {prefix} shards", digits=4)


def check_per_shard(per_shard: int) -> None:
    """Check that the number of samples in a shard is positive.

    Raises:
        ValueError: if the number is below 1.
    """
    if per_shard < 1:
        raise ValueError(f"per_shard={per_shard} must be at least 1, the number of samples in a shard")


def check_outside(target: Path, sources: Iterable[Path]) -> None:
    """Check that the folder of new shards is not inside a folder that they are made from.

    A repeated call would read the shards, and the files beside them, as new input. Hidden folders are not read as input.

    Raises:
        ValueError: if ``target`` is one of the ``sources``, or inside one and not hidden.
    """
    for source in filter(Path.is_dir, sources):
        path, folder = target.resolve(), source.resolve()
        if path.is_relative_to(folder) and all(map(is_visible, path.relative_to(folder).parts)):
            raise ValueError(
                f"the folder for the shards, {shown(target)}, is inside the source {shown(source)}; choose one outside of it"
            )


def check_not_the_source(target: Path, source: Path) -> None:
    """Check that the folder of new shards is not the folder of the shards that they are made from.

    A repeated call would read the new shards as well.

    Raises:
        ValueError: if both are the same folder.
    """
    if target.resolve() == source.resolve():
        raise ValueError(
            f"{shown(source)} is the source, so that new shards in it would be read as well; choose another folder"
        )


def shard_ranges(folder: Path, prefix: str, count: int, per_shard: int, digits: int = 5) -> list[tuple[Path, range]]:
    """Divide consecutively numbered samples among shards.

    Args:
        folder: folder of the shards.
        prefix: prefix of the shard names.
        count: number of samples in all shards.
        per_shard: number of samples in a shard. The last shard may contain fewer.
        digits: number of digits in a shard's name.

    Returns:
        List of pairs: path of a shard, such as ``folder/prefix-00000.tar``, and range of its sample numbers.

    Raises:
        ValueError: if ``per_shard`` is below 1.
    """
    check_per_shard(per_shard)
    starts = range(0, count, per_shard)
    return [
        (folder / f"{prefix}-{number:0{digits}d}.tar", range(start, min(start + per_shard, count)))
        for number, start in enumerate(starts)
    ]


def fill_shards(
    shards: Iterable[tuple[Path, int, Iterable[dict[str, Any]]]], title: str, total: int | None, quiet: bool = False
) -> list[Path]:
    """Write all shards that do not exist yet. A shard gets its final name only when it is complete.

    Args:
        shards: path, number of samples, and iterable of samples for each shard. The samples of an existing shard are not read.
        title: title of the progress bar.
        total: number of samples in all shards; None if unknown.
        quiet: whether to hide the progress bar.

    Returns:
        Paths of all shards, including those that already existed.
    """
    paths, done = [], 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=quiet) as progress:
        bar = progress.add_task(title, total=total)
        for path, count, samples in shards:
            paths.append(path)
            if not path.exists():
                with shard_writer(path) as writer:
                    for sample in samples:
                        writer.write(sample)
                        progress.advance(bar)
            done += count
            progress.update(bar, completed=done)
    return paths


def readable(
    source: SampleSource, order: Sequence[int | None], here: Iterable[int], skipped: Skipped
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterate over the samples with the given numbers, leaving out samples that are missing or broken.

    Args:
        source: data set to read.
        order: list whose entry i is the index into ``source`` of sample number i; None if the sample no longer exists.
        here: numbers of the samples to read.
        skipped: counter to which broken samples are added.

    Yields:
        Number of a sample, and the sample.

    Raises:
        BrokenSampleError: if more samples are broken than the counter allows.
    """
    for number in here:
        index = order[number]
        if index is None:
            continue
        try:
            yield number, source[index]
        except BrokenSampleError as error:
            skipped.add(error)


def grouped(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    """Iterate over lists of ``count`` consecutive items. The last list may be shorter."""
    iterator = iter(items)
    while group := list(itertools.islice(iterator, count)):
        yield group


def array_bytes(values: Tensor | np.ndarray) -> bytes:
    """Encode a tensor or array as the content of a file in NumPy's ``.npy`` format, which cannot hold bfloat16 tensors."""
    stream = io.BytesIO()
    np.save(stream, values.cpu().numpy() if isinstance(values, Tensor) else values, allow_pickle=False)
    return stream.getvalue()


@contextmanager
def shard_writer(path: Path) -> Iterator[wds.TarWriter]:
    """Context manager that yields a writer for one shard, and gives the shard its final name once it is complete.

    Several processes may write the same shard, each to a temporary file of its own in the same folder. On exit, older temporary
    files of the shard that have not changed since entry are removed, because their processes were probably killed. A process
    that was only slow then finds its temporary file missing, and keeps the shard of the faster process.

    Args:
        path: path of the shard.

    Raises:
        FileExistsError: if another process removed the temporary file, and the shard does not exist.
    """
    abandoned = {part: _stamp(part) for part in _unfinished(path)}
    aside = beside(path)
    stream = aside.open("xb")
    try:
        with stream, wds.TarWriter(stream, mtime=0) as writer:
            yield writer
            writer.close()
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    try:
        aside.replace(path)
    except FileNotFoundError as error:  # a process that does not see our lock removed it as a leftover
        if not path.exists():
            raise FileExistsError(
                f"{aside} was removed while it was being written; run the command again once no other process writes it"
            ) from error
    for part, stamp in abandoned.items():
        if stamp is not None and _stamp(part) == stamp:
            part.unlink(missing_ok=True)


def _unfinished(path: Path) -> list[Path]:
    """List the temporary files of a shard, including those that killed processes have left behind."""
    parts = path.parent.glob(f"{glob.escape(path.name)}.*.part")
    return [part for part in parts if (match := UNFINISHED.fullmatch(part.name)) and match[1] == path.name]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return the inode, size in bytes and modification time in nanoseconds of a file; None if the file does not exist."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
