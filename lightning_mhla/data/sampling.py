"""Order and random numbers of samples, as pure functions of seed, epoch and position.

Nothing here has a state, so nothing can be lost: the position of a run is the number of batches that it has trained on.
The order does not depend on the number of processes or workers either: global batch b of an epoch holds the same
samples however many share it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

_ORDER, _SAMPLE, _STEP, _NOISE = range(4)  # one stream of random numbers for each purpose


class Ticket(NamedTuple):
    """Sample to read: its index, the epoch, which its random numbers depend on, and whether it counts.

    ``valid`` is False for samples that only fill up a batch, so that all processes run equally many. ``copy`` counts how
    often the sample came before in its epoch: copies have random numbers of their own.
    """

    epoch: int
    index: int  # type: ignore[assignment]  # tuple.index is not used
    valid: bool = True
    copy: int = 0


def epoch_order(shard_sizes: Sequence[int], seed: int, epoch: int, window: int | None = None) -> np.ndarray:
    """Compute the order of all samples in one epoch.

    Args:
        shard_sizes: samples in each shard.
        seed: seed of the run.
        epoch: from 0.
        window: shards are shuffled, then samples within so many shards that follow each other, which keeps reads
            close together; None shuffles all samples.

    Returns:
        ``[sum(shard_sizes)]`` int64, a permutation.
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
    """Reorder samples into full batches of one group each, placed where their last samples were.

    Args:
        order: ``[n]``, samples.
        groups: ``[samples]``, the group of each.
        batch: samples of a batch.

    Returns:
        ``[m]``, ``m <= n``: what does not fill a batch of its group is left out.
    """
    found = groups[order]
    places = [np.flatnonzero(found == group) for group in np.unique(found)]
    whole = [place[: len(place) // batch * batch].reshape(-1, batch) for place in places]
    batches = np.concatenate([*whole, np.zeros((0, batch), np.int64)])
    return order[batches[np.argsort(batches[:, -1])]].reshape(-1)


def training_batches(
    order: np.ndarray, epoch: int, batch: int, rank: int, world: int, copies: np.ndarray | None = None
) -> Iterator[list[Ticket]]:
    """This process's share of each whole global batch of ``batch`` samples; a last incomplete batch is left out.

    Args:
        order: ``[n]``, samples.
        epoch: number of the epoch.
        batch: samples of a batch over all processes.
        rank: this process.
        world: number of processes.
        copies: ``[n]``, number of each sample's copy; None for the first of each.
    """
    share = batch // world
    numbers = np.zeros(len(order), np.int64) if copies is None else copies
    for start in range(rank * share, len(order) // batch * batch, batch):
        part = slice(start, start + share)
        yield [Ticket(epoch, int(i), copy=int(n)) for i, n in zip(order[part], numbers[part], strict=True)]


def repeated(order: np.ndarray, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Repeated augmentation: every sample ``repeats`` times, next to each other, in an epoch that is no longer.

    "Augment your batch" (arXiv 1901.09335); an epoch of n samples shows ``n / repeats`` of them, as in DeiT's code.

    Args:
        order: ``[n]``, samples.
        repeats: times that a sample comes.

    Returns:
        Samples and the numbers of their copies, ``[n]`` each.
    """
    count = len(order)
    return np.repeat(order, repeats)[:count], np.tile(np.arange(repeats), -(-count // repeats))[:count]


def evaluation_batches(samples: int, batch: int, rank: int, world: int) -> Iterator[list[Ticket]]:
    """Every sample once over all processes, equally many batches for each; what only fills up is not ``valid``."""
    share = batch // world
    rounds = -(-samples // batch)
    for step in range(rounds):
        first = step * batch
        size = min(share, -(-(samples - first) // world))
        indices = [first + rank + i * world for i in range(size)]
        yield [Ticket(0, min(index, samples - 1), index < samples) for index in indices]


def seed_sample(seed: int, ticket: Ticket) -> None:
    """Seed python's, numpy's and torch's generators for reading one sample."""
    _seed_all([seed, _SAMPLE, ticket.epoch, ticket.index, *([ticket.copy] if ticket.copy else [])])


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed all generators of this process for one training step (dropout, stochastic depth, mixup)."""
    word = _seed_all([seed, _STEP, step, rank])
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(word)


def sample_generator(seed: int, index: int) -> torch.Generator:
    """Create the generator of one sample, on the CPU, so that it is the same for every device."""
    word = int(np.random.SeedSequence([seed, _NOISE, index]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(word)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Context that restores the CPU's global random state."""
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
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word)  # torch.manual_seed queues a seed for CUDA too, with a stack trace each
    return word
