"""Kernel for the outputs of attention and for the gradients of q, k and v, in the parallel, chunked and spanning forms.

One computation gives all four results if its operands are exchanged. For each row token t,

    out_t = x_t^T S~  +  sum_j c(t, j) (x_t . y_j) a_j

The first term reads a mixed summary; the parallel form does not have it. The second term is a sum over token pairs. In the
parallel form it covers all pairs, and c is the mixing coefficient of the two blocks. In the causal chunked form it covers the
pairs inside one block i, and c = m[i, i].

    | mode   | x  | y  | a  | summary            | pairs (causal) |
    | OUT    | q  | k  | v  | S~ = m S           | j <= t         |
    | DQ     | dO | v  | k  | S~ transposed      | j <= t         |
    | DV     | k  | q  | dO | dS = m^T R         | j >= t         |
    | DK     | v  | dO | q  | dS transposed      | j >= t         |

In block-causal attention, the last column compares blocks in place of tokens. In its chunked form, the mixed summaries include
the block itself, so that no pairs are scored.

Here dO is the gradient of the outputs, S the summary of a block, and R the gradient of the mixed summaries S~.

With the normalizer n_t = sum_j c(t, j) (q_t . k_j) + eps, the output is divided by n_t. Let w_t = sum_j c(t, j) k_j, and let
u_t be the sum of mode DQ. Then the gradients are those of an unnormalized operator whose values have one more column of ones,
with output gradients dO_t / n_t and g_t = -(q_t . u_t) / n_t^2:

    dq_t = u_t / n_t + g_t w_t

In this form no gradient is a difference of rounded outputs. Mode DQ runs first and stores 1 / n_t and g_t for DV and DK.
"""

# Longer than other modules because one kernel computes all four results, and its launcher must match it.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.triton_backend import config
from mhla_kernels.triton_backend.call import Call, alignment, strides
from mhla_kernels.triton_backend.mixers import MIXERS
from mhla_kernels.triton_backend.pairs import products
from mhla_kernels.triton_backend.primitives import (
    BLOCKS,
    TOKENS,
    dot,
    kernel,
    load_tokens,
    load_visible,
    multiply,
    round_to,
)
from mhla_kernels.triton_backend.tables import END as _END
from mhla_kernels.triton_backend.tables import HIGH as _HIGH
from mhla_kernels.triton_backend.tables import LOW as _LOW
from mhla_kernels.triton_backend.tables import ROW as _ROW
from mhla_kernels.triton_backend.tables import START as _START

START, END, ROW, LOW, HIGH = (tl.constexpr(row) for row in (_START, _END, _ROW, _LOW, _HIGH))
OUT, DQ, DV, DK = (tl.constexpr(mode) for mode in range(4))


