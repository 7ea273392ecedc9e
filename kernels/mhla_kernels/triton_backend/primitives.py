"""Building blocks of every kernel: loading tokens, rounding, and products that keep float32 precision.

Triton's interpreter rounds float32 to bfloat16 towards zero and multiplies the bit patterns of bfloat16 operands, so
both are spelt out for it here; on a GPU the plain operations are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton import knobs

from mhla_kernels.features import FEATURE_MAP_FLOOR

FEATURE_FLOOR = tl.constexpr(FEATURE_MAP_FLOOR)

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether the kernels of this process run in Triton's interpreter."""


SIZES = (
    "tokens",
    "blocks",
    "rows",
    "heads",
    "pieces",
    "piece_size",
    "tiles",
    "tiles_of_row",
    "table_size",
    "size",
    "num_sequences",
)


def kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit``, compiled once for all lengths: sizes and strides are not specialised, but for that of the features.

    (There a stride of 1 decides between wide and narrow loads. The others come in units of what they are multiples of.)
    """
    lengths = [
        name
        for name in inspect.signature(function).parameters
        if name in SIZES or ("stride_" in name and not name.endswith("_stride_d"))
    ]
    return triton.jit(function, do_not_specialize=lengths)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Float32 ``x`` in ``DTYPE``, to the nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` for operands of one dtype; IEEE products for float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def multiply(a, b, acc, INPUT: tl.constexpr):
    """``acc + a @ b``, operands in ``INPUT`` or float32, to float32 precision.

    With bfloat16 inputs a float32 operand enters the matrix unit as two bfloat16 pieces (16 bits of significand); the
    product of the two small pieces is left out.
    """
    if tl.float32 == INPUT:
        acc = dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float32 and b.dtype == tl.float32:
        a_high, b_high = round_to(a, INPUT), round_to(b, INPUT)
        acc = dot(round_to(a - a_high.to(tl.float32), INPUT), b_high, acc)
        acc = dot(a_high, round_to(b - b_high.to(tl.float32), INPUT), acc)
        acc = dot(a_high, b_high, acc)
    elif a.dtype == tl.float32:
        a_high = round_to(a, INPUT)
        acc = dot(round_to(a - a_high.to(tl.float32), INPUT), b, acc)
        acc = dot(a_high, b, acc)
    elif b.dtype == tl.float32:
        b_high = round_to(b, INPUT)
        acc = dot(a, round_to(b - b_high.to(tl.float32), INPUT), acc)
        acc = dot(a, b_high, acc)
    else:
        acc = dot(a, b, acc)
    return acc


@triton.jit
def rectify(x):
    """``max(x, 0)``; NaN stays, as in PyTorch, so that a run that diverges is seen to."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_tokens(base, rows, visible, columns, width, stride_n, stride_d, RELU: tl.constexpr):
    """``[len(rows), len(columns)]`` of a token tensor, zero where not ``visible``, mapped if ``RELU``."""
    mask = visible[:, None] & (columns < width)[None, :]
    x = tl.load(base + rows.to(tl.int64)[:, None] * stride_n + columns[None, :] * stride_d, mask=mask, other=0.0)
    if RELU:
        mapped = rectify(x.to(tl.float32)) + FEATURE_FLOOR
        x = round_to(tl.where(mask, mapped, 0.0), x.dtype)
    return x


@triton.jit
def load_visible(mask_base, rows, end, HAS_MASK: tl.constexpr):
    """Which of ``rows`` are tokens before ``end`` that the key mask shows."""
    visible = rows < end
    if HAS_MASK:
        visible = visible & (tl.load(mask_base + rows, mask=visible, other=0) != 0)
    return visible
