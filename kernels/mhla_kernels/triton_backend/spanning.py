"""Forward and backward passes of attention with Triton in the spanning form, which connects groups of blocks by running sums.

This form is for exponential coefficients. A group of consecutive blocks is called a chunk. It has one summary for each running
sum. Each query is compared directly with the keys of its own chunk, and each score is multiplied by the mixing coefficient of
the two blocks. Keys of other chunks reach the query through the running sums. Each key enters a sum with a writing weight, and
each query reads it with a reading weight.

The backward pass has the same structure, with queries in place of keys, reading weights in place of writing weights, and time
reversed. Let X_c be a running sum that chunk c reads, and Y_c the gradient of the same sum after chunk c is added. Then the
gradient of the factor ``e^-decay`` of this sum is ``sum_c <X_c, Y_c>``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.triton_backend import config
from mhla_kernels.triton_backend.attend import DK, DQ, DV, OUT, attend
from mhla_kernels.triton_backend.call import Call, sum_at
from mhla_kernels.triton_backend.pairs import pair_gradient
from mhla_kernels.triton_backend.primitives import kernel
from mhla_kernels.triton_backend.summaries import summarize
from mhla_kernels.triton_backend.tables import FIRST as _FIRST
from mhla_kernels.triton_backend.tables import LAST as _LAST

FIRST, LAST = tl.constexpr(_FIRST), tl.constexpr(_LAST)


@kernel
def carry_kernel(
    sums,
    decay,
    table,
    decay_stride_h,
    blocks,
    heads,
    TERMS: tl.constexpr,
    EARLIER: tl.constexpr,
    REVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Replace the summaries of each chunk with running sums over the earlier or later chunks of its sequence.

    A chunk is a group of consecutive blocks. It has ``TERMS`` summaries, which are weighted sums over its keys and values.
    Summaries with an index below ``EARLIER`` are summed over the earlier chunks, all others over the later chunks. ``REVERSE``
    exchanges the two directions. A running sum decays by ``e^-decay`` per chunk.

    ``sums`` is ``[B * H, TERMS, blocks, WIDTH]`` float32, changed in place; ``blocks`` is the number of chunks. ``decay`` is
    ``[H or 1, TERMS]`` float32. ``table`` gives the bounds of each chunk's sequence. A program handles ``COLUMNS`` of the
    ``WIDTH`` numbers of a summary. Grid: ``(B * H * TERMS * ceil(WIDTH / COLUMNS),)``.
    """
    parts = tl.cdiv(WIDTH, COLUMNS)
    part, series = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    term, head = series % TERMS, series // TERMS % heads
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    fade = tl.exp(-tl.load(decay + head * decay_stride_h + term))
    backwards = (term >= EARLIER) != REVERSE
    sums += series * blocks * WIDTH
    state = tl.zeros([COLUMNS], tl.float32)
    for step in range(0, blocks):
        i = tl.where(backwards, blocks - 1 - step, step)
        # the state starts from zero at the first chunk of a sequence in the direction of the sum: FIRST = i or LAST = i + 1
        begin = tl.load(table + tl.where(backwards, LAST, FIRST) * blocks + i)
        state = tl.where(begin == tl.where(backwards, i + 1, i), 0.0, state)
        offset = sums + i.to(tl.int64) * WIDTH + columns
        chunk_sum = tl.load(offset, mask=inside, other=0.0)
        tl.store(offset, state, mask=inside)
        state = state * fade + chunk_sum


def _carry(call: Call, sums: Tensor, reverse: bool = False) -> Tensor:
    """Replace the summaries of chunks with running sums over earlier or later chunks, in place.

    A chunk is a group of consecutive blocks. Causal attention sums over earlier chunks only. Otherwise, the first half of the
    summaries of each chunk is summed over earlier chunks, and the second half over later ones.

    Args:
        call: arguments of the attention operator, which include the decays.
        sums: T summaries for each of M chunks, with W numbers each, ``[B * H * T, M, W]`` float32; changed in place.
        reverse: whether to exchange the two directions, as the backward pass does.

    Returns:
        The tensor ``sums``.
    """
    decay, earlier = call.coefficients[3], call.terms
    if not call.causal:  # half of the terms sum over earlier chunks, the other half over later ones
        earlier //= 2
    width = sums.shape[-1]
    tiles = config.scan_tiles(1)
    carry_kernel[(sums.shape[0] * triton.cdiv(width, tiles.columns),)](
        sums, decay, call.tables.table, call.terms if len(decay) > 1 else 0, call.tables.blocks, call.heads,
        TERMS=call.terms, EARLIER=earlier, REVERSE=reverse, WIDTH=width, COLUMNS=tiles.columns, **call.schedule(tiles),
    )  # fmt: skip
    return sums


