"""Block tables, in which kernels look up the tokens of a block and the blocks of a sequence.

One int32 tensor ``[7, M]`` describes equal blocks, uneven blocks and packed sequences, so that a kernel has one code path.
Nothing in this module waits for the device. Tables that depend on sizes alone are cached by
:func:`mhla_kernels.blocks.keep`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mhla_kernels.blocks import keep, on_device

START, END, ROW, FIRST, LAST, LOW, HIGH = range(7)
"""Rows of a table, with a column for each block.

START and END: first token of the block, and the token after its last one. ROW: the block's row in the mixing matrix. FIRST
and LAST: first block of its sequence, and the block after the last one. LOW and HIGH: first token of its sequence, and the
token after the last one. An unused block has no tokens, FIRST = M and LAST = 0.
"""


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Lookup tables and sizes of the blocks in one call of the operator, in the form that the Triton kernels read.

    Attributes:
        tokens: number of tokens, N.
        blocks: number of blocks, M; for packed sequences an upper bound of it.
        largest: tokens in the largest block.
        offsets: first token of each block and N, for uneven blocks; None for equal ones.
        packed: whether sequences are packed.
        table: ``[7, M]`` int32; :data:`START` and the names beside it are its rows.
        sequences: first block and number of blocks of each sequence, ``[2, S]`` int32.
    """

    tokens: int
    blocks: int
    largest: int
    offsets: tuple[int, ...] | None
    packed: bool
    table: Tensor
    sequences: Tensor

    def span(self, tile: int) -> int:
        """Return the largest number of blocks that a tile of tokens overlaps, where tiles start at the beginning of a sequence.

        Args:
            tile: number of tokens in a tile.
        """
        if self.offsets is None:
            return span_of_tile(tile, self.largest)
        starts = range(0, self.tokens, tile)
        return max(bisect_left(self.offsets, t + tile) - bisect_right(self.offsets, t) + 1 for t in starts)


def span_of_tile(tile: int, block_size: int) -> int:
    """Return the largest number of blocks of ``block_size`` tokens that ``tile`` consecutive tokens overlap."""
    return min(tile, (tile - 2) // block_size + 2)


def make_tables(
    tokens: int,
    device: torch.device,
    block_size: int | None,
    block_offsets: tuple[int, ...] | None,
    cu_seqlens: Tensor | None,
) -> BlockTables:
    """Create the block tables of a call: for equal blocks, for uneven blocks, or for packed sequences of equal blocks.

    Args:
        tokens: number of tokens, N.
        device: device of the tables.
        block_size: tokens in a block; not used with ``block_offsets``.
        block_offsets: first token of each block and N, for uneven blocks.
        cu_seqlens: first token of each packed sequence and N, ``[S + 1]`` on the device.
    """
    if block_offsets is not None:
        return keep(_uneven, device, block_offsets)
    assert block_size is not None
    block_size = min(block_size, tokens)
    if cu_seqlens is None:
        return keep(_equal, device, tokens, block_size)
    return _packed(tokens, block_size, cu_seqlens)


def _uneven(device: torch.device, offsets: tuple[int, ...]) -> BlockTables:
    bounds = on_device(offsets, device).int()
    largest = max(end - start for start, end in pairwise(offsets))
    return _one_sequence(offsets[-1], bounds[:-1], bounds[1:], largest, offsets)


def _equal(device: torch.device, tokens: int, block_size: int) -> BlockTables:
    start = torch.arange(0, tokens, block_size, dtype=torch.int32, device=device)
    return _one_sequence(tokens, start, (start + block_size).clamp(max=tokens), block_size, None)


def _one_sequence(
    tokens: int, start: Tensor, end: Tensor, largest: int, offsets: tuple[int, ...] | None
) -> BlockTables:
    blocks = start.numel()
    row = torch.arange(blocks, dtype=torch.int32, device=start.device)
    constant = [torch.full_like(row, value) for value in (0, blocks, 0, tokens)]
    table = torch.stack([start, end, row, *constant])
    sequences = torch.stack([table[FIRST, :1], table[LAST, :1]])
    return BlockTables(tokens, blocks, largest, offsets, False, table, sequences)


def _packed(tokens: int, block_size: int, bounds: Tensor) -> BlockTables:
    """Create the block tables of packed sequences on the device, without copying the sequence bounds to the host.

    S sequences with N tokens in total have at most ``N // block_size + S`` blocks. The table has that many columns, and those
    at its end may be unused.
    """
    counts = (bounds.diff() + block_size - 1) // block_size
    ends = counts.cumsum(0)
    firsts = ends - counts
    blocks = tokens // block_size + counts.numel()
    index = torch.arange(blocks, device=bounds.device)
    owner = torch.searchsorted(ends, index, right=True)
    used = owner < counts.numel()
    owner = owner.clamp(max=counts.numel() - 1)
    row = torch.where(used, index - firsts[owner], 0)
    low, high = bounds[owner], bounds[owner + 1]
    start = low + row * block_size
    end = torch.minimum(start + block_size, high)
    columns = [
        torch.where(used, start, 0),
        torch.where(used, end, 0),
        row,
        torch.where(used, firsts[owner], blocks),
        torch.where(used, ends[owner], 0),
        torch.where(used, low, 0),
        torch.where(used, high, 0),
    ]
    table = torch.stack(columns).int()
    return BlockTables(tokens, blocks, block_size, None, True, table, torch.stack([firsts, counts]).int())


def token_rows(tables: BlockTables) -> Tensor:
    """Return, for each token, the row of its block in the mixing matrix, ``[N]`` int32."""
    device = tables.table.device
    return _token_rows(device, tables) if tables.packed else keep(_token_rows, device, tables)


def rows_in_chunks(tokens: int, device: torch.device, block_size: int, chunk: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return, for each token, the index of its block within its chunk of several blocks.

    Args:
        tokens: number of tokens, N.
        device: device of the result.
        block_size: tokens in a block.
        chunk: tokens in a chunk.
        cu_seqlens: first token of each packed sequence and N, ``[S + 1]``; None for one sequence.

    Returns:
        ``[N]`` int32.
    """
    if cu_seqlens is None:
        return keep(_rows_in_chunks, device, tokens, block_size, chunk)
    rows = token_rows(make_tables(tokens, device, block_size, None, cu_seqlens))
    return rows % -(-chunk // min(block_size, tokens))


def _rows_in_chunks(device: torch.device, tokens: int, block_size: int, chunk: int) -> Tensor:
    return torch.arange(tokens, device=device, dtype=torch.int32) % chunk // block_size


def _token_rows(device: torch.device, tables: BlockTables) -> Tensor:
    token = torch.arange(tables.tokens, device=device, dtype=torch.int32)
    start, end = tables.table[START].contiguous(), tables.table[END]
    # unused blocks start behind the last token, so that the starts rise and the search ends before these blocks
    used_start = torch.where(end > start, start, tables.tokens).contiguous()
    block = torch.searchsorted(used_start, token, right=True) - 1
    return tables.table[ROW][block].contiguous()
