"""Building blocks of the Triton kernels: loading tokens, rounding, and products that keep float32 precision.

Triton's interpreter rounds float32 to bfloat16 toward zero, and multiplies the bit patterns of bfloat16 operands. This module
therefore spells out both operations for the interpreter. On a GPU it uses Triton's own.
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


TOKENS, BLOCKS = tl.constexpr(1), tl.constexpr(2)
"""Values of the constant ``CAUSAL`` of a kernel that hides later tokens, or later blocks; 0 hides nothing."""

SIZES = (
    "tokens",
    "column_tokens",
    "blocks",
    "column_blocks",
    "rows",
    "heads",
    "pieces",
    "piece_size",
    "tiles",
    "tiles_of_row",
    "table_size",
    "size",
    "column_size",
    "num_sequences",
)
"""Names of kernel parameters that hold sizes. A kernel is not compiled again if their values change."""


def kernel(function: Callable[..., Any]) -> Any:
    """Decorate a function as a Triton kernel that is compiled once for all sequence lengths.

    Triton does not specialize the kernel on the values of its sizes, which are the parameters in :data:`SIZES`, and of its
    strides, whose names contain ``stride_``. The stride of the features, ``NAME_stride_d``, is an exception: a value of 1
    allows wide loads. Callers divide the other strides of token tensors by a common divisor, and pass the divisor as
    a constant of the kernel, so that Triton knows the alignment of the rows.
    """
    lengths = [
        name
        for name in inspect.signature(function).parameters
        if name in SIZES or ("stride_" in name and not name.endswith("_stride_d"))
    ]
    return triton.jit(function, do_not_specialize=lengths)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round a float32 tensor to the nearest numbers of ``DTYPE``, ties to even."""
    # bfloat16 keeps the upper 16 bits. Adding 0x7FFF plus the lowest kept bit carries into the upper bits exactly if the number
    # has to be rounded up.
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc):
    """Compute ``acc + a @ b`` for operands of the same dtype, with float32 operands in full precision instead of TF32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def multiply(a, b, acc, INPUT: tl.constexpr):
    """Compute ``acc + a @ b`` for operands of dtype ``INPUT`` or float32, without rounding float32 operands to ``INPUT``.

    If ``INPUT`` is bfloat16, a float32 operand is split into the sum of a large and a small bfloat16 number, which together
    keep 16 bits of the significand. If both operands are split, the product of their small numbers is omitted.
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
    """Compute ``max(x, 0)``. NaN stays NaN, as in PyTorch, so that a diverging training run is noticed."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_tokens(base, rows, visible, columns, width, stride_n, stride_d, RELU: tl.constexpr):
    """Load the features with indices ``columns`` of the tokens with indices ``rows``.

    ``base`` is the address of feature 0 of token 0. ``stride_n`` is between tokens, and ``stride_d`` between features. Tokens
    for which ``visible`` is False and features from index ``width`` on are zero. With ``RELU``, the feature map (ReLU plus a
    small constant) is applied to all other entries.

    Returns:
        Features, ``[len(rows), len(columns)]``.
    """
    # 64-bit offsets: a tensor of tokens may have more than 2^31 elements
    mask = visible[:, None] & (columns < width)[None, :]
    x = tl.load(base + rows.to(tl.int64)[:, None] * stride_n + columns[None, :] * stride_d, mask=mask, other=0.0)
    if RELU:
        mapped = rectify(x.to(tl.float32)) + FEATURE_FLOOR
        x = round_to(tl.where(mask, mapped, 0.0), x.dtype)
    return x


@triton.jit
def load_visible(mask_base, rows, end, HAS_MASK: tl.constexpr):
    """Return a mask of the token indices ``rows``: True for tokens before ``end`` that no mask hides.

    With ``HAS_MASK``, the mask at address ``mask_base`` hides the tokens for which it is 0.
    """
    visible = rows < end
    if HAS_MASK:
        visible = visible & (tl.load(mask_base + rows, mask=visible, other=0) != 0)
    return visible
