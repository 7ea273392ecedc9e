"""Feature map and rotary embedding in one pass over a token tensor, and the way back."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.triton_backend.primitives import FEATURE_FLOOR, kernel, round_to


@kernel
def rotary_kernel(
    x,
    raw,
    cos,
    sin,
    out,
    x_stride_b,
    x_stride_n,
    x_stride_h,
    x_stride_d,
    raw_stride_b,
    raw_stride_n,
    raw_stride_h,
    raw_stride_d,
    angle_stride_b,
    tokens,
    heads,
    rows,
    RELU: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``ROWS`` of the B * N * H rows; ``out`` is contiguous, ``cos`` and ``sin`` are ``[N, HALF]`` or ``[B, N, HALF]``.

    Backward: ``x`` is the gradient of the output and ``raw`` the input, whose sign decides what the rectifier lets through.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, HALF_PADDED)
    inside = (row < rows)[:, None] & (pair < HALF)[None, :]
    head, token, batch = row % heads, (row // heads) % tokens, row // heads // tokens
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    offset = (batch * x_stride_b + token * x_stride_n + head * x_stride_h)[:, None]
    a = tl.load(x + offset + first[None, :] * x_stride_d, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + offset + second[None, :] * x_stride_d, mask=inside, other=0.0).to(tl.float32)
    angle = (batch * angle_stride_b + token * HALF)[:, None] + pair[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if BACKWARD:
        new_a, new_b = a * c + b * s, b * c - a * s
        if RELU:
            offset = (batch * raw_stride_b + token * raw_stride_n + head * raw_stride_h)[:, None]
            raw_a = tl.load(raw + offset + first[None, :] * raw_stride_d, mask=inside, other=0.0).to(tl.float32)
            raw_b = tl.load(raw + offset + second[None, :] * raw_stride_d, mask=inside, other=0.0).to(tl.float32)
            new_a, new_b = tl.where(raw_a > 0, new_a, 0.0), tl.where(raw_b > 0, new_b, 0.0)
    else:
        if RELU:
            a, b = tl.maximum(a, 0.0) + FEATURE_FLOOR, tl.maximum(b, 0.0) + FEATURE_FLOOR
        new_a, new_b = a * c - b * s, b * c + a * s
    offset = row[:, None] * (2 * HALF)
    tl.store(out + offset + first[None, :], round_to(new_a, out.dtype.element_ty), mask=inside)
    tl.store(out + offset + second[None, :], round_to(new_b, out.dtype.element_ty), mask=inside)


def launch_rotary(
    x: Tensor, raw: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool, backward: bool
) -> Tensor:
    """See :func:`rotary_kernel`; ``[B, N, H, D]`` contiguous, in the dtype of ``raw``."""
    batch, tokens, heads, width = x.shape
    out = torch.empty(x.shape, dtype=raw.dtype, device=x.device)
    rows, half = batch * tokens * heads, width // 2
    if rows == 0:
        return out
    padded = 1 << (half - 1).bit_length()
    at_once = max(1, 2048 // padded)
    with torch.cuda.device_of(x):
        rotary_kernel[(triton.cdiv(rows, at_once),)](
            x, raw, cos, sin, out, *x.stride(), *raw.stride(), cos.stride(0) if cos.dim() == 3 else 0, tokens, heads, rows,
            RELU=relu, INTERLEAVED=interleaved, BACKWARD=backward, HALF=half, HALF_PADDED=padded, ROWS=at_once, num_warps=4,
        )  # fmt: skip
    return out


@torch.library.custom_op("mhla::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool) -> Tensor:
    """See :func:`mhla_kernels.rotary_features`; ``cos`` and ``sin`` contiguous float32."""
    return launch_rotary(x, x, cos, sin, relu, interleaved, backward=False)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mhla::rotary_backward", mutates_args=())
def rotary_backward(gradient: Tensor, x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool) -> Tensor:
    """Gradient of x; none for the angles."""
    return launch_rotary(gradient, x, cos, sin, relu, interleaved, backward=True)


@rotary_backward.register_fake
def _(gradient: Tensor, x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.relu, ctx.interleaved = inputs
    ctx.save_for_backward(x, cos, sin)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.mhla.rotary_backward(gradient, *ctx.saved_tensors, ctx.relu, ctx.interleaved)
    return dx, None, None, None, None


rotary.register_autograd(_backward, setup_context=_setup_context)
