"""Triton kernels that mix block summaries S by a matrix m, ``S~ = m S``, and compute the gradient of the matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.mixing import DenseMixing, Mixing
from mhla_kernels.triton_backend import config
from mhla_kernels.triton_backend.call import TL_DTYPES, Call, sum_at
from mhla_kernels.triton_backend.primitives import BLOCKS, dot, kernel, multiply, round_to
from mhla_kernels.triton_backend.tables import FIRST as _FIRST
from mhla_kernels.triton_backend.tables import LAST as _LAST
from mhla_kernels.triton_backend.tables import ROW as _ROW

ROW, FIRST, LAST = tl.constexpr(_ROW), tl.constexpr(_FIRST), tl.constexpr(_LAST)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@kernel
def mix_kernel(
    mixing,
    summary,
    mixed,
    table,
    column_table,
    mixing_stride_h,
    mixing_stride_i,
    mixing_stride_j,
    blocks,
    column_blocks,
    heads,
    INPUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ISOLATED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TERMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Mix block summaries: ``mixed[i] = sum_b mixing[i, b] summary[b]`` over blocks b of the same sequence.

    A block summary is a sum over the tokens of the block, for example of key-value products.

    With ``CAUSAL``, the sum is over ``b < i``; if ``CAUSAL`` is ``BLOCKS``, it is over ``b <= i``. With ``TRANSPOSED``, the
    coefficient is ``mixing[b, i]``, and a causal sum is over ``b > i`` or ``b >= i``. With ``ISOLATED``, an infinite or NaN
    summary makes mixtures NaN only in its own sequence.

    ``mixing`` holds a float32 matrix for each head, with strides along heads, rows and columns. ``table`` holds the row (with
    ``TRANSPOSED``, the column) of each block i in ``mixing``, and the range of blocks b of its sequence. ``column_table`` holds
    the column (with ``TRANSPOSED``, the row) of each block b. In self-attention, both are the same table. ``summary`` is
    ``[B * H, column_blocks, WIDTH]``, and ``mixed`` is ``[B * H, blocks, WIDTH]``, both float32. Grid:
    ``(B * H * tiles of blocks, parts of WIDTH)``.

    ``INPUT``, the dtype of the tokens, decides the precision of the products (see :func:`multiply`).
    """
    part, tiles = tl.program_id(1), tl.cdiv(blocks, ROWS)
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    mixing += (row % heads) * mixing_stride_h
    summary += row * column_blocks * WIDTH
    mixed += row * blocks * WIDTH
    i = tile * ROWS + tl.arange(0, ROWS)
    i_row = tl.load(table + ROW * blocks + i, mask=i < blocks, other=0)
    i_first = tl.load(table + FIRST * blocks + i, mask=i < blocks, other=column_blocks)
    i_last = tl.load(table + LAST * blocks + i, mask=i < blocks, other=0)
    # Range of key blocks that some query block of this tile reads: all blocks of the tile's sequences.
    low = tl.min(i_first)
    high = tl.max(i_last)
    # Blocks of a tile are in order, so the range of the tile bounds what its causal sums read.
    if CAUSAL:
        if TRANSPOSED:
            low = tl.maximum(low, tile * ROWS)
        else:
            high = tl.minimum(high, tile * ROWS + ROWS)

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    spoilt = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(low, high, TERMS):
        b = first + tl.arange(0, TERMS)
        b_row = tl.load(column_table + ROW * column_blocks + b, mask=b < column_blocks, other=0)
        # Only blocks of one sequence are mixed.
        counts = (b[None, :] >= i_first[:, None]) & (b[None, :] < i_last[:, None])
        if CAUSAL == BLOCKS:
            if TRANSPOSED:
                counts = counts & (b[None, :] >= i[:, None])
            else:
                counts = counts & (b[None, :] <= i[:, None])
        elif CAUSAL:
            if TRANSPOSED:
                counts = counts & (b[None, :] > i[:, None])
            else:
                counts = counts & (b[None, :] < i[:, None])
        if TRANSPOSED:
            offset = b_row[None, :] * mixing_stride_i + i_row[:, None] * mixing_stride_j
        else:
            offset = i_row[:, None] * mixing_stride_i + b_row[None, :] * mixing_stride_j
        coefficient = tl.load(mixing + offset, mask=counts, other=0.0)
        inside = (b < high)[:, None] & (columns < WIDTH)[None, :]
        x = tl.load(summary + b.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
        if ISOLATED:  # leave infinite and NaN terms out, since zero times them is NaN, and count them
            finite = tl.abs(x) <= LARGEST
            spoilt = dot(counts.to(tl.float32), tl.where(finite, 0.0, 1.0), spoilt)
            x = tl.where(finite, x, 0.0)
        total = multiply(coefficient, x, total, INPUT)
    if ISOLATED:
        total = tl.where(spoilt > 0, float("nan"), total)
    inside = (i < blocks)[:, None] & (columns < WIDTH)[None, :]
    offset = mixed + i.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(offset, round_to(total, mixed.dtype.element_ty), mask=inside)


@kernel
def mixing_gradient_kernel(
    gradient,
    summary,
    mixing_gradient,
    sequences,
    column_sequences,
    blocks,
    column_blocks,
    num_sequences,
    size,
    column_size,
    INPUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient of mixing coefficients: the dot product of ``gradient[i]`` and ``summary[b]`` for blocks i and b.

    Blocks are counted from the start of each packed sequence, and the results of all sequences are added up. With ``CAUSAL``
    the result is 0 unless ``b < i``; if ``CAUSAL`` is ``BLOCKS``, it is 0 unless ``b <= i``. ``sequences`` holds the index
    of the first block i and the number of blocks i of each sequence. ``column_sequences`` holds the same for blocks b. In
    self-attention, both are the same table.

    ``gradient`` (of the mixed summaries) is ``[B * H, blocks, WIDTH]`` float32, and ``summary`` is ``[B * H, column_blocks,
    WIDTH]`` float32. ``mixing_gradient`` is ``[parts, B * H, size, column_size]`` float32, where ``size`` and ``column_size``
    are the numbers of rows and columns of the matrix of coefficients; the caller sums the parts. Grid:
    ``(B * H * tiles of i, tiles of b, parts of WIDTH)``. ``INPUT``, the dtype of the tokens, decides the precision of the
    products (see :func:`multiply`).
    """
    tiles = tl.cdiv(size, ROWS)
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    i = tile * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    gradient += row * blocks * WIDTH
    summary += row * column_blocks * WIDTH
    # Entries of a summary for each part, in complete steps of COLUMNS.
    part, share = tl.program_id(2), tl.cdiv(tl.cdiv(WIDTH, COLUMNS), tl.num_programs(2)) * COLUMNS
    total = tl.zeros([ROWS, ROWS], tl.float32)
    if not CAUSAL or tl.program_id(1) <= tile:  # tiles above the diagonal are zero, and are still stored
        for sequence in range(0, num_sequences):
            first = tl.load(sequences + sequence)
            count = tl.load(sequences + num_sequences + sequence)
            column_first = tl.load(column_sequences + sequence)
            column_count = tl.load(column_sequences + num_sequences + sequence)
            for start in range(part * share, tl.minimum(WIDTH, (part + 1) * share), COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                r = tl.load(
                    gradient + (first + i).to(tl.int64)[:, None] * WIDTH + columns[None, :],
                    mask=(i < count)[:, None] & (columns < WIDTH)[None, :],
                    other=0.0,
                )
                s = tl.load(
                    summary + (column_first + b).to(tl.int64)[:, None] * WIDTH + columns[None, :],
                    mask=(b < column_count)[:, None] & (columns < WIDTH)[None, :],
                    other=0.0,
                )
                total = multiply(r, tl.trans(s), total, INPUT)
    if CAUSAL == BLOCKS:
        total = tl.where(b[None, :] <= i[:, None], total, 0.0)
    elif CAUSAL:
        total = tl.where(b[None, :] < i[:, None], total, 0.0)
    mixing_gradient += (part * (tl.num_programs(0) // tiles) + row) * size * column_size
    offset = mixing_gradient + i[:, None] * column_size + b[None, :]
    tl.store(offset, total, mask=(i < size)[:, None] & (b < column_size)[None, :])


class DenseMixer:
    """Launcher of the Triton kernels that mix block summaries by a matrix of coefficients, ``[1, M, M]`` or ``[H, M, M]``.

    A block summary is a sum over the tokens of the block, for example of key-value products.
    """

    def mix(self, call: Call, summary: Tensor, transposed: bool = False) -> Tensor:
        """Compute weighted sums of block summaries, with the matrix of mixing coefficients as weights.

        Args:
            call: arguments of the attention operator, which include the matrix. In cross-attention, those of the queries or,
                with ``transposed``, those of the keys.
            summary: W sums over the tokens of each of M blocks, ``[B * H, M, W]`` float32. In cross-attention, these are the
                Mk blocks of keys or, with ``transposed``, the Mq blocks of queries.
            transposed: whether to use the transposed matrix, as the backward pass does.

        Returns:
            Mixed summaries, ``[B * H, M, W]`` float32. In cross-attention, ``[B * H, Mq, W]`` or, with ``transposed``,
            ``[B * H, Mk, W]``.
        """
        _, column_blocks, width = summary.shape
        blocks = call.tables.blocks
        mixed = summary.new_empty(len(summary), blocks, width)
        # The side with more blocks decides, as it does for `CrossKind.many`.
        tiles = config.mix_tiles(call.q.dtype, max(blocks, column_blocks), call.chip)
        (matrix,) = call.coefficients
        if transposed:  # the kernel sums over rows of the matrix: make their coefficients adjacent in memory
            matrix = matrix.mT.contiguous().mT
        h, i, j = matrix.stride()
        mix_kernel[(call.rows * triton.cdiv(blocks, tiles.rows), triton.cdiv(width, tiles.columns))](
            matrix, summary, mixed, call.tables.table, call.columns.tables.table, 0 if len(matrix) == 1 else h, i, j,
            blocks, column_blocks, call.heads,
            INPUT=TL_DTYPES[call.q.dtype], CAUSAL=call.order, TRANSPOSED=transposed, ISOLATED=call.isolates_sequences,
            WIDTH=width, ROWS=tiles.rows, TERMS=tiles.terms, COLUMNS=tiles.columns, **call.schedule(tiles),
        )  # fmt: skip
        return mixed

    def mixing(self, coefficients: list[Tensor]) -> Mixing:
        """Convert the matrix of coefficients to a :class:`DenseMixing`, which the PyTorch algorithms take.

        The matrix, ``[1, M, M]`` or ``[H, M, M]``, is the only element of the list ``coefficients``.
        """
        (matrix,) = coefficients
        return DenseMixing(matrix if len(matrix) > 1 else matrix[0])

    def pairs(self, call: Call) -> tuple[Tensor, int, int, int]:
        """Return the matrix of coefficients, and its strides along heads, query blocks and key blocks.

        A kernel weights the product of a query and a key by the coefficient of their two blocks. The stride along heads is 0
        if all heads share the matrix.
        """
        (matrix,) = call.coefficients
        h, i, j = matrix.stride()
        return matrix, 0 if matrix.shape[0] == 1 else h, i, j

    def gradients(self, call: Call, d_mixed: Tensor, summary: Tensor) -> list[Tensor]:
        """Compute the gradient of the matrix with which block summaries are mixed.

        Args:
            call: arguments of the attention operator; in cross-attention, those of the queries.
            d_mixed: gradient of the mixed summaries, ``[B * H, M, W]`` float32 (``[B * H, Mq, W]`` in cross-attention).
            summary: W sums over the tokens of each of M blocks, ``[B * H, M, W]`` float32 (``[B * H, Mk, W]`` in
                cross-attention).

        Returns:
            A list with one float32 tensor, the gradient for each batch row and head, ``[B * H, M, M]`` (``[B * H, Mq, Mk]`` in
            cross-attention).
        """
        size, column_size = call.coefficients[0].shape[1:]
        _, column_blocks, width = summary.shape
        tiles = config.mixing_gradient_tiles(call.q.dtype, max(size, column_size), call.chip)
        side, column_side = triton.cdiv(size, tiles.rows), triton.cdiv(column_size, tiles.rows)
        parts = config.mixing_gradient_parts(call.rows * side * column_side, width)
        gradient = call.q.new_empty(parts, call.rows, size, column_size, dtype=torch.float32)
        sequences = call.tables.sequences
        mixing_gradient_kernel[(call.rows * side, column_side, parts)](
            d_mixed, summary, gradient, sequences, call.columns.tables.sequences, d_mixed.shape[1], column_blocks,
            sequences.shape[1], size, column_size,
            INPUT=TL_DTYPES[call.q.dtype], CAUSAL=call.order, WIDTH=width, ROWS=tiles.rows, COLUMNS=tiles.columns,
            **call.schedule(tiles),
        )  # fmt: skip
        return [gradient.sum(0)]

    def add_own(self, call: Call, gradients: list[Tensor], diagonal_gradient: Tensor) -> None:
        """Add the gradient of the diagonal entries m[i, i] of the coefficient matrix m to the gradient of m, in place.

        Args:
            call: arguments of the attention operator.
            gradients: list with the gradient of m, ``[B * H, M, M]``, which is changed in place.
            diagonal_gradient: for each block i, the gradient of m[i, i] that comes from the pairs of tokens within the block,
                ``[B * H, blocks]`` float32.
        """
        diagonal = gradients[0].diagonal(dim1=1, dim2=2)
        diagonal += sum_at(diagonal_gradient, call.tables.table[_ROW], diagonal.shape[-1])
