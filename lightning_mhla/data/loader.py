"""Batch loader that resumes training with exactly the next sample, given the number of batches already trained on."""

# Longer than other modules because the order of samples, the skipping of broken ones and the state to resume from depend on
# each other.

from __future__ import annotations

import logging
import os
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from lightning_mhla.data.ahead import FetchAhead
from lightning_mhla.data.sampling import (
    Ticket,
    epoch_order,
    evaluation_batches,
    grouped_order,
    kept_random_state,
    repeated,
    seed_sample,
    training_batches,
)
from lightning_mhla.data.source import BrokenSampleError, SampleSource, ShardUnavailableError
from lightning_mhla.system.processes import check_open_files

log = logging.getLogger(__name__)


def sample_groups(source: SampleSource) -> np.ndarray | None:
    """Return the shape group of each sample in a data set.

    Args:
        source: data set.

    Returns:
        Group number of each sample, ``[samples]`` int64. Samples with the same number have the same shape, and a batch contains
        samples of one group only. The result is None if the data set has no groups, because all samples have the same shape.
    """
    groups: np.ndarray | None = getattr(source, "groups", None)
    return groups


class _SeededSamples(Dataset):
    """PyTorch data set that seeds the random generators before it reads a sample, and can replace broken samples.

    A sample is requested with a :class:`Ticket`, which contains its index and the epoch. The entry ``skipped`` of a returned
    sample lists the broken samples that it replaces, as pairs of index and error message.

    Args:
        source: data set to read.
        seed: seed of the training run.
        skip_broken: True to replace a broken sample with the next sample that can be read; False to raise an error.
    """

    def __init__(self, source: SampleSource, seed: int, skip_broken: bool) -> None:
        self.source, self.seed, self.skip_broken = source, seed, skip_broken

    def __getitems__(self, tickets: list[Ticket]) -> list[dict[str, Any]]:
        """Read all samples of one batch; PyTorch's DataLoader calls this method once for each batch."""
        # Without workers, samples must not reseed the generators of the training step; saving and restoring them takes as
        # long as reading a small image, so it happens once per batch.
        with kept_random_state() if get_worker_info() is None else nullcontext():
            return [self._read(ticket) for ticket in tickets]

    def _read(self, ticket: Ticket) -> dict[str, Any]:
        index = ticket.index
        skipped: list[tuple[int, str]] = []
        while True:
            seed_sample(self.seed, ticket)
            try:
                return {**self.source[index], "valid": ticket.valid, "skipped": skipped}
            except BrokenSampleError as error:
                if not self.skip_broken:
                    raise
                skipped.append((index, str(error)))
                index = self._following(index)
                if index == ticket.index:  # every sample was tried, and all are broken
                    raise

    def _following(self, index: int) -> int:
        """Return the index of the next sample with the same shape as sample ``index``; the first sample follows the last."""
        groups = sample_groups(self.source)
        if groups is None:
            return (index + 1) % len(self.source)
        # The replacement is stacked with the other samples of the batch, so it must have their shape.
        alike = np.flatnonzero(groups == groups[index])
        return int(alike[(np.searchsorted(alike, index) + 1) % len(alike)])


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    skipped = [broken for sample in samples for broken in sample.pop("skipped")]
    return {**default_collate(samples), "skipped": skipped}


class _Batches(Sampler[list[Ticket]]):
    """Batch sampler that yields the batches of its iterator ``pending``, which :class:`ResumableLoader` sets for each epoch."""

    def __init__(self) -> None:
        self.pending: Iterator[list[Ticket]] = iter(())

    def __iter__(self) -> Iterator[list[Ticket]]:
        return self.pending


class Progress(NamedTuple):
    """Position of a training run in its data.

    Attributes:
        epoch: number of the epoch, counted from 0.
        done: number of batches of this epoch on which the run has already trained.
        steps: maximum number of batches in an epoch; None if an epoch has no such limit.
    """

    epoch: int = 0
    done: int = 0
    steps: int | None = None


