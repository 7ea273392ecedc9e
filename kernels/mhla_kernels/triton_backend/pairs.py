"""Products of token pairs, and the kernel that computes the gradient of the mixing coefficients from them.

    dm[i, b] = sum_{t in i, j in b} (q_t . k_j) (G_t . v_j + g_t)

Here m[i, b] is the coefficient of query block i and key block b, G_t = dO_t / n_t is the output gradient of token t divided by
its normalizer, and g_t is the gradient of the normalizer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.triton_backend import config
from mhla_kernels.triton_backend.call import Call, alignment, strides, sum_at
from mhla_kernels.triton_backend.primitives import BLOCKS, dot, kernel, load_tokens, load_visible, multiply
from mhla_kernels.triton_backend.tables import END as _END
from mhla_kernels.triton_backend.tables import HIGH as _HIGH
from mhla_kernels.triton_backend.tables import LOW as _LOW
from mhla_kernels.triton_backend.tables import START as _START

START, END, LOW, HIGH = (tl.constexpr(row) for row in (_START, _END, _LOW, _HIGH))


@triton.jit
def products(
    a_base,
    a_rows,
    a_visible,
    a_stride_n,
    a_stride_d,
    b_base,
    b_rows,
    b_visible,
    b_stride_n,
    b_stride_d,
    WIDTH: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Compute the dot product of each token of tile a with each token of tile b, ``[ROWS, COLUMNS]`` float32.

    Tile a holds the ``ROWS`` tokens with the indices ``a_rows``, and tile b the ``COLUMNS`` tokens with the indices ``b_rows``.
    Tokens for which ``a_visible`` or ``b_visible`` is False count as zero. ``a_base`` and ``b_base`` are the addresses of
    feature 0 of token 0. Strides whose names end in ``n`` are between tokens, and those that end in ``d`` are between features.
    Of the ``WIDTH`` features, ``SLICE`` are loaded at a time. With ``RELU``, the feature map (ReLU plus a small constant) is
    applied to both tiles first.
    """
    scores = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, WIDTH, SLICE):
        inner = first + tl.arange(0, SLICE)
        a = load_tokens(a_base, a_rows, a_visible, inner, WIDTH, a_stride_n, a_stride_d, RELU)
        b = load_tokens(b_base, b_rows, b_visible, inner, WIDTH, b_stride_n, b_stride_d, RELU)
        scores = dot(a, tl.trans(b), scores)
    return scores


