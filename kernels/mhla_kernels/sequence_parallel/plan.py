"""Assignment of blocks to processes, and the number of bytes that the processes exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from mhla_kernels.sequence_parallel.collectives import gather_shares


def share_blocks(blocks: int, processes: int) -> tuple[int, ...]:
    """Return the first block of each process, and M at the end; the numbers of blocks differ by one at most.

    Args:
        blocks: number of blocks M.
        processes: number of processes P.

    Returns:
        P + 1 integers. If there are fewer blocks than processes, some processes hold none.
    """
    return tuple(blocks * rank // processes for rank in range(processes + 1))


def share_tokens(
    tokens: int, processes: int, *, block_size: int | None = None, block_offsets: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the first token of each process, and N at the end, for the blocks of :func:`share_blocks`.

    Args:
        tokens: number of tokens N.
        processes: number of processes P.
        block_size: tokens in a block. Give exactly one of this and ``block_offsets``.
        block_offsets: M + 1 integers, see :func:`mhla_kernels.mhla_attention`.

    Raises:
        ValueError: unless exactly one of ``block_size`` and ``block_offsets`` is given.
    """
    bounds = block_bounds(tokens, block_size, block_offsets)
    return tuple(bounds[block] for block in share_blocks(len(bounds) - 1, processes))


def block_bounds(tokens: int, block_size: int | None, block_offsets: Sequence[int] | None) -> tuple[int, ...]:
    """Return the first token of each block, and N at the end.

    Raises:
        ValueError: unless exactly one of ``block_size`` and ``block_offsets`` is given.
    """
    if (block_size is None) == (block_offsets is None):
        raise ValueError("give exactly one of block_size (equal blocks) and block_offsets (uneven blocks)")
    if block_offsets is not None:
        return tuple(block_offsets)
    assert block_size is not None
    return (*range(0, tokens, block_size), tokens)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process receives in a forward pass of one layer.

    The backward pass sums the gradients of the same numbers, in float32.

    Attributes:
        summaries: bytes of the summaries of the other processes, or of their boundary sums.
        tokens: bytes of the keys and values of the other processes; None if exchanging tokens is not possible.
    """

    summaries: int
    tokens: int | None

    @property
    def least(self) -> Literal["summaries", "tokens"]:
        """Exchange that needs fewer bytes."""
        return "tokens" if self.tokens is not None and self.tokens < self.summaries else "summaries"


def traffic(
    batch: int,
    tokens: int,
    heads: int,
    key_width: int,
    value_width: int,
    blocks: int,
    processes: int,
    *,
    terms: int | None = None,
    causal: bool = False,
    normalize: bool = True,
    token_bytes: int = 2,
) -> Traffic:
    """Return the number of bytes that :func:`mhla_sequence_parallel` exchanges; summaries are float32.

    Args:
        batch: batch size B.
        tokens: number of tokens N.
        heads: number of heads H.
        key_width: width of a key, Dk.
        value_width: width of a value, Dv.
        blocks: number of blocks M.
        processes: number of processes P, with equal shares.
        terms: R of exponential mixing over a sequence; None if summaries are exchanged.
        causal: whether blocks see earlier blocks only.
        normalize: whether normalizers are exchanged too.
        token_bytes: bytes of one number of k and v.
    """
    width = key_width * (value_width + normalize)
    others = processes - 1
    if terms is not None:
        return Traffic(batch * heads * others * terms * (1 if causal else 2) * width * 4, None)
    summaries = batch * heads * others * -(-blocks // processes) * width * 4
    shares = batch * heads * others * -(-tokens // processes) * (key_width + value_width) * token_bytes
    return Traffic(summaries, shares)


@dataclass(frozen=True)
class SequencePlan:
    """Assignment of the blocks of a sequence to the processes of a group.

    Attributes:
        group: the processes.
        bounds: first token of each block, and N.
        shares: first block of each process, and M.
        rank: rank of this process.
    """

    group: dist.ProcessGroup
    bounds: tuple[int, ...]
    shares: tuple[int, ...]
    rank: int

    @property
    def own(self) -> tuple[int, int]:
        """First block of this process, and the end of its blocks."""
        return self.shares[self.rank], self.shares[self.rank + 1]

    @property
    def blocks(self) -> list[int]:
        """Number of blocks of each process."""
        return [b - a for a, b in pairwise(self.shares)]

    @property
    def tokens(self) -> list[int]:
        """Number of tokens of each process."""
        return [self.bounds[b] - self.bounds[a] for a, b in pairwise(self.shares)]

    def gather(self, share: Tensor, lengths: Sequence[int]) -> Tensor:
        """Concatenate the shares ``[B, H, length, ...]`` of all processes along axis 2; see :func:`gather_shares`."""
        return gather_shares(share, 2, lengths, self.group)
