"""Triton kernels for the summaries of blocks: ``S_b = sum_j k_j v_j^T`` and ``z_b = sum_j k_j``.

A summary is stored as one row of ``K * V + K`` numbers: S row by row, then z. The backward pass uses the same kernel for the
gradient of the mixed summaries, with queries in place of keys, output gradients in place of values, and a weight for each
token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.finite import LARGEST as _LARGEST
from mhla_kernels.triton_backend import config
from mhla_kernels.triton_backend.call import Call, alignment, strides
from mhla_kernels.triton_backend.primitives import kernel, load_tokens, load_visible, multiply, round_to
from mhla_kernels.triton_backend.tables import END as _END
from mhla_kernels.triton_backend.tables import START as _START

START, END = tl.constexpr(_START), tl.constexpr(_END)
LARGEST = tl.constexpr(_LARGEST)


@kernel
def summaries_kernel(
    key,
    value,
    key_mask,
    value_weight,
    normalizer_weight,
    summary,
    term_weight,
    token_row,
    table,
    key_stride_b,
    key_stride_n,
    key_stride_h,
    key_stride_d,
    value_stride_b,
    value_stride_n,
    value_stride_h,
    value_stride_d,
    tokens,
    blocks,
    heads,
    pieces,
    piece_size,
    size,
    weight_stride_h,
    TERMS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_MASK: tl.constexpr,
    RELU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute the summary of one piece of a block: ``S = sum_j k_j v_j^T`` and ``z = sum_j k_j`` over its tokens j.

    Each block is divided into ``pieces`` pieces of at most ``piece_size`` tokens. A program computes ``KEYS`` rows and
    ``VALUES`` columns of S. ``summary`` is ``[B * H, blocks * pieces, K * V + K]``. Grid:
    ``(B * H * blocks * pieces, key parts * value parts)``.

    With ``WEIGHTED``, each token is multiplied by ``value_weight`` in S and by ``normalizer_weight`` in z. Both are
    ``[B * H, N]`` float32.

    If ``TERMS`` is not 0, each block is a chunk of ``size`` smaller blocks and has ``TERMS`` summaries,
    ``[B * H, TERMS, blocks, K * V + K]``, with a program for each. A token is then also multiplied by the weight of its smaller
    block in ``term_weight``, ``[H or 1, TERMS, size]``; ``token_row`` gives the index of this block in the chunk.

    With ``CAUSAL``, a sum that overflows is replaced with a large finite number (see :func:`are_overflowed`).
    """
    piece, part = tl.program_id(0) % (blocks * pieces), tl.program_id(1)
    row = (tl.program_id(0) // (blocks * pieces)).to(tl.int64)
    place = row * blocks * pieces + piece
    if TERMS:
        term_weight += (row // TERMS % heads) * weight_stride_h + (row % TERMS) * size
        row = row // TERMS
    batch, head = row // heads, row % heads
    block = piece // pieces
    start = tl.load(table + START * blocks + block) + (piece % pieces) * piece_size
    end = tl.minimum(tl.load(table + END * blocks + block), start + piece_size)
    value_parts = tl.cdiv(VALUE_WIDTH, VALUES)
    keys = (part // value_parts) * KEYS + tl.arange(0, KEYS)
    values = (part % value_parts) * VALUES + tl.arange(0, VALUES)
    key_stride_n *= ALIGNED
    value_stride_n *= ALIGNED
    key += (batch * key_stride_b + head * key_stride_h) * ALIGNED
    value += (batch * value_stride_b + head * value_stride_h) * ALIGNED

    # Programs without tokens run through as well: they store the zeros of an empty piece, since the buffer is not zeroed.
    total = tl.zeros([KEYS, VALUES], tl.float32)
    normalizer = tl.zeros([KEYS], tl.float32)
    for first in range(start, end, TOKENS):
        rows = first + tl.arange(0, TOKENS)
        visible = load_visible(key_mask + batch * tokens, rows, end, HAS_MASK)
        k = load_tokens(key, rows, visible, keys, KEY_WIDTH, key_stride_n, key_stride_d, RELU)
        v = load_tokens(value, rows, visible, values, VALUE_WIDTH, value_stride_n, value_stride_d, False)
        if TERMS:
            by_term = tl.load(term_weight + tl.load(token_row + rows, mask=rows < end, other=0))
        if WEIGHTED:
            weight = tl.load(value_weight + row * tokens + rows, mask=visible, other=0.0)
            if TERMS:
                weight *= by_term
            total = multiply(tl.trans(k.to(tl.float32) * weight[:, None]), v, total, k.dtype)
        elif TERMS:
            total = multiply(tl.trans(k.to(tl.float32) * by_term[:, None]), v, total, k.dtype)
        else:
            total = multiply(tl.trans(k), v, total, k.dtype)
        if NORMALIZE:
            wide = k.to(tl.float32)
            if WEIGHTED:
                wide *= tl.load(normalizer_weight + row * tokens + rows, mask=visible, other=0.0)[:, None]
            if TERMS:
                wide *= by_term[:, None]
            normalizer += tl.sum(wide, 0)

    if CAUSAL:  # a zero coefficient times an overflowed sum must be zero (see mhla_kernels.finite)
        total = tl.where(tl.abs(total) <= LARGEST, total, tl.where(total < 0, -LARGEST, LARGEST))
        normalizer = tl.where(tl.abs(normalizer) <= LARGEST, normalizer, tl.where(normalizer < 0, -LARGEST, LARGEST))
    summary += place * (KEY_WIDTH * VALUE_WIDTH + KEY_WIDTH)
    offset = keys[:, None] * VALUE_WIDTH + values[None, :]
    inside = (keys < KEY_WIDTH)[:, None] & (values < VALUE_WIDTH)[None, :]
    tl.store(summary + offset, round_to(total, summary.dtype.element_ty), mask=inside)
    if part % value_parts == 0:  # z does not depend on the values, so one program for each part of the keys stores it
        offset_of_z = summary + KEY_WIDTH * VALUE_WIDTH + keys
        tl.store(offset_of_z, round_to(normalizer, summary.dtype.element_ty), mask=keys < KEY_WIDTH)


@kernel
def running_kernel(
    pieces_summary,
    block_summary,
    blocks,
    pieces,
    REVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the summaries of a block's pieces, and replace the summary of each piece with the sum over the earlier pieces.

    Each block consists of ``pieces`` pieces, and the summary of a piece has ``WIDTH`` numbers. The first piece gets zeros. With
    ``REVERSE``, each summary is replaced with the sum over the later pieces, and the last piece gets zeros.

    ``pieces_summary`` is ``[B * H, blocks * pieces, WIDTH]``, changed in place. ``block_summary`` is ``[B * H, blocks, WIDTH]``
    and receives the sums over all pieces. A program handles ``COLUMNS`` (a power of 2) of the ``WIDTH`` numbers, for all pieces
    of one block. Grid: ``(B * H * blocks, ceil(WIDTH / COLUMNS))``.
    """
    block, part, row = tl.program_id(0) % blocks, tl.program_id(1), (tl.program_id(0) // blocks).to(tl.int64)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    for step in range(0, pieces):
        piece = pieces - 1 - step if REVERSE else step
        offset = pieces_summary + ((row * blocks + block) * pieces + piece) * WIDTH + columns
        piece_sum = tl.load(offset, mask=inside, other=0.0).to(tl.float32)
        tl.store(offset, round_to(total, pieces_summary.dtype.element_ty), mask=inside)
        total += piece_sum
    offset = block_summary + (row * blocks + block) * WIDTH + columns
    tl.store(offset, round_to(total, block_summary.dtype.element_ty), mask=inside)


def summarize(
    call: Call, key: Tensor, value: Tensor, weights: tuple[Tensor, Tensor] | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute the summary of every block: ``S = sum_j k_j v_j^T``, row by row, then ``z = sum_j k_j``.

    A long block is divided into pieces, whose summaries are computed first. In the spanning form, pairs of tokens are scored
    within chunks of several blocks, and T running sums carry information between chunks. A block is then a chunk, and each
    chunk has T summaries, one for each running sum, in which tokens have the weights that ``call`` holds for this sum.

    Args:
        call: arguments of the attention operator, with lookup tables and launch options.
        key: keys, or queries for the gradient of the mixed summaries, ``[B, N, H, K]``.
        value: values, or gradients of the outputs, ``[B, N, H, V]``.
        weights: factors of each token in S and in z, ``[B * H, N]`` float32 each; None for factors of 1.
        reverse: whether to compute the sums for the backward pass. The second result then covers the later pieces of a block
            instead of the earlier ones. In the spanning form, each token is weighted by its factor for reading the running
            sums, instead of its factor for adding to them.

    Returns:
        Summaries of the M blocks, ``[B * H, M, K * V + K]`` float32. In the spanning form, T summaries for each of M chunks,
        ``[B * H * T, M, K * V + K]``. If the call is causal but not block-causal, and its blocks are divided into pieces, the
        second result holds, for each piece, the summary of the earlier pieces of its block, or of the later ones with
        ``reverse``, ``[B * H, M * pieces, K * V + K]``. Otherwise it is None.
    """
    pieces, piece_size = call.pieces
    blocks, width = call.tables.blocks, call.summary_width
    value_weight, normalizer_weight = weights or (call.q, call.q)
    tiles = config.summary_tiles(call.q.dtype, call.key_width, call.value_width, call.chip)
    parts = triton.cdiv(call.key_width, tiles.keys) * triton.cdiv(call.value_width, tiles.values)
    terms, term_weight = call.terms, call.coefficients[1 if reverse else 2] if call.terms else call.q
    rows = call.rows * max(1, terms)
    summary = call.q.new_empty(rows, blocks * pieces, width, dtype=torch.float32)
    aligned = alignment(key, value)
    summaries_kernel[(rows * blocks * pieces, parts)](
        key, value, call.mask_bytes, value_weight, normalizer_weight, summary, term_weight,
        call.tables.table if call.token_row is None else call.token_row, call.tables.table,
        *strides(aligned, key, value), call.tables.tokens, blocks, call.heads, pieces, piece_size,
        term_weight.shape[-1], term_weight.stride(0) if terms and len(term_weight) > 1 else 0, TERMS=terms,
        KEY_WIDTH=call.key_width, VALUE_WIDTH=call.value_width, HAS_MASK=call.key_mask is not None, RELU=call.relu,
        WEIGHTED=weights is not None, NORMALIZE=call.normalize, CAUSAL=call.causal, TOKENS=tiles.tokens,
        KEYS=tiles.keys, VALUES=tiles.values, ALIGNED=aligned, **call.schedule(tiles),
    )  # fmt: skip
    if pieces == 1:
        return summary, None
    if call.block_causal and not reverse:  # overflowed sums of two pieces could cancel, so the overflow is noted first
        overflowed = are_overflowed(summary).view(call.rows, blocks, pieces).any(-1)
    total = call.q.new_empty(call.rows, blocks, width, dtype=torch.float32)
    columns = 1024
    running_kernel[(call.rows * blocks, triton.cdiv(width, columns))](
        summary, total, blocks, pieces, REVERSE=reverse, WIDTH=width, COLUMNS=columns, num_warps=4
    )
    if call.block_causal and not reverse:
        total.masked_fill_(overflowed[..., None], _LARGEST)
    return total, summary if call.token_causal else None


def are_overflowed(summary: Tensor) -> Tensor:
    """Return a mask of the block summaries in which a sum has overflowed.

    In causal attention, the kernels replace an overflowed sum with a large finite number, by which it is recognized here.

    Args:
        summary: summaries with W numbers each, ``[..., W]``.

    Returns:
        ``[...]`` bool, True for summaries with an overflowed sum.
    """
    return torch.linalg.vector_norm(summary, torch.inf, -1) >= _LARGEST
