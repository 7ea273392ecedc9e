"""Mixing by running sums for exponential coefficients, causal: R states instead of a matrix of M squared.

    S~_i = sum_r a_r e^{-lambda_r} P_r(i - 1),     P_r(i) = e^{-lambda_r} P_r(i - 1) + S_i

and backwards in time for the gradient. With Q_r(i) = e^{-lambda_r} (Q_r(i - 1) + P_r(i - 1)), the sum of
(i - b) e^{-lambda_r (i - b)} S_b over earlier b, the gradients are

    da_r = sum_i <R_i, e^{-lambda_r} P_r(i - 1)>,     dlambda_r = -a_r sum_i <R_i, Q_r(i)>
"""

from __future__ import annotations

import triton.language as tl

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
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    TERMS_PADDED: tl.constexpr,
):
    """``mixed[i]``: the sum over earlier blocks (later ones if ``REVERSE``) of i's sequence.

    Grid: (B * H * column parts). ``summary`` and ``mixed``: ``[B * H, blocks, WIDTH]``; ``amplitude`` and ``decay``:
    ``[H or 1, TERMS]`` float32.
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
        place = tl.cast(i, tl.int64) * WIDTH + columns
        if REVERSE:
            new = tl.load(table + LAST * blocks + i) == i + 1
        else:
            new = tl.load(table + FIRST * blocks + i) == i
        state = tl.where(new, 0.0, state * fade[:, None])
        out = tl.sum(a[:, None] * state, 0)
        tl.store(mixed + place, round_to(out, mixed.dtype.element_ty), mask=inside)
        state += tl.load(summary + place, mask=inside, other=0.0).to(tl.float32)[None, :]


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
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    TERMS_PADDED: tl.constexpr,
):
    """This part's share of the gradients of ``amplitude`` and ``decay``, ``[B * H, parts, TERMS]`` float32.

    Grid: (B * H * column parts). ``gradient`` (of the mixed summaries) and ``summary``: ``[B * H, blocks, WIDTH]`` float32.
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
    da = tl.zeros([TERMS_PADDED], tl.float32)
    dl = tl.zeros([TERMS_PADDED], tl.float32)
    gradient += row * blocks * WIDTH
    summary += row * blocks * WIDTH
    for i in range(0, blocks):
        place = tl.cast(i, tl.int64) * WIDTH + columns
        new = tl.load(table + FIRST * blocks + i) == i
        slope = tl.where(new, 0.0, (slope + state) * fade[:, None])
        state = tl.where(new, 0.0, state * fade[:, None])
        r = tl.load(gradient + place, mask=inside, other=0.0)
        da += tl.sum(state * r[None, :], 1)
        dl += tl.sum(slope * r[None, :], 1)
        state += tl.load(summary + place, mask=inside, other=0.0)[None, :]
    share = (row * parts + part) * TERMS + terms
    tl.store(amplitude_gradient + share, da, mask=terms < TERMS)
    tl.store(decay_gradient + share, -a * dl, mask=terms < TERMS)
