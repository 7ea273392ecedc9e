"""Order and random numbers of samples, as pure functions of seed, epoch and position in the data.

No state has to be saved: the position of a run is the number of batches that it has trained on. The order does not depend on
the number of processes or workers. Batch b of an epoch contains the same samples, however many processes share it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

_ORDER, _SAMPLE, _STEP, _NOISE = range(4)  # independent streams of random numbers, one for each purpose


class Ticket(NamedTuple):
    """Request to read one sample in an epoch.

    Attributes:
        epoch: number of the epoch, counted from 0. The random numbers of the sample depend on it.
        index: index of the sample in the data set.
        valid: False for a sample that only fills up a batch, so that all processes get the same number of samples.
        copy: number of earlier occurrences of the sample in the epoch. Each occurrence has its own random numbers.
    """

    epoch: int
    index: int  # type: ignore[assignment]  # tuple.index is not used
    valid: bool = True
    copy: int = 0


def epoch_order(shard_sizes: Sequence[int], seed: int, epoch: int, window: int | None = None) -> np.ndarray:
    """Compute the shuffled order of all samples in one epoch.

    Args:
        shard_sizes: number of samples in each shard.
        seed: seed of the training run.
        epoch: number of the epoch, counted from 0.
        window: number of shards whose samples are shuffled together. The shards are shuffled first, and then divided into
            groups of this size, so that only a few shards are read at a time. None shuffles the samples of all shards together.

    Returns:
        Indices of all samples in shuffled order, ``[sum(shard_sizes)]`` int64.
    """
    generator = np.random.default_rng([seed, _ORDER, epoch])
    if window is None or window >= len(shard_sizes):
        return generator.permutation(sum(shard_sizes))
    starts = np.concatenate([[0], np.cumsum(shard_sizes)[:-1]])
    shards = generator.permutation(len(shard_sizes))
    windows = []
    for first in range(0, len(shards), window):
        members = [np.arange(shard_sizes[s]) + starts[s] for s in shards[first : first + window]]
        windows.append(generator.permutation(np.concatenate(members)))
    return np.concatenate(windows)


def grouped_order(order: np.ndarray, groups: np.ndarray, batch: int) -> np.ndarray:
    """Reorder samples so that each batch is full and contains samples with the same shape only.

    Batches are ordered by the position that their last sample has in ``order``. Samples that do not fill a batch are left out.

    Args:
        order: indices of samples in reading order, ``[n]`` int64.
        groups: group number of each sample in the data set, ``[samples]`` int64. Samples of one group have the same shape.
        batch: number of samples in a batch.

    Returns:
        Indices of samples in the new order, ``[m]`` int64 with ``m <= n``.
    """
    group_of_sample = groups[order]
    positions_by_group = [np.flatnonzero(group_of_sample == group) for group in np.unique(group_of_sample)]
    # [batches of the group, batch]; an incomplete last batch is cut off.
    batches_by_group = [
        positions[: len(positions) // batch * batch].reshape(-1, batch) for positions in positions_by_group
    ]
    # The empty array gives the result its shape if no group fills a batch.
    batches = np.concatenate([*batches_by_group, np.zeros((0, batch), np.int64)])
    return order[batches[np.argsort(batches[:, -1])]].reshape(-1)


def training_batches(
    order: np.ndarray, epoch: int, batch: int, rank: int, world: int, copies: np.ndarray
) -> Iterator[list[Ticket]]:
    """Yield the samples that this process reads from each training batch of an epoch.

    An incomplete last batch is left out.

    Args:
        order: indices of samples in reading order, ``[n]`` int64.
        epoch: number of the epoch, counted from 0.
        batch: number of samples in a batch, summed over all processes.
        rank: rank of this process.
        world: number of processes.
        copies: number of earlier occurrences of each sample in the epoch, ``[n]`` int64.

    Yields:
        List of ``batch // world`` tickets, each a request to read one sample.
    """
    share = batch // world
    for start in range(rank * share, len(order) // batch * batch, batch):
        part = slice(start, start + share)
        yield [Ticket(epoch, int(i), copy=int(n)) for i, n in zip(order[part], copies[part], strict=True)]


def repeated(order: np.ndarray, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Repeat samples in consecutive positions, for repeated augmentation, without making the order of samples longer.

    This is the method of "Augment your batch" (arXiv 1901.09335). The order keeps its length n, so only its first
    ``n / repeats`` samples remain, as in the code of DeiT.

    Args:
        order: indices of samples in reading order, ``[n]`` int64.
        repeats: number of times that each remaining sample occurs.

    Returns:
        Indices of samples in the new order, and the number of earlier occurrences of each sample, both ``[n]`` int64.
    """
    count = len(order)
    return np.repeat(order, repeats)[:count], np.tile(np.arange(repeats), -(-count // repeats))[:count]


def evaluation_batches(samples: int, batch: int, rank: int, world: int) -> Iterator[list[Ticket]]:
    """Yield this process's part of each evaluation batch; together, the processes read all samples.

    All processes get the same number of batches, and the same number of samples in each. If the samples of the last batch
    cannot be divided equally, the last sample is read again, and the additional tickets have ``valid=False``.

    Args:
        samples: number of samples in the data set.
        batch: number of samples in a batch, summed over all processes.
        rank: rank of this process.
        world: number of processes.

    Yields:
        List of tickets, each a request to read one sample.
    """
    share = batch // world
    rounds = -(-samples // batch)
    for step in range(rounds):
        first = step * batch
        # The last batch may be smaller: all processes read the same number, as few as possible.
        size = min(share, -(-(samples - first) // world))
        indices = [first + rank + i * world for i in range(size)]
        yield [Ticket(0, min(index, samples - 1), index < samples) for index in indices]


def seed_sample(seed: int, ticket: Ticket) -> None:
    """Seed the global CPU random generators of Python, NumPy and torch before a sample is read.

    Args:
        seed: seed of the training run.
        ticket: request for the sample. Its epoch, index and copy select the random numbers.
    """
    # The first copy has the random numbers of a run without repeats.
    _seed_all([seed, _SAMPLE, ticket.epoch, ticket.index, *([ticket.copy] if ticket.copy else [])])


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the global random generators of Python, NumPy and torch, on the CPU and the current GPU, before a training step.

    Random operations of the step, such as dropout and mixup, then do not depend on earlier steps.

    Args:
        seed: seed of the training run.
        step: number of training batches before this step.
        rank: rank of this process. Each rank gets different random numbers.
    """
    word = _seed_all([seed, _STEP, step, rank])
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(word)


def sample_generator(seed: int, index: int) -> torch.Generator:
    """Create a CPU random generator for the noise of one sample.

    Args:
        seed: seed of the run.
        index: index of the sample. The same seed and index always give the same random numbers.
    """
    word = int(np.random.SeedSequence([seed, _NOISE, index]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(word)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Context manager that restores the global CPU random states of Python, NumPy and torch on exit."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed_all(entropy: list[int]) -> int:
    word = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    random.seed(word)
    # NumPy's global generator takes seeds of 32 bits.
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word)  # torch.manual_seed queues a seed for CUDA too, with a stack trace each
    return word
