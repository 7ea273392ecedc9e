"""Assignment of the blocks of a sequence to processes, and the number of bytes that the processes exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from mhla_kernels.checks import check_block_size, check_offsets
from mhla_kernels.sequence_parallel.collectives import gather_shares


def share_blocks(blocks: int, processes: int) -> tuple[int, ...]:
    """Divide blocks among processes so that the numbers of blocks of any two processes differ by at most one.

    Args:
        blocks: number of blocks M.
        processes: number of processes P.

    Returns:
        Index of the first block of each process, followed by M; P + 1 integers. If there are fewer blocks than processes, some
        processes get none.
    """
    return tuple(blocks * rank // processes for rank in range(processes + 1))


def share_tokens(
    tokens: int, processes: int, *, block_size: int | None = None, block_offsets: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Divide the tokens of a sequence among processes, so that each process gets complete blocks.

    The numbers of blocks of any two processes differ by at most one.

    Args:
        tokens: number of tokens N.
        processes: number of processes P.
        block_size: tokens in a block. Give exactly one of this and ``block_offsets``.
        block_offsets: for M uneven blocks, M + 1 integers: the index of the first token of each block, followed by N.

    Returns:
        Index of the first token of each process, followed by N; P + 1 integers.

    Raises:
        ValueError: unless exactly one of ``block_size`` and ``block_offsets`` is given, ``block_size`` is positive, and
            ``block_offsets`` increase from 0 to N.
    """
    bounds = block_bounds(tokens, block_size, block_offsets)
    return tuple(bounds[block] for block in share_blocks(len(bounds) - 1, processes))


def block_bounds(tokens: int, block_size: int | None, block_offsets: Sequence[int] | None) -> tuple[int, ...]:
    """Return the index of the first token of each block, followed by the number of tokens N.

    Args:
        tokens: number of tokens N.
        block_size: tokens in a block; the last block may be shorter. None if ``block_offsets`` is given.
        block_offsets: for uneven blocks, the index of the first token of each block, followed by N; None if ``block_size`` is
            given.

    Returns:
        M + 1 integers for M blocks. They equal ``block_offsets`` if it is given.

    Raises:
        ValueError: unless exactly one of ``block_size`` and ``block_offsets`` is given, ``block_size`` is positive, and
            ``block_offsets`` increase from 0 to N.
    """
    if (block_size is None) == (block_offsets is None):
        raise ValueError("give exactly one of block_size (equal blocks) and block_offsets (uneven blocks)")
    if block_offsets is not None:
        return check_offsets(block_offsets, tokens)
    assert block_size is not None
    return (*range(0, tokens, check_block_size(block_size)), tokens)


@dataclass(frozen=True)
class Traffic:
    """Number of bytes that one process receives in the forward pass of one attention layer, for each kind of exchanged data.

    The backward pass exchanges the same number of values, as gradients in float32.

    Attributes:
        summaries: number of bytes if the processes exchange block summaries, or running sums of them.
        tokens: number of bytes if the processes exchange keys and values; None for exponential mixing over a sequence, in
            which case they exchange only running sums.
    """

    summaries: int
    tokens: int | None

    @property
    def least(self) -> Literal["summaries", "tokens"]:
        """Kind of exchanged data that needs fewer bytes: ``"summaries"`` or ``"tokens"``."""
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
    key_value_heads: int | None = None,
    terms: int | None = None,
    causal: bool = False,
    normalize: bool = True,
    token_bytes: int = 2,
) -> Traffic:
    """Compute the number of bytes that a process receives in the forward pass of :func:`mhla_sequence_parallel`.

    Block summaries are sent in float32.

    Args:
        batch: batch size B.
        tokens: number of tokens N.
        heads: number of query heads H. Each has its own block summaries, even if several query heads share a key head.
        key_width: width of a key, Dk.
        value_width: width of a value, Dv.
        blocks: number of blocks M.
        processes: number of processes P, among which the sequence is divided equally.
        key_value_heads: number of heads of keys and values; None if it equals ``heads``.
        terms: number of terms of exponential mixing over a sequence, for which the processes exchange running sums; None for
            dense mixing and for exponential mixing over a grid.
        causal: whether the attention is causal.
        normalize: whether the outputs are normalized, so that the sums of the keys of each block are exchanged too.
        token_bytes: size in bytes of one number of k and v.
    """
    sent_heads = heads if key_value_heads is None else key_value_heads
    width = key_width * (value_width + normalize)
    other_processes = processes - 1
    if terms is not None:
        return Traffic(batch * heads * other_processes * terms * (1 if causal else 2) * width * 4, None)
    # Shares are padded to the longest one before they are gathered, hence the division rounded up.
    summaries = batch * heads * other_processes * -(-blocks // processes) * width * 4
    shares = batch * sent_heads * other_processes * -(-tokens // processes) * (key_width + value_width) * token_bytes
    return Traffic(summaries, shares)


@dataclass(frozen=True)
class SequencePlan:
    """Assignment of the blocks of a sequence to the processes of a group.

    Attributes:
        group: process group.
        bounds: index of the first token of each block, followed by the number of tokens N.
        shares: index of the first block of each process, followed by the number of blocks M.
        rank: rank of this process in the group.
    """

    group: dist.ProcessGroup
    bounds: tuple[int, ...]
    shares: tuple[int, ...]
    rank: int

    @property
    def own(self) -> tuple[int, int]:
        """Index of the first block that this process holds, and the index after its last one."""
        return self.shares[self.rank], self.shares[self.rank + 1]

    @property
    def blocks(self) -> list[int]:
        """Number of blocks that each process holds, in the order of ranks."""
        return [b - a for a, b in pairwise(self.shares)]

    @property
    def tokens(self) -> list[int]:
        """Number of tokens that each process holds, in the order of ranks."""
        return [self.bounds[b] - self.bounds[a] for a, b in pairwise(self.shares)]

    def gather(self, share: Tensor, lengths: Sequence[int]) -> Tensor:
        """Gather a tensor from every process, and concatenate the tensors along axis 2 in the order of ranks.

        Args:
            share: tensor of this process, ``[B, H, length, ...]``.
            lengths: length of axis 2 in the tensor of each process.
        """
        return gather_shares(share, 2, lengths, self.group)
