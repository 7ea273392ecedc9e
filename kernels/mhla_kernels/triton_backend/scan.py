"""Triton kernels of causal exponential mixing, with R running sums over the blocks in place of an M x M matrix.

    S~_i = sum_r a_r e^{-lambda_r} P_r(i - 1),     P_r(i) = e^{-lambda_r} P_r(i - 1) + S_i

Here S_i is the summary of block i, and S~_i is the mixture that block i reads. The gradient of the summaries consists of the
same sums from the last block to the first. Let G_i be the gradient of S~_i. The gradients of amplitudes a and decays lambda
also use Q_r(i) = e^{-lambda_r} (Q_r(i - 1) + P_r(i - 1)), which is the sum of (i - b) e^{-lambda_r (i - b)} S_b over earlier b:

    da_r = sum_i <G_i, e^{-lambda_r} P_r(i - 1)>,     dlambda_r = -a_r sum_i <G_i, Q_r(i)>

In block-causal attention, block i also reads its own summary: the formulas for S~_i and da_r then contain P_r(i) instead of
e^{-lambda_r} P_r(i - 1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.mixing import ExponentialMixing, Mixing
from mhla_kernels.triton_backend import config
from mhla_kernels.triton_backend.call import Call
from mhla_kernels.triton_backend.primitives import kernel, round_to
from mhla_kernels.triton_backend.tables import FIRST as _FIRST
from mhla_kernels.triton_backend.tables import LAST as _LAST

FIRST, LAST = tl.constexpr(_FIRST), tl.constexpr(_LAST)


@kernel
def scan_kernel(
    amplitude,
    decay,
    summary,
    mixed,
    table,
    stride_h,
    blocks,
    heads,
    REVERSE: tl.constexpr,
    INCLUSIVE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    TERMS_PADDED: tl.constexpr,
):
    """Mix block summaries by exponentials of block distance: ``mixed[i]`` is a weighted sum over the earlier blocks.

    The weight of block b is ``sum_r amplitude[r] exp(-decay[r] |i - b|)``. With ``REVERSE``, the sum is over the later blocks,
    and with ``INCLUSIVE``, it includes block i itself. Only blocks of the same sequence are mixed.

    ``summary`` and ``mixed`` are ``[B * H, blocks, WIDTH]`` float32. ``amplitude`` and ``decay`` are ``[H or 1, TERMS]``
    float32. ``table`` gives the bounds of each block's sequence. A program mixes ``COLUMNS`` of the ``WIDTH`` entries of the
    summaries. Grid: ``(B * H * parts,)``, with one part for every ``COLUMNS`` entries.
    """
    parts = tl.cdiv(WIDTH, COLUMNS)
    part, row = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    terms = tl.arange(0, TERMS_PADDED)
    a = tl.load(amplitude + (row % heads) * stride_h + terms, mask=terms < TERMS, other=0.0)
    fade = tl.exp(-tl.load(decay + (row % heads) * stride_h + terms, mask=terms < TERMS, other=0.0))
    state = tl.zeros([TERMS_PADDED, COLUMNS], tl.float32)
    summary += row * blocks * WIDTH
    mixed += row * blocks * WIDTH
    for step in range(0, blocks):
        i = blocks - 1 - step if REVERSE else step
        offset = tl.cast(i, tl.int64) * WIDTH + columns
        # The first block of a sequence starts from a zero state. Unused blocks of packed tables have zeros as summaries.
        if REVERSE:
            new = tl.load(table + LAST * blocks + i) == i + 1
        else:
            new = tl.load(table + FIRST * blocks + i) == i
        state = tl.where(new, 0.0, state * fade[:, None])
        if INCLUSIVE:
            state += tl.load(summary + offset, mask=inside, other=0.0).to(tl.float32)[None, :]
        out = tl.sum(a[:, None] * state, 0)
        tl.store(mixed + offset, round_to(out, mixed.dtype.element_ty), mask=inside)
        if not INCLUSIVE:
            state += tl.load(summary + offset, mask=inside, other=0.0).to(tl.float32)[None, :]


@kernel
def scan_gradient_kernel(
    amplitude,
    decay,
    gradient,
    summary,
    amplitude_gradient,
    decay_gradient,
    table,
    stride_h,
    blocks,
    heads,
    INCLUSIVE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    TERMS_PADDED: tl.constexpr,
):
    """Compute the part of the gradients of amplitudes and decays that is due to ``COLUMNS`` of the ``WIDTH`` summary entries.

    The entries are divided into parts of ``COLUMNS`` entries, one for each program. ``gradient`` (of the mixed summaries) and
    ``summary`` are ``[B * H, blocks, WIDTH]`` float32. ``amplitude_gradient`` and ``decay_gradient`` are
    ``[B * H, parts, TERMS]`` float32; the caller sums the parts. ``amplitude`` and ``decay`` are ``[H or 1, TERMS]`` float32.
    ``table`` gives the bounds of each block's sequence. With ``INCLUSIVE``, the mixture of a block includes the block itself.
    Grid: ``(B * H * parts,)``.
    """
    parts = tl.cdiv(WIDTH, COLUMNS)
    part, row = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    terms = tl.arange(0, TERMS_PADDED)
    a = tl.load(amplitude + (row % heads) * stride_h + terms, mask=terms < TERMS, other=0.0)
    fade = tl.exp(-tl.load(decay + (row % heads) * stride_h + terms, mask=terms < TERMS, other=0.0))
    state = tl.zeros([TERMS_PADDED, COLUMNS], tl.float32)
    slope = tl.zeros([TERMS_PADDED, COLUMNS], tl.float32)
    # one sum for each entry, added up after the loop: a reduction over threads in each step would take longer than its loads
    da = tl.zeros([TERMS_PADDED, COLUMNS], tl.float32)
    dl = tl.zeros([TERMS_PADDED, COLUMNS], tl.float32)
    gradient += row * blocks * WIDTH
    summary += row * blocks * WIDTH
    for i in range(0, blocks):
        offset = tl.cast(i, tl.int64) * WIDTH + columns
        new = tl.load(table + FIRST * blocks + i) == i
        # slope is Q(i) and state is P(i - 1), which Q(i) needs: update slope first
        slope = tl.where(new, 0.0, (slope + state) * fade[:, None])
        state = tl.where(new, 0.0, state * fade[:, None])
        if INCLUSIVE:  # at distance 0, where the decay has no effect
            state += tl.load(summary + offset, mask=inside, other=0.0)[None, :]
        r = tl.load(gradient + offset, mask=inside, other=0.0)
        da += state * r[None, :]
        dl += slope * r[None, :]
        if not INCLUSIVE:
            state += tl.load(summary + offset, mask=inside, other=0.0)[None, :]
    share = (row * parts + part) * TERMS + terms
    tl.store(amplitude_gradient + share, tl.sum(da, 1), mask=terms < TERMS)
    tl.store(decay_gradient + share, -a * tl.sum(dl, 1), mask=terms < TERMS)


class ExponentialMixer:
    """Launcher of the Triton kernels that mix block summaries causally, with coefficients that decay exponentially.

    A coefficient is a sum of R exponentials of the distance between two blocks. The amplitudes and decays of the exponentials
    are ``[H, R]``, or ``[1, R]`` if all H heads share them.
    """

    def mix(self, call: Call, summary: Tensor, transposed: bool = False) -> Tensor:
        """Mix block summaries by running sums over the earlier blocks and, in block-causal attention, the block itself.

        Args:
            call: arguments of the attention operator, which include amplitudes and decays.
            summary: summaries of M blocks with W numbers each, ``[B * H, M, W]`` float32.
            transposed: whether to sum over the later blocks instead, as the backward pass does.

        Returns:
            Mixed summaries, ``[B * H, M, W]`` float32.
        """
        amplitude, decay = call.coefficients
        mixed = torch.empty_like(summary)
        (_, blocks, width), terms = summary.shape, amplitude.shape[-1]
        tiles = config.scan_tiles(terms)
        scan_kernel[(call.rows * triton.cdiv(width, tiles.columns),)](
            amplitude, decay, summary, mixed, call.tables.table, _head_stride(amplitude), blocks, call.heads,
            REVERSE=transposed, INCLUSIVE=call.block_causal, WIDTH=width, COLUMNS=tiles.columns,
            TERMS=terms, TERMS_PADDED=tiles.terms, **call.schedule(tiles),
        )  # fmt: skip
        return mixed

    def mixing(self, coefficients: list[Tensor]) -> Mixing:
        """Convert the two elements of ``coefficients``, amplitudes and decays, to :class:`ExponentialMixing`.

        The PyTorch algorithms take objects of this class.
        """
        amplitude, decay = (x if len(x) > 1 else x[0] for x in coefficients)
        return ExponentialMixing(amplitude, decay)

    def pairs(self, call: Call) -> tuple[Tensor, int, int, int]:
        """Return the coefficients m[i, i] of pairs of tokens in the same block i, ``[1]`` or ``[H]``, and their strides.

        The three strides are along heads, query blocks and key blocks. The last two are 0, because m[i, i] is the same for all
        blocks of a head. The first is also 0 if all heads share the coefficients.
        """
        diagonal = call.coefficients[0].sum(-1)
        return diagonal, int(len(diagonal) > 1), 0, 0  # strides of 0 repeat it for all pairs of blocks

    def gradients(self, call: Call, d_mixed: Tensor, summary: Tensor) -> list[Tensor]:
        """Compute the gradients of the amplitudes and decays with which block summaries are mixed.

        Args:
            call: arguments of the attention operator, which include amplitudes and decays.
            d_mixed: gradient of the mixed summaries, ``[B * H, M, W]`` float32.
            summary: summaries of the M blocks with W numbers each, ``[B * H, M, W]`` float32.

        Returns:
            Two tensors ``[B * H, R]``, the gradients of the R amplitudes and of the R decays for each batch row and head.
        """
        amplitude, decay = call.coefficients
        (_, blocks, width), terms = summary.shape, amplitude.shape[-1]
        tiles = config.scan_tiles(terms, sums=4)
        parts = triton.cdiv(width, tiles.columns)
        of_amplitude, of_decay = (d_mixed.new_empty(call.rows, parts, terms) for _ in range(2))
        scan_gradient_kernel[(call.rows * parts,)](
            amplitude, decay, d_mixed, summary, of_amplitude, of_decay, call.tables.table, _head_stride(amplitude),
            blocks, call.heads, INCLUSIVE=call.block_causal, WIDTH=width, COLUMNS=tiles.columns,
            TERMS=terms, TERMS_PADDED=tiles.terms, **call.schedule(tiles),
        )  # fmt: skip
        return [of_amplitude.sum(1), of_decay.sum(1)]

    def add_own(self, call: Call, gradients: list[Tensor], diagonal_gradient: Tensor) -> None:
        """Add the gradients of the coefficients m[i, i] of pairs of tokens in the same block i to that of the amplitudes.

        Each m[i, i] is the sum of the amplitudes.

        Args:
            call: arguments of the attention operator.
            gradients: gradients of amplitudes and decays, ``[B * H, R]`` each; the first is changed in place.
            diagonal_gradient: gradient of m[i, i] for each block i, summed over pairs of tokens in the block,
                ``[B * H, blocks]`` float32.
        """
        gradients[0] += diagonal_gradient.sum(-1, keepdim=True)


def _head_stride(amplitude: Tensor) -> int:
    return amplitude.shape[-1] if amplitude.shape[0] > 1 else 0
