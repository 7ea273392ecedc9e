"""Atomic writing of WebDataset shards, so that a stopped command resumes where it was."""

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

from lightning_mhla.data.origins import Origin, ShardSet, check_still_the_same, resume_order, sample_key
from lightning_mhla.data.source import BrokenSampleError, SampleSource
from lightning_mhla.system.files import UNFINISHED, beside

log = logging.getLogger(__name__)

Item = TypeVar("Item")

AT_ONCE = 32
"""Samples of a shard that threads prepare while others are written."""


class Skipped:
    """Counts the samples that a command leaves out because they are broken, with a warning for each.

    Args:
        limit: number of samples to skip before it stops.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0

    def add(self, error: BrokenSampleError) -> None:
        """Count one.

        Raises:
            BrokenSampleError: when there are more than the limit.
        """
        log.warning("skipped: %s", error)
        self.count += 1
        if self.count > self.limit:
            raise BrokenSampleError(
                f"broken samples: {self.count}, more than --max_skipped {self.limit}; the warnings above name them"
            ) from error


class Preparation:
    """One call of a command that writes the shards of a prefix; processes that share it have a rank each.

    Entering it waits for other calls for the same prefix and compares what the shards were begun with; see
    :func:`lightning_mhla.data.origins.resume_order` for the errors.

    Args:
        folder: of the shards, made if missing.
        prefix: of their names.
        options: plain values that the samples depend on.
        origins: what the samples are made from, in the order in which they are written.
        per_shard: samples of a shard, one for each origin; None where an origin holds many samples.
        max_skipped: broken samples that this process skips before it stops.
        force: delete the shards of an earlier call first.
        share: rank of this process, and number of processes.

    Attributes:
        order: index into ``origins`` of each sample; None for a sample whose origin is gone.
        skipped: counts broken samples.
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
    ) -> None:
        self.shards, self.options, self.origins, self.per_shard = ShardSet(folder, prefix), options, origins, per_shard
        self.skipped, self.force, self.share = Skipped(max_skipped), force, share
        self.order: list[int | None] = []
        self._locks = ExitStack()

    def __enter__(self) -> Preparation:
        world = self.share[1]
        folder, prefix = self.shards.folder, self.shards.prefix
        if self.force and world > 1:
            raise ValueError(f"--force is for a single process; delete {folder / prefix}-* instead, then call again")
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as locks:
            locks.enter_context(locked(folder / f".{prefix}.lock", shared=world > 1))
            if self.force:
                self.shards.delete()
            # Of the processes of one call, the first one records what the others compare.
            with locked(folder / f".{prefix}.begin.lock", shared=False) if world > 1 else nullcontext():
                self.order = resume_order(self.shards, self.options, self.origins, self.per_shard)
            self._locks = locks.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._locks:
            if kind is None and self.share[0] == 0:
                check_still_the_same(self.shards, self.origins, self.per_shard)

    def fill(
        self,
        count: int,
        per_shard: int,
        samples: Callable[[range], Iterable[dict[str, Any]]],
        title: str,
        digits: int = 5,
    ) -> list[Path]:
        """Write this process's share of the shards ``folder/prefix-00000.tar`` and so on that are not there yet.

        Args:
            count: number of samples in all shards.
            per_shard: samples in a shard.
            samples: the samples with some numbers.
            title: title of the progress bar.
            digits: digits of the number in a shard's name.

        Returns:
            Paths of all shards, of every process.
        """
        rank, world = self.share
        shards = shard_ranges(self.shards.folder, self.shards.prefix, count, per_shard, digits)
        mine = shards[rank::world]
        fill_shards(
            ((path, len(here), samples(here)) for path, here in mine),
            title,
            sum(len(here) for _, here in mine),
            quiet=rank > 0,
        )
        return [path for path, _ in shards]


