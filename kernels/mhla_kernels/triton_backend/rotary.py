"""Triton kernel for rotary position embedding of queries or keys, after an optional feature map, and its backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.features import turn
from mhla_kernels.triton_backend.call import alignment, strides
from mhla_kernels.triton_backend.fallback import differentiate
from mhla_kernels.triton_backend.primitives import FEATURE_FLOOR, kernel, rectify, round_to
from mhla_kernels.triton_backend.trial import compare_passes, random_numbers
from mhla_kernels.verdicts import guarded, may_use


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
    ALIGNED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Apply rotary position embedding to ``ROWS`` rows of a tensor, or compute the gradient of these rows.

    A row holds the features of one token and head. With ``RELU``, the feature map ``relu(x) + 1e-6`` is applied first. With
    ``INTERLEAVED``, features 2i and 2i + 1 are rotated as a pair, otherwise features i and ``i + HALF``.

    In the forward pass, ``x`` is the input. With ``BACKWARD``, ``x`` is the gradient of the output, and ``raw`` is the input,
    whose sign decides where the ReLU passes the gradient. The result is written to ``out``, which is contiguous. ``cos`` and
    ``sin`` are contiguous float32 tensors, ``[N, HALF]`` with ``angle_stride_b`` = 0 or ``[B, N, HALF]`` with
    ``angle_stride_b`` = N.
    """
    # Rows are in the order of a contiguous [B, N, H]; all heads of a token share its angles.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, HALF_PADDED)
    inside = (row < rows)[:, None] & (pair < HALF)[None, :]
    head, token, batch = row % heads, (row // heads) % tokens, row // heads // tokens
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    offset = (batch * x_stride_b + token * x_stride_n + head * x_stride_h)[:, None] * ALIGNED
    a = tl.load(x + offset + first[None, :] * x_stride_d, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + offset + second[None, :] * x_stride_d, mask=inside, other=0.0).to(tl.float32)
    angle = ((batch * angle_stride_b + token) * HALF)[:, None] + pair[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if BACKWARD:  # the gradient of a rotation is the rotation by the opposite angle
        new_a, new_b = a * c + b * s, b * c - a * s
        if RELU:
            offset = (batch * raw_stride_b + token * raw_stride_n + head * raw_stride_h)[:, None] * ALIGNED
            raw_a = tl.load(raw + offset + first[None, :] * raw_stride_d, mask=inside, other=0.0).to(tl.float32)
            raw_b = tl.load(raw + offset + second[None, :] * raw_stride_d, mask=inside, other=0.0).to(tl.float32)
            new_a, new_b = tl.where(raw_a > 0, new_a, 0.0), tl.where(raw_b > 0, new_b, 0.0)
    else:
        if RELU:
            a, b = rectify(a) + FEATURE_FLOOR, rectify(b) + FEATURE_FLOOR
        new_a, new_b = a * c - b * s, b * c + a * s
    offset = row[:, None] * (2 * HALF)
    tl.store(out + offset + first[None, :], round_to(new_a, out.dtype.element_ty), mask=inside)
    tl.store(out + offset + second[None, :], round_to(new_b, out.dtype.element_ty), mask=inside)


def launch_rotary(
    x: Tensor, raw: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool, backward: bool
) -> Tensor:
    """Apply rotary position embedding, after an optional feature map, with Triton, or compute the gradient of the input.

    Args:
        x: queries or keys, ``[B, N, H, D]``; with ``backward``, the gradient of the output.
        raw: input of the forward pass, queries or keys, ``[B, N, H, D]``; without ``backward``, the same tensor as ``x``.
        cos: cosine of the angles, ``[N, D / 2]`` or ``[B, N, D / 2]`` float32, contiguous.
        sin: sine of the angles, in the same shape.
        relu: whether to apply the feature map ``relu(x) + 1e-6`` first.
        interleaved: whether features 2i and 2i + 1 are a pair, instead of i and i + D / 2.
        backward: whether to compute the gradient of the input.

    Returns:
        Rotated queries or keys, or the gradient, ``[B, N, H, D]``, contiguous, in the dtype of ``raw``.
    """
    batch, tokens, heads, width = x.shape
    out = torch.empty(x.shape, dtype=raw.dtype, device=x.device)
    rows, half = batch * tokens * heads, width // 2
    if rows == 0:
        return out
    padded = 1 << (half - 1).bit_length()
    at_once, aligned = max(1, 1024 // padded), alignment(x, raw)
    with torch.cuda.device_of(x):
        rotary_kernel[(triton.cdiv(rows, at_once),)](
            x, raw, cos, sin, out, *strides(aligned, x, raw), tokens if cos.dim() == 3 else 0, tokens, heads, rows,
            RELU=relu, INTERLEAVED=interleaved, ALIGNED=aligned, BACKWARD=backward, HALF=half, HALF_PADDED=padded,
            ROWS=at_once, num_warps=4,
        )  # fmt: skip
    return out


@torch.library.custom_op("mhla::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool, guard: str) -> Tensor:
    """Apply rotary position embedding, after an optional feature map, with a Triton kernel.

    The function is registered as ``torch.ops.mhla.rotary``.

    Args:
        x: queries or keys, ``[B, N, H, D]``.
        cos: cosine of the angles, ``[N, D / 2]`` or ``[B, N, D / 2]`` float32, contiguous.
        sin: sine of the angles, in the same shape.
        relu: whether to apply the feature map ``relu(x) + 1e-6`` first.
        interleaved: whether features 2i and 2i + 1 are a pair, instead of i and i + D / 2.
        guard: name under which the kernel is disabled in this process if it fails; PyTorch then computes the result. If empty,
            errors are raised instead.

    Returns:
        Rotated queries or keys, ``[B, N, H, D]``, contiguous, in the dtype of ``x``.
    """
    out: Tensor = guarded(
        guard,
        x.device,
        lambda: launch_rotary(x, x, cos, sin, relu, interleaved, backward=False),
        lambda: turn(x, cos, sin, relu, interleaved).contiguous(),
    )
    return out


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool, guard: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mhla::rotary_backward", mutates_args=())
def rotary_backward(
    gradient: Tensor, x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool, guard: str
) -> Tensor:
    """Compute the gradient of the input ``x`` of :func:`rotary`, ``[B, N, H, D]`` contiguous; the angles get no gradient.

    Args:
        gradient: gradient of the output, ``[B, N, H, D]``.
        x: input of the forward pass, queries or keys, ``[B, N, H, D]``.
        cos: cosine of the angles, ``[N, D / 2]`` or ``[B, N, D / 2]`` float32, contiguous.
        sin: sine of the angles, in the same shape.
        relu: whether the feature map ``relu(x) + 1e-6`` was applied first.
        interleaved: whether features 2i and 2i + 1 are a pair, instead of i and i + D / 2.
        guard: name under which the kernel is disabled in this process if it fails; PyTorch then computes the result. If empty,
            errors are raised instead.
    """

    def instead() -> Tensor:
        (x_gradient,) = differentiate(lambda x: turn(x, cos, sin, relu, interleaved), [x], [True], gradient)
        assert x_gradient is not None
        return x_gradient.contiguous()

    out: Tensor = guarded(
        guard, x.device, lambda: launch_rotary(gradient, x, cos, sin, relu, interleaved, backward=True), instead
    )
    return out


@rotary_backward.register_fake
def _(gradient: Tensor, x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool, guard: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(x, cos, sin)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.mhla.rotary_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return dx, None, None, None, None, None


rotary.register_autograd(_backward, setup_context=_setup_context)


def turn_fused(
    x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool, only_if_sound: bool
) -> Tensor | None:
    """Apply rotary position embedding to queries or keys, after an optional feature map, with one Triton kernel.

    Args:
        x: queries or keys, ``[B, N, H, D]``, float32 or bfloat16.
        cos: cosine of the angles, ``[N, D / 2]`` or ``[B, N, D / 2]``, converted to float32.
        sin: sine of the angles, in the same shape, also converted.
        relu: whether to apply the feature map ``relu(x) + 1e-6`` first.
        interleaved: whether features 2i and 2i + 1 are a pair, instead of i and i + D / 2.
        only_if_sound: whether to compare the kernel with PyTorch before its first use, and to fall back to PyTorch if it fails
            later.

    Returns:
        Rotated queries or keys, ``[B, N, H, D]`` in the dtype of ``x``; None if ``only_if_sound`` is set and the kernel may not
        be used.
    """
    guard = ""
    if only_if_sound:
        dtype = "float32" if x.dtype is torch.float32 else "bfloat16"
        guard = sound_kernel(x.device.type, x.device.index, dtype, x.shape[-1], relu, interleaved)
        if not guard:
            return None
    out: Tensor = torch.ops.mhla.rotary(x, cos.float().contiguous(), sin.float().contiguous(), relu, interleaved, guard)
    return out


@torch.compiler.assume_constant_result
def sound_kernel(
    device_type: str, device_index: int | None, dtype: str, width: int, relu: bool, interleaved: bool
) -> str:
    """Return the name of the rotary kernel for these options; an empty string if it may not be used.

    Unless a result is stored, the kernel is first compared with PyTorch on random tokens (see :func:`may_use`). A kernel that
    disagrees with PyTorch, or that cannot be compared during the capture of a CUDA graph, may not be used.

    Args:
        device_type: type of the device, such as ``"cuda"``.
        device_index: index of the device; None for the current one.
        dtype: ``"float32"`` or ``"bfloat16"``.
        width: number of features of a query or key.
        relu: whether the kernel applies the feature map ``relu(x) + 1e-6``.
        interleaved: whether features 2i and 2i + 1 are a pair, instead of i and i + width / 2.
    """
    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    flags = [name for name, on in (("relu", relu), ("interleaved", interleaved)) if on]
    kind = "-".join(["rotary", dtype, str(width), *flags])
    trial = partial(try_rotary, getattr(torch, dtype), width, relu, interleaved, device)
    return kind if may_use(kind, str(device), trial) else ""


def try_rotary(dtype: torch.dtype, width: int, relu: bool, interleaved: bool, device: torch.device) -> str:
    """Run the rotary kernel forward and backward on random tokens, and compare the results with PyTorch in float64.

    Args:
        dtype: dtype of the tokens, float32 or bfloat16.
        width: number of features of a query or key.
        relu: whether the kernel applies the feature map ``relu(x) + 1e-6``.
        interleaved: whether features 2i and 2i + 1 are a pair, instead of i and i + width / 2.
        device: device to run on.

    Returns:
        Text with the relative errors of the output and of the gradient, which are within the bounds.

    Raises:
        WrongNumbersError: if a numerical error is larger than allowed for the dtype.
    """
    rand = random_numbers(device)
    x, angle = (rand(2, 45, 3, width) - 0.5).to(dtype), 6 * rand(45, width // 2)
    options = angle.cos(), angle.sin(), relu, interleaved
    return compare_passes(
        {"the input": x}, lambda x: torch.ops.mhla.rotary(x, *options, ""), lambda x: turn(x, *options)
    )