@triton.jit
def _through_summary(
    total,
    normalizer,
    keys,
    x_base,
    rows,
    visible,
    stride_n,
    stride_d,
    summary,
    outputs,
    MODE: tl.constexpr,
    X_WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    RELU: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Add the products of a tile of tokens x with one block summary to the accumulators of the tile.

    The summary consists of sums S of ``k v^T`` and sums z of ``k``. ``total`` gets ``x S``. With ``NORMALIZE``, z is used as
    well: it adds ``x z`` to ``normalizer`` when the kernel computes the outputs (``MODE`` is ``OUT``), ``z`` to ``keys`` for
    the gradient of q (``DQ``), and ``z`` to ``total`` for the gradient of k (``DK``). ``x`` is loaded in slices of ``SLICE``
    features. ``x_base`` points to the tokens of a batch row and head, and ``summary`` to S, which z follows. ``rows`` are the
    indices of the tokens in the tile. Tokens that are not ``visible`` count as zero. ``outputs`` are the indices of the output
    features that the program computes.

    Returns:
        ``total`` ``[ROWS, OUTPUTS]``, ``normalizer`` ``[ROWS]`` and ``keys`` ``[ROWS, OUTPUTS]``.
    """
    for first in range(0, X_WIDTH, SLICE):
        inner = first + tl.arange(0, SLICE)
        x = load_tokens(x_base, rows, visible, inner, X_WIDTH, stride_n, stride_d, RELU)
        # A summary is stored as K rows of V numbers. DQ and DK multiply by its transpose, so they exchange the indices.
        if MODE == DQ or MODE == DK:
            offset = outputs[None, :] * X_WIDTH + inner[:, None]
        else:
            offset = inner[:, None] * OUT_WIDTH + outputs[None, :]
        inside = (inner < X_WIDTH)[:, None] & (outputs < OUT_WIDTH)[None, :]
        s = tl.load(summary + offset, mask=inside, other=0.0)
        total = multiply(x, s, total, x.dtype)
        if NORMALIZE and MODE == OUT:
            z = tl.load(summary + X_WIDTH * OUT_WIDTH + inner, mask=inner < X_WIDTH, other=0.0)
            normalizer += tl.sum(x.to(tl.float32) * z.to(tl.float32)[None, :], 1)
    if NORMALIZE and (MODE == DQ or MODE == DK):
        z = tl.load(summary + X_WIDTH * OUT_WIDTH + outputs, mask=outputs < OUT_WIDTH, other=0.0).to(tl.float32)
        if MODE == DQ:
            keys += z[None, :]
        else:
            total += z[None, :]
    return total, normalizer, keys


@kernel
def attend_kernel(
    x,
    y,
    a,
    row_tokens,
    out,
    key_mask,
    column_mask,
    inverse_normalizer,
    normalizer_gradient,
    mixed,
    running,
    mixing,
    own_gradient,
    term_weight,
    table,
    token_row,
    column_row,
    x_stride_b,
    x_stride_n,
    x_stride_h,
    x_stride_d,
    y_stride_b,
    y_stride_n,
    y_stride_h,
    y_stride_d,
    a_stride_b,
    a_stride_n,
    a_stride_h,
    a_stride_d,
    row_tokens_stride_b,
    row_tokens_stride_n,
    row_tokens_stride_h,
    row_tokens_stride_d,
    out_stride_b,
    out_stride_n,
    out_stride_h,
    out_stride_d,
    mixing_stride_h,
    mixing_stride_i,
    mixing_stride_j,
    tokens,
    column_tokens,
    table_size,
    heads,
    tiles_of_row,
    pieces,
    piece_size,
    tiles,
    size,
    weight_stride_h,
    eps,
    MODE: tl.constexpr,
    SUMMARY: tl.constexpr,
    TERMS: tl.constexpr,
    PACKED: tl.constexpr,
    RUNNING: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    RELU: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_COLUMN_MASK: tl.constexpr,
    OWN_GRADIENT: tl.constexpr,
    X_WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute one ``[ROWS, OUTPUTS]`` tile of the attention outputs, or of the gradient of q, k or v, as ``MODE`` selects.

    The result for row token t is ``x_t S + sum_j c(t, j) (x_t . y_j) a_j``, with a mixed summary S and mixing coefficients c.
    The tensors ``x``, ``y`` and ``a`` are q, k and v in mode OUT. With dO for the gradient of the outputs, they are dO, v and k
    in mode DQ, k, q and dO in mode DV, and v, dO and q in mode DK. ``row_tokens`` is q in modes OUT and DQ, and k in modes DV
    and DK. The lookup table ``table`` holds the bounds of blocks and sequences, and ``token_row`` holds the row of each token's
    block in the matrix ``mixing``. Grid: ``(B * H * tiles, output parts)``.

    Chunked form (``SUMMARY``): ``table`` has a column for each block. A block has ``pieces`` pieces of ``piece_size`` tokens,
    and a piece has ``tiles`` tiles. ``mixed`` holds one mixed summary for each block. With ``RUNNING``, ``running`` holds for
    each piece the summary of the pieces before it in its block (after it in modes DV and DK).

    Parallel form: tiles have ``ROWS`` tokens. With ``PACKED``, ``table`` has a column for each tile. ``COLUMNS`` consecutive
    tokens lie in at most ``SPAN`` of the ``size`` blocks of ``mixing``. The tokens j have ``column_mask`` and ``column_row`` in
    place of ``key_mask`` and ``token_row``; in self-attention, these are the same.

    Spanning form (``SUMMARY`` and ``TERMS``): ``table`` has a column for each chunk of several blocks, and token pairs are
    scored inside a chunk only. ``mixing`` holds the coefficients between the blocks of a chunk. ``mixed`` holds ``TERMS``
    summaries for each chunk. A row token reads each of them with the weight of its block in ``term_weight``
    ``[H or 1, TERMS, size]``.

    With ``NORMALIZE``, the outputs are divided by the normalizers n_t of the queries. ``inverse_normalizer`` holds ``1 / n_t``,
    and ``normalizer_gradient`` the gradients of n_t, ``[B * H, queries]`` each. Mode DQ writes them; DV and DK read them.

    With ``OWN_GRADIENT`` the kernel also writes ``own_gradient``, in two cases. In mode DK of the causal chunked form it is
    ``[B * H, tiles in total, output parts]`` and gets this tile's part of the gradient of its block's coefficient for itself.
    In modes DQ and DK of the spanning form it is ``[B * H, N, TERMS, output parts, 2]`` and gets each row token's part of the
    gradient of each term weight: entry 0 through the values, entry 1 (mode DQ with ``NORMALIZE``) through the sum of keys.
    """
    tile, part, row = tl.program_id(0) % tiles_of_row, tl.program_id(1), (tl.program_id(0) // tiles_of_row).to(tl.int64)
    batch, head = row // heads, row % heads
    INPUT: tl.constexpr = x.dtype.element_ty
    PAIR_RELU: tl.constexpr = RELU and (MODE == OUT or MODE == DV)
    OUT_RELU: tl.constexpr = RELU and (MODE == DQ or MODE == DK)
    LATER: tl.constexpr = MODE == DV or MODE == DK
    PAIRS: tl.constexpr = CAUSAL or not SUMMARY or TERMS > 0
    MATRIX: tl.constexpr = not SUMMARY or TERMS > 0
    SUMMARY_WIDTH: tl.constexpr = X_WIDTH * OUT_WIDTH + (OUT_WIDTH if MODE == DQ or MODE == DK else X_WIDTH)

    # Tokens from `low` to `high` form the part of the sequence whose pairs this program scores. Its rows begin at `start`, and
    # the sequence of the rows ends at `end`.
    block = 0
    piece = 0
    if SUMMARY:
        piece = tile // tiles
        block = piece // pieces
        low = tl.load(table + START * table_size + block) + (piece % pieces) * piece_size
        high = tl.minimum(tl.load(table + END * table_size + block), low + piece_size)
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
    # The grid is sized for the largest block, and packed tables for the most blocks: some programs have no token.
    if start >= end:
        return

    # Callers pass strides divided by ALIGNED. Multiplying them by this constant tells the compiler that rows are aligned, so
    # that it emits 16-byte loads, without compiling the kernel again for every stride.
    x_stride_n *= ALIGNED
    y_stride_n *= ALIGNED
    a_stride_n *= ALIGNED
    row_tokens_stride_n *= ALIGNED
    out_stride_n *= ALIGNED
    x += (batch * x_stride_b + head * x_stride_h) * ALIGNED
    y += (batch * y_stride_b + head * y_stride_h) * ALIGNED
    a += (batch * a_stride_b + head * a_stride_h) * ALIGNED
    row_tokens += (batch * row_tokens_stride_b + head * row_tokens_stride_h) * ALIGNED
    out += (batch * out_stride_b + head * out_stride_h) * ALIGNED
    mixing += head * mixing_stride_h
    key_mask += batch * tokens
    column_mask += batch * column_tokens
    if LATER:  # the two tensors belong to queries, which are the columns in modes DV and DK
        inverse_normalizer += row * column_tokens
        normalizer_gradient += row * column_tokens
    else:
        inverse_normalizer += row * tokens
        normalizer_gradient += row * tokens
    if OWN_GRADIENT and not TERMS:
        own_gradient += (row * tiles_of_row + tile) * tl.num_programs(1)

    rows = start + tl.arange(0, ROWS)
    visible = load_visible(key_mask, rows, end, HAS_MASK)
    outputs = part * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    normalizer = tl.zeros([ROWS], tl.float32)
    keys = tl.zeros([ROWS, OUTPUTS], tl.float32)  # w_t

    # The sums over earlier pieces of the block and over the pairs below have the same coefficient, m[i, i]. Both are added up
    # first and multiplied by it once.
    if RUNNING:
        earlier = running + (row * table_size * pieces + piece) * SUMMARY_WIDTH
        total, normalizer, keys = _through_summary(
            total, normalizer, keys, x, rows, visible, x_stride_n, x_stride_d, earlier, outputs,
            MODE, X_WIDTH, OUT_WIDTH, PAIR_RELU, NORMALIZE, SLICE,
        )  # fmt: skip

    if PAIRS:
        last = high
        if CAUSAL == BLOCKS:
            if not SUMMARY and not PACKED:  # the table has a column for each block
                if LATER:  # rounded down to a multiple of COLUMNS, as SPAN assumes
                    low = tl.load(table + START * table_size + tl.load(token_row + start)) // COLUMNS * COLUMNS
                else:
                    last_block = tl.load(token_row + tl.minimum(high, start + ROWS) - 1)
                    last = tl.load(table + END * table_size + last_block)
        elif CAUSAL:  # skip the columns that no row of this tile may see
            if LATER:
                low = start
            else:
                last = tl.minimum(high, start + ROWS)
        for first in range(low, last, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            shown = load_visible(column_mask, columns, last, HAS_COLUMN_MASK)
            scores = products(
                x, rows, visible, x_stride_n, x_stride_d, y, columns, shown, y_stride_n, y_stride_d,
                X_WIDTH, PAIR_RELU, ROWS, COLUMNS, SLICE,
            )  # fmt: skip
            # Here the columns are queries t, whose output gradients are dO_t / n_t; in the column of ones, it is g_t.
            if NORMALIZE and LATER:
                scores *= tl.load(inverse_normalizer + columns, mask=shown, other=0.0)[None, :]
                if MODE == DK:
                    scores += tl.load(normalizer_gradient + columns, mask=shown, other=0.0)[None, :]
            if CAUSAL == TOKENS:
                counts = (columns[None, :] >= rows[:, None]) if LATER else (columns[None, :] <= rows[:, None])
            if MATRIX:
                # Load one coefficient for each row token and column block, and expand it to the columns by a product with a
                # one-hot matrix: fewer loads than one for each pair.
                row_block = tl.load(token_row + rows, mask=rows < end, other=0)
                first_block = tl.load(column_row + first)
                in_tile = tl.load(column_row + columns, mask=columns < last, other=-1) - first_block
                if CAUSAL == BLOCKS:
                    column_block = first_block + in_tile
                    if LATER:
                        counts = column_block[None, :] >= row_block[:, None]
                    else:
                        counts = column_block[None, :] <= row_block[:, None]
                slots = tl.arange(0, SPAN)
                blocks = first_block + slots
                if LATER:
                    offset = row_block[:, None] * mixing_stride_j + blocks[None, :] * mixing_stride_i
                else:
                    offset = row_block[:, None] * mixing_stride_i + blocks[None, :] * mixing_stride_j
                in_range = tl.broadcast_to((blocks < size)[None, :], [ROWS, SPAN])
                # [ROWS, SPAN] times [SPAN, COLUMNS] gives [ROWS, COLUMNS].
                by_block = tl.load(mixing + offset, mask=in_range, other=0.0)
                spread = (slots[:, None] == in_tile[None, :]).to(tl.float32).to(INPUT)
                coefficient = multiply(by_block, spread, tl.zeros([ROWS, COLUMNS], tl.float32), INPUT)
                scores *= coefficient
            else:
                coefficient = tl.full([ROWS, COLUMNS], 1.0, tl.float32)
            if CAUSAL:  # mask after all factors: zero times an overflowed score would be NaN
                scores = tl.where(counts, scores, 0.0)
            value = load_tokens(a, columns, shown, outputs, OUT_WIDTH, a_stride_n, a_stride_d, OUT_RELU)
            total = multiply(scores, value, total, INPUT)
            if NORMALIZE and MODE == OUT:
                normalizer += tl.sum(scores, 1)
            if NORMALIZE and MODE == DQ:
                if CAUSAL:
                    coefficient = tl.where(counts, coefficient, 0.0)
                if MATRIX:
                    keys = multiply(coefficient, value, keys, INPUT)
                else:
                    keys = dot(coefficient.to(INPUT), value, keys)

    if TERMS:
        row_block = tl.load(token_row + rows, mask=rows < end, other=0)
        for term in range(0, TERMS):
            weight = tl.load(term_weight + head * weight_stride_h + term * size + row_block)
            values, sums, z = _through_summary(
                tl.zeros([ROWS, OUTPUTS], tl.float32), tl.zeros([ROWS], tl.float32),
                tl.zeros([ROWS, OUTPUTS], tl.float32), x, rows, visible, x_stride_n, x_stride_d,
                mixed + ((row * TERMS + term) * table_size + block) * SUMMARY_WIDTH, outputs,
                MODE, X_WIDTH, OUT_WIDTH, PAIR_RELU, NORMALIZE, SLICE,
            )  # fmt: skip
            if OWN_GRADIENT:
                part_of = own_gradient + (((row * tokens + rows) * TERMS + term) * tl.num_programs(1) + part) * 2
                row_features = load_tokens(
                    row_tokens, rows, visible, outputs, OUT_WIDTH, row_tokens_stride_n, row_tokens_stride_d, RELU
                )
                row_features = row_features.to(tl.float32)
                tl.store(part_of, tl.sum(row_features * values, 1), mask=rows < end)
                if NORMALIZE and MODE == DQ:
                    tl.store(part_of + 1, tl.sum(row_features * z, 1), mask=rows < end)
            total += weight[:, None] * values
            normalizer += weight * sums
            keys += weight[:, None] * z
    elif SUMMARY:
        if CAUSAL:
            block_row = tl.load(table + ROW * table_size + block)
            own_coefficient = tl.load(mixing + block_row * (mixing_stride_i + mixing_stride_j))
            # `total` does not contain the coefficient yet, so k . total is the tile's part of the coefficient's gradient.
            if OWN_GRADIENT:
                k = load_tokens(
                    row_tokens, rows, visible, outputs, OUT_WIDTH, row_tokens_stride_n, row_tokens_stride_d, RELU
                )
                tl.store(own_gradient + part, tl.sum(tl.sum(k.to(tl.float32) * total, 1), 0))
            total *= own_coefficient
            normalizer *= own_coefficient
            keys *= own_coefficient
        total, normalizer, keys = _through_summary(
            total, normalizer, keys, x, rows, visible, x_stride_n, x_stride_d,
            mixed + (row * table_size + block) * SUMMARY_WIDTH, outputs,
            MODE, X_WIDTH, OUT_WIDTH, PAIR_RELU, NORMALIZE, SLICE,
        )  # fmt: skip

    if NORMALIZE and MODE == OUT:
        total = total / (normalizer + eps)[:, None]
    # These sums run over all features of q, so a program of mode DQ holds the full output width (see config.attend_tiles).
    if NORMALIZE and MODE == DQ:
        q = load_tokens(
            row_tokens, rows, visible, outputs, OUT_WIDTH, row_tokens_stride_n, row_tokens_stride_d, RELU
        ).to(tl.float32)
        inverse = 1.0 / (tl.sum(q * keys, 1) + eps)
        gradient = -tl.sum(q * total, 1) * inverse * inverse
        total = total * inverse[:, None] + keys * gradient[:, None]
        tl.store(inverse_normalizer + rows, inverse, mask=rows < end)
        tl.store(normalizer_gradient + rows, gradient, mask=rows < end)
    if OUT_RELU:
        raw = load_tokens(
            row_tokens, rows, visible, outputs, OUT_WIDTH, row_tokens_stride_n, row_tokens_stride_d, False
        )
        total = tl.where(raw.to(tl.float32) > 0, total, 0.0)
    if HAS_MASK:  # outputs and gradients of hidden tokens are zero, whatever values the tokens hold
        total = tl.where(visible[:, None], total, 0.0)
    offset = out + rows.to(tl.int64)[:, None] * out_stride_n + outputs[None, :] * out_stride_d
    inside = (rows < end)[:, None] & (outputs < OUT_WIDTH)[None, :]
    tl.store(offset, round_to(total, out.dtype.element_ty), mask=inside)


def attend(
    call: Call,
    mode: int,
    operands: tuple[Tensor, Tensor, Tensor],
    mixed: Tensor | None,
    running: Tensor | None,
    weights: tuple[Tensor, Tensor] | None,
    own_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch the Triton kernel that computes the outputs of attention or one of the gradients of q, k and v.

    The result for token t is ``x_t S + sum_j c(t, j) (x_t . y_j) a_j``, with a mixed summary S and mixing coefficients c. If
    the outputs are normalized, n_t is the sum of the weights of token t, plus eps.

    Args:
        call: arguments of the attention operator, with lookup tables and launch options.
        mode: result to compute: ``OUT.value`` for the outputs; ``DQ.value``, ``DV.value`` or ``DK.value`` for a gradient.
        operands: tensors x, y and a of the formula: (q, k, v) for OUT, (dO, v, k) for DQ, (k, q, dO) for DV and (v, dO, q) for
            DK, where dO is the gradient of the outputs.
        mixed: mixed summaries of M blocks, ``[B * H, M, K * V + K]`` float32; in the spanning form, T running sums for each of
            M chunks, ``[B * H * T, M, K * V + K]``. None in the parallel form.
        running: for each piece of a block, the summary of the pieces before it (after it for DV and DK),
            ``[B * H, M * pieces, K * V + K]`` float32; None if blocks are not divided into pieces.
        weights: ``1 / n_t`` and the gradient of n_t, ``[B * H, N]`` float32 each. DQ writes them, and DV and DK read them. None
            for OUT, and if the outputs are not normalized.
        own_gradient: whether to compute the gradient of coefficients as well.

    Returns:
        The result and a gradient of coefficients. The result is ``[B, N, H, V]`` for OUT and DV, and ``[B, N, H, K]`` for DQ
        and DK. The gradient is None without ``own_gradient``, and float32 otherwise. For DK of the causal chunked form, it is
        the gradient of the coefficient of each block for itself, ``[B * H, blocks]``. For DQ and DK of the spanning form, it is
        the gradient of the weight with which each token reads or writes each of T running sums, ``[B * H, N, T]``.
    """
    x, y, a = operands
    row_tokens = call.q if mode in (OUT.value, DQ.value) else call.k
    # q also stands for k in mode DK: both have the same shape and, on the side of the keys in cross-attention, are the keys.
    out_like = call.v if mode in (OUT.value, DV.value) else call.q
    out = torch.empty(out_like.shape, dtype=out_like.dtype, device=out_like.device)
    chunked = mixed is not None
    full_width = mode == DQ.value and call.normalize  # the gradient of the normalizer sums over all features of q
    terms = call.terms if chunked else 0
    order = 0 if chunked and not terms and call.block_causal else call.order  # mixed summaries contain the block itself
    pairwise = not chunked or terms > 0
    tiles = config.attend_tiles(
        x.dtype, x.shape[-1], out.shape[-1], full_width, call.chip,
        summaries=chunked, pairs=pairwise or order > 0, matrix=pairwise,
        fine=not chunked and call.columns.span(128) > 16,
        short=terms > 0 and (mode in (DQ.value, DK.value) or call.chip != 100),
    )  # fmt: skip
    parts = triton.cdiv(out.shape[-1], tiles.outputs)
    (pieces, piece_size), in_piece, span = call.pieces, 1, 1
    if chunked:
        table, in_piece = call.tables.table, triton.cdiv(piece_size, tiles.rows)
        count = call.tables.blocks * pieces * in_piece
    else:
        table, count = call.tile_table(tiles.rows)
    if pairwise:
        span = config.power_of_two(call.columns.span(tiles.columns))
    gradient = None
    if own_gradient:  # zeros, since programs without tokens write nothing
        shape = (call.tables.tokens, terms, parts, 2) if terms else (count, parts)
        gradient = x.new_zeros(call.rows, *shape, dtype=torch.float32)
    inverse, normalizer_gradient = weights or (x, x)  # x stands in for any tensor that the kernel does not read
    aligned = alignment(x, y, a, row_tokens, out)
    if call.pairs is None:
        call.pairs = MIXERS[call.arguments.mixer].pairs(call)
    coefficients, *coefficient_strides = call.pairs
    term_weight = call.coefficients[1 if mode in (OUT.value, DQ.value) else 2] if terms else x
    attend_kernel[(call.rows * count, parts)](
        x, y, a, row_tokens, out, call.mask_bytes, call.columns.mask_bytes, inverse, normalizer_gradient,
        x if mixed is None else mixed, x if running is None else running, coefficients,
        x if gradient is None else gradient, term_weight, table,
        table if call.token_row is None else call.token_row,
        table if call.columns.token_row is None else call.columns.token_row,
        *strides(aligned, x, y, a, row_tokens, out), *coefficient_strides,
        call.tables.tokens, call.columns.tables.tokens, table.shape[1], call.heads, count, pieces, piece_size, in_piece,
        call.coefficients[0].shape[-1 if mode in (OUT.value, DQ.value) else -2],
        term_weight.stride(0) if terms and len(term_weight) > 1 else 0,
        call.eps, MODE=mode, SUMMARY=chunked, TERMS=terms, PACKED=call.tables.packed,
        RUNNING=running is not None, CAUSAL=order, NORMALIZE=call.normalize,
        RELU=call.relu, HAS_MASK=call.key_mask is not None, HAS_COLUMN_MASK=call.columns.key_mask is not None,
        OWN_GRADIENT=own_gradient,
        X_WIDTH=x.shape[-1], OUT_WIDTH=out.shape[-1], ROWS=tiles.rows, COLUMNS=tiles.columns, SLICE=tiles.slice,
        OUTPUTS=tiles.outputs, SPAN=span, ALIGNED=aligned, **call.schedule(tiles),
    )  # fmt: skip
    if gradient is None:
        return out, None
    if terms:
        by_values, by_keys = gradient.sum(3).unbind(-1)
        if mode == DK.value or weights is None:
            return out, by_values
        # mode DQ stores products with undivided output gradients: apply 1 / n_t and g_t here
        return out, by_values * inverse[..., None] + by_keys * normalizer_gradient[..., None]
    return out, gradient.view(call.rows, call.tables.blocks, -1).sum(-1)
