"""Lookup tables in which the Triton kernels find the tokens of each block and the blocks of each sequence.

One int32 tensor ``[7, M]`` for M blocks describes equal blocks, uneven blocks and packed sequences, so that a kernel has one
code path. Nothing in this module waits for the device. Tables that depend on sizes alone are cached.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenLayout, blocks_of_sequences, keep, on_device

START, END, ROW, FIRST, LAST, LOW, HIGH = range(7)
"""Rows of a table, with a column for each block.

START and END: first token of the block, and the token after its last one. ROW: the block's row in the mixing matrix. FIRST
and LAST: first block of its sequence, and the block after the last one. LOW and HIGH: first token of its sequence, and the
token after the last one. An unused block has no tokens, FIRST = M and LAST = 0.
"""


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Lookup tables that tell the Triton kernels which tokens belong to each block and which blocks to each sequence.

    Attributes:
        layout: partition of the tokens into blocks. In the spanning form of attention, chunks of several blocks take the
            place of blocks.
        table: ``[7, M]`` int32 with a column for each block. Its rows are: first token of the block, token after its last one,
            row of the block in the mixing matrix, first block of its sequence, block after the last one of its sequence, first
            token of its sequence, token after the last one of its sequence.
        sequences: first block and number of blocks of each of S sequences, ``[2, S]`` int32.
    """

    layout: TokenLayout
    table: Tensor
    sequences: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens, N."""
        return self.layout.tokens

    @property
    def blocks(self) -> int:
        """Number of blocks, M; for packed sequences, an upper bound on the number of blocks."""
        return self.table.shape[1]

    @property
    def packed(self) -> bool:
        """Whether a batch row holds several packed sequences."""
        return self.layout.cu_seqlens is not None

    def span(self, tile: int) -> int:
        """Return the largest number of blocks that a tile of ``tile`` tokens overlaps.

        The first tile begins at the first token of a sequence, and each further tile begins where the previous one ends.
        """
        offsets = self.layout.block_offsets
        if offsets is None:
            return span_of_tile(tile, self.layout.largest)
        # The block that contains token t, and those that begin after it inside the tile.
        starts = range(0, self.tokens, tile)
        return max(bisect_left(offsets, t + tile) - bisect_right(offsets, t) + 1 for t in starts)


def span_of_tile(tile: int, block_size: int) -> int:
    """Return the largest number of blocks of ``block_size`` tokens that ``tile`` consecutive tokens can overlap."""
    # At worst, the tile begins with the last token of a block, and its other tile - 1 tokens fill further blocks.
    return min(tile, (tile - 2) // block_size + 2)


def kernel_tables(layout: TokenLayout, form: str, in_chunk: int, device: torch.device) -> list[Tensor]:
    """Make the lookup tables that the Triton kernels read for one attention algorithm.

    Args:
        layout: partition of the tokens into blocks. Its ``cu_seqlens``, the bounds of packed sequences, are on the device.
        form: ``"parallel"``, ``"chunked"`` or ``"spanning"``.
        in_chunk: number of blocks in a chunk; used only in the spanning form.
        device: device of the tables.

    Returns:
        A list of int32 tables. The first two are ``table`` and ``sequences`` of :class:`BlockTables`. A third table, ``[N]``,
        follows in two of the forms. In the parallel form, it holds the row of each token's block in the matrix of coefficients.
        In the spanning form, it holds the index of each token's block within its chunk.
    """
    if form == "spanning":
        tables = make_tables(layout.in_chunks(in_chunk), device)
        return [tables.table, tables.sequences, _rows_in_chunks(layout, in_chunk, device)]
    tables = make_tables(layout, device)
    if form == "chunked":
        return [tables.table, tables.sequences]
    token_row = token_rows(device, tables) if tables.packed else keep(token_rows, device, tables)
    return [tables.table, tables.sequences, token_row]


def make_tables(layout: TokenLayout, device: torch.device) -> BlockTables:
    """Make the lookup tables for a partition into equal blocks, uneven blocks, or packed sequences of equal blocks.

    Args:
        layout: partition of the tokens into blocks. Its ``cu_seqlens``, the bounds of packed sequences, are on the device.
        device: device of the tables.
    """
    if layout.block_offsets is not None:
        return keep(_uneven, device, layout.block_offsets)
    block_size = min(layout.block_size, layout.tokens)
    if layout.cu_seqlens is None:
        return keep(_equal, device, layout.tokens, block_size)
    return _packed(layout._replace(block_size=block_size), layout.cu_seqlens)


def _uneven(device: torch.device, offsets: tuple[int, ...]) -> BlockTables:
    bounds = on_device(offsets, device).int()
    return _one_sequence(TokenLayout(offsets[-1], 0, offsets), bounds[:-1], bounds[1:])


def _equal(device: torch.device, tokens: int, block_size: int) -> BlockTables:
    start = torch.arange(0, tokens, block_size, dtype=torch.int32, device=device)
    return _one_sequence(TokenLayout(tokens, block_size), start, (start + block_size).clamp(max=tokens))


def _one_sequence(layout: TokenLayout, start: Tensor, end: Tensor) -> BlockTables:
    blocks = start.numel()
    row = torch.arange(blocks, dtype=torch.int32, device=start.device)
    constant = [torch.full_like(row, value) for value in (0, blocks, 0, layout.tokens)]
    table = torch.stack([start, end, row, *constant])
    return BlockTables(layout, table, torch.stack([table[FIRST, :1], table[LAST, :1]]))


def _packed(layout: TokenLayout, bounds: Tensor) -> BlockTables:
    """Make the lookup tables of packed sequences on the device, without reading the sequence bounds back to the CPU.

    The table has ``N // block_size + S`` columns for S sequences with N tokens in total, an upper bound on the number of
    blocks. The last columns of the table may be unused.

    Args:
        layout: partition of the tokens into blocks, with a block size of at most N.
        bounds: index of the first token of each sequence, followed by N, ``[S + 1]`` on the device.
    """
    block_size = layout.block_size
    counts = blocks_of_sequences(bounds, block_size)
    ends = counts.cumsum(0)
    firsts = ends - counts
    blocks = layout.tokens // block_size + counts.numel()
    index = torch.arange(blocks, device=bounds.device)
    # [M] index of each block's sequence; S for unused columns
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
    return BlockTables(layout, table, torch.stack([firsts, counts]).int())


def _rows_in_chunks(layout: TokenLayout, in_chunk: int, device: torch.device) -> Tensor:
    """Return, for each token, the index of its block within its chunk of ``in_chunk`` consecutive blocks, ``[N]`` int32."""
    if layout.cu_seqlens is None:
        return keep(_equal_rows_in_chunks, device, layout.tokens, layout.block_size, in_chunk)
    return token_rows(device, make_tables(layout, device)) % in_chunk


def _equal_rows_in_chunks(device: torch.device, tokens: int, block_size: int, in_chunk: int) -> Tensor:
    return torch.arange(tokens, device=device, dtype=torch.int32) // block_size % in_chunk


def token_rows(device: torch.device, tables: BlockTables) -> Tensor:
    """Return, for each token, the row of its block in the matrix of mixing coefficients, ``[N]`` int32."""
    token = torch.arange(tables.tokens, device=device, dtype=torch.int32)
    start, end = tables.table[START].contiguous(), tables.table[END]
    # unused blocks get the number of tokens as their start, so that the starts are sorted and no search ends in such a block
    used_start = torch.where(end > start, start, tables.tokens).contiguous()
    block = torch.searchsorted(used_start, token, right=True) - 1
    return tables.table[ROW][block].contiguous()