def samples_each(batch_size: int, world: int) -> int:
    """Return the number of samples that each process reads for a batch.

    Args:
        batch_size: number of samples in a batch, summed over all processes.
        world: number of processes.

    Raises:
        ValueError: if the batch size is not a positive multiple of the number of processes.
    """
    if batch_size < 1 or batch_size % world:
        raise ValueError(
            f"batch_size={batch_size} counts the samples of a batch over all processes and must be a multiple of "
            f"their number, {world} (those that share sequences count as one); use {max(1, round(batch_size / world)) * world}"
        )
    return batch_size // world


UNSAID = {"groups": None, "repeats": 1}
"""Values of options that affect the order of samples, assumed for old checkpoints that do not contain these options."""

CHECKSUMS = {"groups": "samples of different shapes", "shards": "shards of different sizes"}
"""Options of which a checkpoint holds only a checksum, and what the error message says if it differs."""

WORKER_SECONDS = 120
"""Seconds that a worker process continues after a signal, while the training process finishes its step and saves."""


STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that stop a run."""


def outlive_signals(worker: int) -> None:
    """Let a worker process continue for 120 seconds after a stop signal, unless its parent process sent the signal.

    Ctrl+C and many schedulers send SIGINT, SIGTERM or SIGUSR1 to all processes of a group. If worker processes ended at once,
    training would fail before it could save a checkpoint. The parent sends SIGTERM only when it no longer needs the worker, for
    example when it exits, and then waits for the worker to end.

    Args:
        worker: number of the worker process, which is not used. PyTorch's DataLoader passes this argument.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # the thread takes them
    Thread(target=_await_signals, args=(os.getppid(),), daemon=True).start()


def _await_signals(parent: int) -> None:
    # The default action of SIGALRM ends the process. Each signal starts the time again.
    while signal.sigwaitinfo(STOPS).si_pid != parent:
        signal.alarm(WORKER_SECONDS)
    os._exit(0)