@triton.jit
def _add_block_sums(
    total,
    held,
    pairs,
    token_row,
    column_row,
    rows,
    columns,
    end,
    column_end,
    start,
    first,
    gradient,
    size,
    INPUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Sum the terms of the gradient of the mixing coefficients by key block and query block, and add the sums to ``total``.

    ``pairs`` holds one term for each key (row) and query (column). The keys have the indices ``rows``, which begin at
    ``start``, and the queries the indices ``columns``, which begin at ``first``. Indices from ``end`` and ``column_end`` on are
    ignored. ``token_row`` holds the block index of each key, and ``column_row`` the block index of each query.

    ``total`` is ``[SPAN, SPAN]``, key block by query block. Key blocks are counted from the block of key ``start``. Query block
    i uses column i modulo ``SPAN`` of ``total``, called its slot, and ``held[s]`` is the query block that slot s currently
    holds. A slot that gets a different query block starts from zero. The new ``total`` is also written to memory at the address
    ``gradient``, where the layout is ``[size, SPAN]``, query block by key block, for ``size`` query blocks.

    Returns:
        The new ``total`` and the new ``held``.
    """
    b_first = tl.load(token_row + start)
    i_first = tl.load(column_row + first)
    b = tl.load(token_row + rows, mask=rows < end, other=-1) - b_first
    i = tl.load(column_row + columns, mask=columns < column_end, other=-1)
    slots = tl.arange(0, SPAN)
    # `slot_blocks[s]` is the query block of slot s in this tile of queries: of the SPAN blocks from i_first on, the one that
    # equals s modulo SPAN.
    slot_blocks = i_first + ((slots - i_first) & (SPAN - 1))
    in_row_block = (slots[:, None] == b[None, :]).to(tl.float32).to(INPUT)
    in_column_block = (i[:, None] == slot_blocks[None, :]).to(tl.float32).to(INPUT)
    # Products with one-hot matrices sum over blocks in a fixed order, which atomic additions would not.
    sums = multiply(in_row_block, pairs, tl.zeros([SPAN, COLUMNS], tl.float32), INPUT)
    sums = multiply(sums, in_column_block, tl.zeros([SPAN, SPAN], tl.float32), INPUT)
    # A slot that gets a new block starts from zero. A block stays in its slot, and a slot belongs to one thread. The stores for
    # a block are therefore in order, and the last one, the complete sum, remains, without a barrier or a read from memory.
    total = tl.where((slot_blocks == held)[None, :], total, 0.0) + sums
    offset = gradient + slot_blocks[None, :] * SPAN + slots[:, None]
    tl.store(offset, total, mask=tl.broadcast_to((slot_blocks < size)[None, :], [SPAN, SPAN]))
    return total, slot_blocks


@kernel
def pair_gradient_kernel(
    q,
    k,
    v,
    gradient,
    key_mask,
    column_mask,
    inverse_normalizer,
    normalizer_gradient,
    mixing_gradient,
    table,
    token_row,
    column_row,
    q_stride_b,
    q_stride_n,
    q_stride_h,
    q_stride_d,
    k_stride_b,
    k_stride_n,
    k_stride_h,
    k_stride_d,
    v_stride_b,
    v_stride_n,
    v_stride_h,
    v_stride_d,
    gradient_stride_b,
    gradient_stride_n,
    gradient_stride_h,
    gradient_stride_d,
    tokens,
    column_tokens,
    table_size,
    heads,
    tiles_of_row,
    tiles,
    size,
    CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    RELU: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_COLUMN_MASK: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    SPAN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute the part of the gradient of the mixing coefficients that is due to one tile of ``ROWS`` keys.

    The part is a sum over the pairs of a key of the tile and a query that attends to this key. ``mixing_gradient`` is
    ``[B * H, tiles_of_row, size, SPAN]`` float32, ``size`` query blocks by ``SPAN`` key blocks, filled with zeros before the
    launch. Key blocks are counted from the first block of the tile, which overlaps at most ``SPAN`` blocks.

    ``token_row`` holds the block index of each key, and ``column_row`` the block index of each query. In self-attention, both
    are the same table. With ``CHUNKS``, only pairs inside a chunk (a group of several consecutive blocks) count. The lookup
    table ``table`` then has a column with the bounds of each chunk, and a chunk has ``tiles`` tiles. Grid:
    ``(B * H * tiles_of_row,)``.
    """
    tile, row = tl.program_id(0) % tiles_of_row, (tl.program_id(0) // tiles_of_row).to(tl.int64)
    batch, head = row // heads, row % heads
    INPUT: tl.constexpr = q.dtype.element_ty
    if CHUNKS:
        low = tl.load(table + START * table_size + tile // tiles)
        high = tl.load(table + END * table_size + tile // tiles)
        start = low + (tile % tiles) * ROWS
        end = high
    elif PACKED:
        start = tl.load(table + START * table_size + tile)
        end = tl.load(table + END * table_size + tile)
        low = tl.load(table + LOW * table_size + tile)
        high = tl.load(table + HIGH * table_size + tile)
    else:
        start = tile * ROWS
        end = tokens
        low = 0
        high = column_tokens
    # The grid is sized for the most tiles: some have no token, and their parts stay zero.
    if start >= end:
        return
    q_stride_n *= ALIGNED
    k_stride_n *= ALIGNED
    v_stride_n *= ALIGNED
    gradient_stride_n *= ALIGNED
    q += (batch * q_stride_b + head * q_stride_h) * ALIGNED
    k += (batch * k_stride_b + head * k_stride_h) * ALIGNED
    v += (batch * v_stride_b + head * v_stride_h) * ALIGNED
    gradient += (batch * gradient_stride_b + head * gradient_stride_h) * ALIGNED
    key_mask += batch * tokens
    column_mask += batch * column_tokens
    mixing_gradient += (row * tiles_of_row + tile) * size * SPAN

    rows = start + tl.arange(0, ROWS)
    visible = load_visible(key_mask, rows, end, HAS_MASK)
    if CAUSAL == BLOCKS:
        row_block = tl.load(token_row + rows, mask=rows < end, other=0)
        if not CHUNKS and not PACKED:  # begin at the block of the first key, at a multiple of COLUMNS as SPAN requires
            low = tl.load(table + START * table_size + tl.load(token_row + start)) // COLUMNS * COLUMNS
    elif CAUSAL:
        low = start
    total = tl.zeros([SPAN, SPAN], tl.float32)
    held = tl.full([SPAN], -1, tl.int32)
    for first in range(low, high, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        shown = load_visible(column_mask, columns, high, HAS_COLUMN_MASK)
        pairs = products(
            v, rows, visible, v_stride_n, v_stride_d, gradient, columns, shown, gradient_stride_n, gradient_stride_d,
            VALUE_WIDTH, False, ROWS, COLUMNS, SLICE,
        )  # fmt: skip
        if NORMALIZE:
            pairs *= tl.load(inverse_normalizer + row * column_tokens + columns, mask=shown, other=0.0)[None, :]
            pairs += tl.load(normalizer_gradient + row * column_tokens + columns, mask=shown, other=0.0)[None, :]
        pairs *= products(
            k, rows, visible, k_stride_n, k_stride_d, q, columns, shown, q_stride_n, q_stride_d,
            KEY_WIDTH, RELU, ROWS, COLUMNS, SLICE,
        )  # fmt: skip
        if CAUSAL == BLOCKS:
            column_block = tl.load(token_row + columns, mask=columns < high, other=0)
            pairs = tl.where(column_block[None, :] >= row_block[:, None], pairs, 0.0)
        elif CAUSAL:
            pairs = tl.where(columns[None, :] >= rows[:, None], pairs, 0.0)
        total, held = _add_block_sums(
            total,
            held,
            pairs,
            token_row,
            column_row,
            rows,
            columns,
            end,
            high,
            start,
            first,
            mixing_gradient,
            size,
            INPUT,
            COLUMNS,
            SPAN,
        )


def pair_gradient(call: Call, gradient: Tensor, weights: tuple[Tensor, Tensor] | None) -> Tensor:
    """Compute the gradient of the matrix of mixing coefficients, as a sum over the pairs of a query and a key.

    In the parallel form of attention, the sum covers every key and each query that attends to it. The spanning form divides the
    blocks into chunks of several consecutive blocks, and only pairs inside a chunk count.

    Args:
        call: arguments of the attention operator, in the parallel or spanning form. In cross-attention, the object for which
            the rows of the matrix of scores are the keys.
        gradient: gradient of the outputs, ``[B, N, H, V]`` for N queries.
        weights: ``1 / n_t`` and the gradient of n_t for the normalizer n_t of each query, ``[B * H, N]`` float32 each; None if
            there is no normalizer.

    Returns:
        Gradient for each batch row and head, ``[B * H, M, M]`` float32 for M blocks, or ``[B * H, Mq, Mk]`` in
        cross-attention. In the spanning form, ``[B * H, G, G]`` for the G blocks of a chunk.
    """
    q, k, v = call.columns.q, call.k, call.v
    tiles = config.pair_tiles(q.dtype, call.chip)
    size, key_size = call.coefficients[0].shape[1:]
    in_chunk = triton.cdiv(call.tables.layout.largest, tiles.rows)
    if call.terms:
        table, count = call.tables.table, call.tables.blocks * in_chunk
    else:
        table, count = call.tile_table(tiles.rows)
    span = config.power_of_two(max(call.span(tiles.rows), call.columns.span(tiles.columns)))
    inverse, normalizer_gradient = weights or (q, q)
    assert call.token_row is not None
    assert call.columns.token_row is not None
    out = q.new_zeros(call.rows, count, size, span, dtype=torch.float32)
    aligned = alignment(q, k, v, gradient)
    pair_gradient_kernel[(call.rows * count,)](
        q, k, v, gradient, call.mask_bytes, call.columns.mask_bytes, inverse, normalizer_gradient, out, table,
        call.token_row, call.columns.token_row, *strides(aligned, q, k, v, gradient), call.tables.tokens,
        call.columns.tables.tokens, table.shape[1], call.heads, count, in_chunk, size, CHUNKS=call.terms > 0,
        PACKED=call.tables.packed, CAUSAL=call.order, NORMALIZE=call.normalize, RELU=call.relu,
        HAS_MASK=call.key_mask is not None, HAS_COLUMN_MASK=call.columns.key_mask is not None,
        KEY_WIDTH=call.key_width, VALUE_WIDTH=call.value_width,
        ROWS=tiles.rows, COLUMNS=tiles.columns, SLICE=tiles.slice, SPAN=span,
        ALIGNED=aligned, **call.schedule(tiles),
    )  # fmt: skip
    # Add the part of each tile at the key blocks of the tile: its first block and those that follow.
    starts = torch.arange(count, device=q.device)
    if call.terms:
        starts = table[_START].long()[starts // in_chunk] + starts % in_chunk * tiles.rows
        starts = starts.clamp(max=call.tables.tokens - 1)  # tiles without tokens, whose parts are zero
    elif call.tables.packed:
        starts = table[_START].long()
    else:
        starts *= tiles.rows
    block = (call.token_row[starts][:, None] + torch.arange(span, device=q.device)).flatten()
    # [B * H * size, tiles * SPAN]; `block` holds the key block of each column.
    by_block = out.permute(0, 2, 1, 3).reshape(call.rows * size, -1)
    return sum_at(by_block, block, key_size).reshape(call.rows, size, key_size)
