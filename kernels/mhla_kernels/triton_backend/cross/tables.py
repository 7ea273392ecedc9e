"""Lookup tables of the two sides of cross-attention, queries and keys.

Each side has a table with a column for each of its blocks or tiles, as :mod:`mhla_kernels.triton_backend.tables` describes for
self-attention. However, the ranges in a column lie on the other side. The rows FIRST and LAST bound the blocks with which the
block is mixed. The rows LOW and HIGH bound the tokens with which its tokens form pairs.

Shape letters: M blocks of the side, S packed sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenLayout, keep
from mhla_kernels.cross.layout import CrossLayout
from mhla_kernels.triton_backend.tables import END, FIRST, ROW, START, BlockTables, make_tables, token_rows


def cross_tables(
    layout: CrossLayout, form: str, one_matrix: bool, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Make the lookup tables in which the kernels of cross-attention find the blocks and sequences of queries and of keys.

    Args:
        layout: partition of both sides into blocks. Bounds of packed sequences are on the device.
        form: algorithm: ``"parallel"`` (weights of all token pairs) or ``"chunked"`` (a summary of each block of keys).
        one_matrix: whether packed sequences share one matrix of coefficients, in which blocks are counted from the first token
            of each sequence. Otherwise the matrix covers all blocks of all sequences.
        device: device of the tables.

    Returns:
        Two lists of int32 tables, for the queries and for the keys. Each list holds ``table`` and ``sequences`` of
        :class:`BlockTables` and, in the parallel form, the index of each token's block in the matrix, ``[N]``.
    """
    if layout.is_packed:
        return _make(device, layout.queries, layout.keys, form, one_matrix)
    return keep(_make, device, layout.queries, layout.keys, form, True)


def _make(
    device: torch.device, queries: TokenLayout, keys: TokenLayout, form: str, one_matrix: bool
) -> tuple[list[Tensor], list[Tensor]]:
    sides = make_tables(queries, device), make_tables(keys, device)
    lists = []
    for side, other in (sides, sides[::-1]):
        bounds = side.layout.cu_seqlens
        # rows FIRST and LAST, then LOW and HIGH
        ranges = block_ranges(side.table, bounds, other), token_ranges(side.table, bounds, other.layout)
        table = torch.cat([side.table[:FIRST], *ranges])
        sequences = side.sequences
        if not one_matrix:  # one sequence of blocks for the matrix; pairs are still those of the packed sequences
            blocks = torch.arange(side.blocks, dtype=torch.int32, device=device)
            table = torch.cat([table[:ROW], blocks[None], table[ROW + 1 :]])
            sequences = torch.stack([torch.zeros_like(blocks[:1]), torch.full_like(blocks[:1], side.blocks)])
        lists.append([table, sequences])
        if form == "parallel":
            lists[-1].append(token_rows(device, replace(side, table=table)))
    return lists[0], lists[1]


def token_ranges(table: Tensor, bounds: Tensor | None, other: TokenLayout) -> Tensor:
    """Return the range of tokens of the other side with which each block or tile of one side (queries or keys) forms pairs.

    Args:
        table: table of the M blocks or tiles of one side, ``[7, M]`` int32, as in :class:`BlockTables`.
        bounds: index of the first token of each of S packed sequences of this side, followed by its number of tokens,
            ``[S + 1]``; None without packing.
        other: layout of the other side.

    Returns:
        Index of the first token of each range, and the index after its last token, ``[2, M]`` int32.
    """
    if bounds is None:
        return _constant_ranges(table, other.tokens)
    assert other.cu_seqlens is not None
    return _ranges(table, bounds, other.cu_seqlens[:-1], other.cu_seqlens[1:], other.tokens)


def block_ranges(table: Tensor, bounds: Tensor | None, other: BlockTables) -> Tensor:
    """Return the range of blocks of the other side with which each block of one side (queries or keys) is mixed.

    Args:
        table: table of the M blocks of one side, ``[7, M]`` int32, as in :class:`BlockTables`.
        bounds: index of the first token of each of S packed sequences of this side, followed by its number of tokens,
            ``[S + 1]``; None without packing.
        other: tables of the other side.

    Returns:
        Index of the first block of each range, and the index after its last block, ``[2, M]`` int32.
    """
    if bounds is None:
        return _constant_ranges(table, other.blocks)
    firsts, counts = other.sequences
    return _ranges(table, bounds, firsts, firsts + counts, other.blocks)


def _constant_ranges(table: Tensor, end: int) -> Tensor:
    return torch.stack([torch.zeros_like(table[START]), torch.full_like(table[START], end)])


def _ranges(table: Tensor, bounds: Tensor, firsts: Tensor, ends: Tensor, unused: int) -> Tensor:
    """Look up, for each block or tile of one side, the range of the other side that belongs to the same packed sequence.

    Args:
        table: table of M blocks or tiles, ``[7, M]`` int32, as in :class:`BlockTables`.
        bounds: index of the first token of each of S sequences, followed by the number of tokens, ``[S + 1]``.
        firsts: start of each sequence's range, ``[S]``.
        ends: end of each sequence's range, ``[S]``.
        unused: start of the range of an unused block. Its end is 0, so the range is empty.

    Returns:
        Starts and ends, ``[2, M]`` int32.
    """
    start = table[START].contiguous()
    used = table[END] > start
    sequence = torch.searchsorted(bounds[1:].contiguous(), start, right=True).clamp(max=len(bounds) - 2)
    return torch.stack([torch.where(used, firsts[sequence], unused), torch.where(used, ends[sequence], 0)]).int()