def with_short_errors(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Iterate over batches, and re-raise errors of worker processes with only their message, without the worker's traceback.

    Args:
        batches: iterator of a PyTorch DataLoader.

    Yields:
        Batches, unchanged.

    Raises:
        BrokenSampleError: if a worker process cannot use a sample.
        ShardUnavailableError: if a worker process cannot download a shard.
    """
    try:
        yield from batches
    except (BrokenSampleError, ShardUnavailableError) as error:
        name = f"{type(error).__name__}: "
        if name not in str(error):
            raise
        raise type(error)(str(error).strip().rsplit(name, 1)[-1]) from error


class ResumableLoader:
    """Batch loader with a reproducible sample order for each epoch, so that training resumes with exactly the next sample.

    Each batch is a dict. It has the entries of the samples, stacked into tensors, and the entry ``valid``, ``[B]`` bool for B
    samples. ``valid`` is False for samples that only fill up an evaluation batch. Lightning adds no sampler of its own, and
    saves the loader's ``state_dict`` in checkpoints.

    Args:
        source: data set to read.
        batch_size: number of samples in a batch, summed over all processes.
        train: True for training: samples are shuffled, the last incomplete batch is dropped, and broken samples are skipped.
            False for evaluation: every sample is read once, in a fixed order, and a broken sample is an error.
        seed: seed of the sample order and of the random numbers for each sample.
        rank: rank of this process.
        world: number of processes.
        window: number of shards whose samples are shuffled together; None to shuffle the samples of all shards together.
        max_skipped: maximum number of different broken samples that this process skips, with a warning for each. One more
            broken sample is an error.
        progress: function that returns the position of the training run in its data. It is called before each epoch.
        num_workers: number of worker processes.
        ahead: function that takes the shard number of each sample in reading order, and returns a context manager that
            downloads shards ahead; None if shards are not downloaded ahead.
        repeats: number of consecutive times that a training sample occurs in an epoch. The length of an epoch does not depend
            on this number, so an epoch contains only one in ``repeats`` of the samples.

    Raises:
        ValueError: if the batch size is not a multiple of the number of processes, the data set is empty, or it has too few
            samples for one training batch.
    """

    def __init__(
        self,
        source: SampleSource,
        batch_size: int,
        *,
        train: bool,
        seed: int,
        rank: int = 0,
        world: int = 1,
        window: int | None = None,
        max_skipped: int = 100,
        progress: Callable[[], Progress] = Progress,
        num_workers: int = 0,
        ahead: Callable[[np.ndarray], FetchAhead] | None = None,
        repeats: int = 1,
    ) -> None:
        samples_each(batch_size, world)
        self.repeats = repeats if train else 1
        if not len(source):
            raise ValueError("the data set holds no samples")
        self.source, self.batch_size, self.train, self.seed = source, batch_size, train, seed
        self.rank, self.world, self.window, self.max_skipped = rank, world, window, max_skipped
        self.progress, self.ahead = progress, ahead
        self.skipped: dict[int, str] = {}  # messages about broken samples by index, in the order of their discovery
        self.groups = sample_groups(source)
        if not len(self):
            raise ValueError(f"{len(source)} training samples do not fill one batch of batch_size={batch_size}")
        self._batches = _Batches()
        self._samples = _SeededSamples(source, seed, skip_broken=train)
        self._loader = DataLoader(
            self._samples,
            batch_sampler=self._batches,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(seed),
            worker_init_fn=outlive_signals,
            collate_fn=_collate,
        )

    def __len__(self) -> int:
        """Return the number of batches in a complete epoch."""
        counts = [len(self.source)] if self.groups is None else np.bincount(self.groups).tolist()
        return sum(count // self.batch_size if self.train else -(-count // self.batch_size) for count in counts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the training batches that remain in the current epoch, or over all evaluation batches."""
        order, copies, epoch = self._order()
        if self.train:
            self._batches.pending = training_batches(order, epoch, self.batch_size, self.rank, self.world, copies)
        else:
            self._batches.pending = self._evaluation(order)
        if self._loader.num_workers and self._loader._iterator is None:
            check_open_files(self._loader.num_workers)
        # Fork worker processes before the prefetcher starts threads. Threads that libraries start in a worker as it is forked
        # must not take a stop signal either (see outlive_signals).
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            batches = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with nullcontext() if self.ahead is None else self.ahead(self._shards_of(order)) as ahead:
            for number, batch in enumerate(with_short_errors(batches)):
                if ahead is not None:
                    ahead.passed(number * self.batch_size)
                self._count(batch.pop("skipped"))
                yield batch

    def first_batch(self) -> dict[str, Any]:
        """Return the first evaluation batch of this process, read without worker processes."""
        order, *_ = self._order()
        batch = _collate(self._samples.__getitems__(next(self._evaluation(order))))
        self._count(batch.pop("skipped"))
        return batch

    def _order(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Determine the samples that remain to be read in the current epoch, in reading order, for all processes together.

        Returns:
            Indices of these samples, ``[n]`` int64; how often each sample has already occurred in the epoch, ``[n]`` int64; and
            the number of the epoch.
        """
        if not self.train:
            order = np.arange(len(self.source))
            return (order if self.groups is None else np.argsort(self.groups, kind="stable")), np.zeros_like(order), 0
        epoch, done, steps = self.progress()
        order = epoch_order(self.source.shard_sizes, self.seed, epoch, self.window)
        if self.groups is not None:
            order = grouped_order(order, self.groups, self.batch_size)
        # Positions count samples of all processes, so that the position is the same for any number of processes.
        remaining = slice(done * self.batch_size, None if steps is None else steps * self.batch_size)
        order, copies = repeated(order, self.repeats)
        return order[remaining], copies[remaining], epoch

    def _evaluation(self, order: np.ndarray) -> Iterator[list[Ticket]]:
        # `order` is sorted by group; each part has one group.
        parts = [order] if self.groups is None else np.split(order, np.cumsum(np.bincount(self.groups))[:-1])
        batches = (
            [ticket._replace(index=int(samples[ticket.index])) for ticket in batch]
            for samples in parts
            for batch in evaluation_batches(len(samples), self.batch_size, self.rank, self.world)
        )
        if self.groups is None:
            yield from batches
            return
        # mixed, so that a few batches (limit_val_batches) are not those of the first groups only
        grouped = list(batches)
        for index in np.random.default_rng(0).permutation(len(grouped)):
            yield grouped[index]

    def _shards_of(self, order: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.cumsum(self.source.shard_sizes), order, side="right")

    def _count(self, skipped: list[tuple[int, str]]) -> None:
        for index, message in skipped:
            if index not in self.skipped:
                log.warning("skipped a broken sample: %s", message)
                self.skipped[index] = message
        if len(self.skipped) > self.max_skipped:
            raise BrokenSampleError(
                f"{len(self.skipped)} training samples are broken, more than max_skipped={self.max_skipped}; "
                "the warnings above name them: repair the data, or raise max_skipped"
            )

    @property
    def _iterator(self) -> Any:
        """Iterator of PyTorch's DataLoader, with which Lightning shuts down worker processes; None if none are running."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._loader._iterator = value

    def state_dict(self) -> dict[str, Any]:
        """Return the options that determine the sample order, by name, such as ``batch_size`` and ``seed``.

        The options are saved in checkpoints, and compared when training resumes.
        """
        # Checksums, because a checkpoint should not hold a number for each sample.
        groups = None if self.groups is None else zlib.crc32(self.groups.tobytes())
        sizes = np.array(self.source.shard_sizes, np.int64)
        # Without a window, the order does not depend on the division into shards.
        shards = None if self.window is None or self.window >= len(sizes) else zlib.crc32(sizes.tobytes())
        options = {"batch_size": self.batch_size, "seed": self.seed, "window": self.window}
        return {"samples": len(self.source), "repeats": self.repeats, **options, "groups": groups, "shards": shards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a checkpoint was saved with the sample order of this loader.

        The check is skipped if the run has not trained on any batch yet.

        Args:
            state: state of the loader in the checkpoint, as returned by :meth:`state_dict`.

        Raises:
            ValueError: if an option that determines the order, such as the batch size or the seed, differs.
        """
        epoch, done, _ = self.progress()
        if epoch or done:
            self.check_order(state)

    def check_order(self, state: dict[str, Any]) -> None:
        """Check that a checkpoint was saved with the sample order of this loader.

        Args:
            state: state of the loader in the checkpoint, as returned by :meth:`state_dict`.

        Raises:
            ValueError: if an option that determines the order, such as the batch size or the seed, differs.
        """
        check_same_order(state, self.state_dict())


def check_same_order(saved_options: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that the options that determine the order of samples equal those in a checkpoint.

    Args:
        saved_options: options in the checkpoint, by name. If an old checkpoint lacks ``groups`` or ``repeats``, their
            default values are assumed. Other missing options are not compared.
        options: current options, by name.

    Raises:
        ValueError: if an option differs.
    """
    for key, current in options.items():
        saved = saved_options.get(key, UNSAID.get(key, current))
        if saved == current:
            continue
        if key in CHECKSUMS:
            raise ValueError(
                f"the checkpoint was trained on {CHECKSUMS[key]} than those of this run: it cannot resume with the very next "
                "sample. Use the data of the checkpoint, or start a new run from the weights alone"
            )
        raise ValueError(
            f"the checkpoint was trained with {key}={saved}, this run has {key}={current}: it cannot resume with the very next "
            f"sample. Set {key} back, or start a new run from the weights alone"
        )