@contextmanager
def locked(file: Path, shared: bool) -> Iterator[None]:
    """Holds a lock on a file, which is made if missing; waits, with a message, while another process holds it.

    Processes that share one call take a shared lock. Some network file systems have no locks, or none between hosts;
    :func:`shard_writer` is safe without.
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
) -> list[Path]:
    """Write ``items`` in order as ``folder/prefix-0000.tar`` and so on.

    A shard gets its name when it is complete; one that exists is left alone, so calling again after a stop resumes. A second
    call for the same prefix waits for the first.

    Args:
        items: samples to write; sample i gets the key ``i`` in eight digits.
        encode: the members of one item, extension to bytes or a number; called in several threads.
        folder: made if missing.
        prefix: prefix of the file names.
        per_shard: samples in a shard; the last may hold fewer, and so may one with broken items.
        max_skipped: items that are left out, with a warning each, where ``encode`` raises a BrokenSampleError.
        made_with: options that the samples depend on.
        origins: what each item is made from; None for items that say everything themselves.
        force: delete the shards of an earlier call first.

    Returns:
        Paths of all shards.

    Raises:
        BrokenSampleError: when more items are broken than ``max_skipped``, or all of them.
        ValueError: when the folder holds shards of other items, or of items that have changed, or made with other options.
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
        Preparation(folder, prefix, options, origins, per_shard, max_skipped, force) as call,
        ThreadPoolExecutor() as pool,
    ):

        def samples(here: range) -> Iterator[dict[str, Any]]:
            for few in (here[i : i + AT_ONCE] for i in range(0, len(here), AT_ONCE)):
                numbers = [call.order[number] for number in few]
                chosen = [None if number is None else items[number] for number in numbers]
                for number, members in zip(few, pool.map(attempt, chosen), strict=True):
                    if isinstance(members, BrokenSampleError):
                        call.skipped.add(members)
                    elif members is not None:
                        yield {"__key__": sample_key(number), **members}

        paths = call.fill(len(call.order), per_shard, samples, f"writing {prefix} shards", digits=4)
        if items and call.skipped.count == len(items):
            call.shards.delete()
            raise BrokenSampleError(f"none of the {len(items)} samples can be used; see the warnings above")
    return paths


def shard_ranges(folder: Path, prefix: str, count: int, per_shard: int, digits: int = 5) -> list[tuple[Path, range]]:
    """Path and samples of each shard: ``folder/prefix-00000.tar`` and so on, ``per_shard`` of ``count`` samples in each."""
    starts = range(0, count, per_shard)
    return [
        (folder / f"{prefix}-{number:0{digits}d}.tar", range(start, min(start + per_shard, count)))
        for number, start in enumerate(starts)
    ]


def fill_shards(
    shards: Iterable[tuple[Path, int, Iterable[dict[str, Any]]]], title: str, total: int | None, quiet: bool = False
) -> list[Path]:
    """Write shards that do not exist yet, each under its name once it is complete.

    Args:
        shards: path, number of samples and samples of each; samples of a shard that exists are not asked for.
        title: title of the progress bar.
        total: samples of all shards; None if unknown.
        quiet: whether there is no progress bar.

    Returns:
        Paths of all shards.
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
    """Number and sample of those numbers in ``here`` whose sample is there and can be read; the broken ones are counted."""
    for number in here:
        index = order[number]
        if index is None:
            continue
        try:
            yield number, source[index]
        except BrokenSampleError as error:
            skipped.add(error)


def grouped(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    """Lists of ``count`` items that follow each other; the last may hold fewer."""
    iterator = iter(items)
    while few := list(itertools.islice(iterator, count)):
        yield few


def array_bytes(values: Tensor | np.ndarray) -> bytes:
    """A tensor as the bytes of a ``.npy`` file, which :meth:`ShardReader.array` reads."""
    stream = io.BytesIO()
    np.save(stream, values.cpu().numpy() if isinstance(values, Tensor) else values, allow_pickle=False)
    return stream.getvalue()


@contextmanager
def shard_writer(path: Path) -> Iterator[wds.TarWriter]:
    """Writes a shard that gets its name when it is complete, whoever else writes the same one.

    The unfinished file beside it belongs to this process alone. Those of others are removed at the end if nobody has written
    to them in the meantime: their processes were killed. One that still writes, on a host whose locks are not seen here,
    notices that its file is gone, and that the shard is there.
    """
    left = {part: _stamp(part) for part in _unfinished(path)}
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
    except FileNotFoundError as error:  # taken for a leftover by somebody without our lock
        if not path.exists():
            raise FileExistsError(
                f"{aside} was removed while it was written; call again once nothing else writes it"
            ) from error
    for part, stamp in left.items():
        if stamp is not None and _stamp(part) == stamp:
            part.unlink(missing_ok=True)


def _unfinished(path: Path) -> list[Path]:
    """Unfinished files of a shard, left by any process."""
    parts = path.parent.glob(f"{glob.escape(path.name)}.*.part")
    return [part for part in parts if (match := UNFINISHED.fullmatch(part.name)) and match[1] == path.name]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Identity, size and time of a file; None if it is not there."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