def forward(call: Call) -> Tensor:
    """Run the forward pass of attention in the spanning form with Triton kernels.

    The spanning form divides a sequence into chunks, which are groups of consecutive blocks, and connects them by running sums.

    Args:
        call: arguments of the attention operator, with lookup tables and launch options.

    Returns:
        Outputs, ``[B, N, H, V]``.
    """
    sums = _carry(call, summarize(call, call.k, call.v)[0])
    return attend(call, OUT.value, (call.q, call.k, call.v), sums, None, None)[0]


def backward(call: Call, gradient: Tensor, needs_gradient: Sequence[bool]) -> tuple[list[Tensor | None], list[Tensor]]:
    """Run the backward pass of attention in the spanning form with Triton kernels.

    The spanning form divides a sequence into chunks, which are groups of consecutive blocks, and connects them by running sums.

    Args:
        call: arguments of the attention operator, with lookup tables and launch options.
        gradient: gradient of the outputs, ``[B, N, H, V]``.
        needs_gradient: four flags: whether to compute the gradient of q, of k, of v, and of all coefficients.

    Returns:
        Two lists. The first holds the gradients of q, k and v, None for each one that is not wanted. The second holds the
        gradients of the coefficients, the four tensors of a :class:`mhla_kernels.mixing.span.Span`, for each batch row and head
        (``[B * H, ...]``). It is empty if these gradients are not wanted.
    """
    of_q, of_k, of_v, of_mixing = needs_gradient
    q, k, v = call.q, call.k, call.v
    sums = weights = dq = dk = dv = by_query = by_key = None
    coefficients: list[Tensor] = []
    if call.normalize:
        shape = (call.rows, call.tables.tokens)
        weights = q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)
    if of_q or of_mixing or call.normalize:  # mode DQ also writes the weights that the other modes read
        sums = _carry(call, summarize(call, k, v)[0])
        dq, by_query = attend(call, DQ.value, (gradient, v, k), sums, None, weights, of_mixing)
    if of_k or of_v or of_mixing:
        later = _carry(call, summarize(call, q, gradient, weights, reverse=True)[0], reverse=True)
        if of_v:
            dv, _ = attend(call, DV.value, (k, q, gradient), later, None, weights)
        if of_k or of_mixing:
            dk, by_key = attend(call, DK.value, (v, gradient, q), later, None, weights, of_mixing)
        if of_mixing:
            assert sums is not None
            assert by_query is not None
            assert by_key is not None
            # in place, since `sums` is not read again and a third set of float32 summaries would be large
            of_fading = sums.mul_(later).view(call.rows, call.terms, -1).sum(-1)
            of_decay = -(-call.coefficients[3]).exp().repeat(call.rows // len(call.coefficients[3]), 1) * of_fading
            coefficients = [pair_gradient(call, gradient, weights), *(_by_block(call, x) for x in (by_query, by_key))]
            coefficients.append(of_decay)
    return [dq if of_q else None, dk if of_k else None, dv], coefficients


def _by_block(call: Call, by_token: Tensor) -> Tensor:
    """Sum per-token gradients over all tokens whose blocks have the same position in their chunks.

    A chunk is a group of consecutive blocks.

    Args:
        call: arguments of the attention operator, which include the position of each token's block in its chunk.
        by_token: gradient of the weight with which each token reads or writes each of T running sums, ``[B * H, N, T]``.

    Returns:
        Gradient for each of the G positions of a block in a chunk, ``[B * H, T, G]``.
    """
    assert call.token_row is not None
    rows, _, terms = by_token.shape
    size = call.coefficients[0].shape[-1]
    return sum_at(by_token.transpose(1, 2).flatten(0, 1), call.token_row, size).reshape(rows, terms, size)
