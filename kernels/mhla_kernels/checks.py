"""Checks of the arguments of the attention operator.

:func:`check_problem` returns the checked arguments as one object. Every error message names the invalid value and the remedy.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.features import FeatureMap
from mhla_kernels.mixing import Mixing, MixingLike, as_mixing
from mhla_kernels.problem import Causal, Problem, Weighting
from mhla_kernels.torch_private import FakeTensor, assert_async, has_values, is_mapped, is_traced, unwrapped

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def check_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: MixingLike,
    *,
    block_size: int | None,
    block_offsets: Tensor | Sequence[int] | None = None,
    causal: Causal = False,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_map: FeatureMap = "identity",
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Problem:
    """Check the arguments of an attention call, and return them as one object.

    :func:`mhla_kernels.mhla_attention` documents the arguments and the errors. This function does not check that all tensors
    are on the same device; :func:`check_devices` does.
    """
    if causal not in (False, True, "block"):
        raise ValueError(f"causal={causal!r} is not one of False, True, 'block'")
    causal = "block" if causal == "block" else bool(causal)
    mixing = as_mixing(mixing)
    block_size = None if block_size is None else check_block_size(block_size)
    _check_tensors(q, k, v)
    _check_mixing(mixing, q, bool(causal))
    batch, tokens, _, width = q.shape
    if feature_map not in ("identity", "relu"):
        raise ValueError(f"feature_map={feature_map!r} is not one of 'identity', 'relu'; map q and k before the call")
    if normalize and scale is not None:
        raise ValueError(f"scale={scale} has no effect with normalize=True; pass normalize=False or leave scale out")
    if normalize and not eps > 0:
        raise ValueError(f"eps={eps} must be positive: the output of a row that sees no key is divided by it")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (batch, tokens)):
        raise ValueError(
            f"key_mask is {key_mask.dtype} {list(key_mask.shape)}; it must be bool [B, N] = [{batch}, {tokens}]"
            f"{_sdpa_order(q)}"
        )
    if (block_size is None) == (block_offsets is None):
        raise ValueError("give exactly one of block_size (equal blocks) and block_offsets (uneven blocks)")

    if block_offsets is not None:
        layout = TokenLayout(tokens, 0, _check_offsets(block_offsets, tokens, causal, cu_seqlens))
    else:
        assert block_size is not None
        layout = TokenLayout(tokens, block_size)
    if cu_seqlens is None:
        _check_mixing_size(mixing, layout, causal, q)
    else:
        layout = layout._replace(cu_seqlens=_check_cu_seqlens(cu_seqlens, q, mixing, layout, causal))

    if normalize and feature_map == "identity":
        check_features(
            {"q": q, "k": k},
            key_mask,
            "rows of weights cannot be divided by their sums. Pass feature_map='relu', map q and k to nonnegative features "
            "before the call, or pass normalize=False",
        )
    if not normalize:
        scale = width**-0.5 if scale is None else float(scale)
    return Problem(q, k, v, mixing, layout, Weighting(causal, scale, eps), feature_map, key_mask)


SMALLEST_SHARE = 1e-5
"""Negative features up to this fraction of the largest feature count as rounding errors."""

_looked_at: set[torch.device] = set()
"""Accelerators on which features were checked. Reading them waits for the device, so it is done once."""


def check_features(features: dict[str, Tensor], key_mask: Tensor | None, way_out: str) -> None:
    """Check that no feature of the queries and keys is negative, where the values can be read.

    With negative features, the attention weights of a query may sum to nearly zero, which makes its output meaningless.
    Negative values up to 1e-5 times the largest feature are accepted as rounding errors.

    On a CPU, every call is checked. On an accelerator, only the first call is checked, since reading a value waits for the
    device. Calls under ``torch.compile``, ``torch.export``, ``torch.vmap`` and CUDA graph capture are not checked.

    Args:
        features: features ``[B, N, H, D]`` by name.
        key_mask: ``[B, N]`` bool, False for masked tokens, which may hold any value; None if no token is masked.
        way_out: advice on how to fix the call, placed at the end of the error message.

    Raises:
        ValueError: if a feature is negative; the message gives the name of its tensor and the smallest value.
    """
    if not has_values(*features.values()):
        return
    device = next(iter(features.values())).device
    # reading a value waits for the device, and breaks the capture of a CUDA graph
    if device in _looked_at or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    for name, x in features.items():
        if not x.numel():
            return
        visible = x.detach() if key_mask is None else x.detach().masked_fill(~key_mask[..., None, None], 0)
        low = float(visible.amin())
        if low < 0 and low < -SMALLEST_SHARE * float(visible.amax()):
            raise ValueError(f"{name} holds negative features, {low:.3g} for example: {way_out}")
    if device.type != "cpu":
        _looked_at.add(device)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name} is {x.dtype}; use float32 or bfloat16 (float16 is not supported: sums over a block overflow)"
            )
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [B, N, H, D]")
    heads, shared = q.shape[2], k.shape[2]
    if (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]) or (heads != shared and (not shared or heads % shared)):
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} must be [B, N, H, Dk] and [B, N, Hkv, Dk], Hkv a divisor of H"
            + _sdpa_order(q)
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v {list(v.shape)} must share B, N and heads with k {list(k.shape)}{_sdpa_order(q)}")


def _sdpa_order(q: Tensor) -> str:
    """Return a hint for an error message if ``q`` looks transposed, else an empty string.

    If N is less than H in ``[B, N, H, D]``, the tensor may be in the order of ``scaled_dot_product_attention``,
    ``[B, H, N, D]``.
    """
    _, tokens, heads, _ = q.shape
    if tokens >= heads:
        return ""
    return (
        f". (q has N={tokens} tokens of H={heads} heads: tensors in scaled_dot_product_attention's order, [B, H, N, D], "
        "need transpose(1, 2) first)"
    )


def check_block_size(block_size: int) -> int:
    """Return ``block_size`` as a Python integer; NumPy and torch integers are accepted.

    Raises:
        ValueError: if ``block_size`` is not a positive integer.
    """
    size = as_index(block_size)
    if size is None or size < 1:
        raise ValueError(f"block_size={block_size!r} must be a positive integer, the number of tokens in a block")
    return size


def as_index(value: Any) -> int | None:
    """Convert a Python, NumPy or torch integer to a Python integer; return None for booleans and for any other value."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_devices(problem: Problem) -> None:
    """Check that all tensors of an attention call are on one device.

    Without this check, a tensor on the meta device would silently give a result without values.

    Raises:
        ValueError: if a tensor is not on the same device as q; the message names both devices.
    """
    device = problem.q.device
    tensors = ("k", problem.k), ("v", problem.v), *problem.mixing.tensors.items(), ("key_mask", problem.key_mask)
    for name, x in tensors:
        if x is not None and x.device != device:
            hint = "; it was never given values (to_empty and load_state_dict do)" if x.is_meta else ""
            raise ValueError(f"{name} is on {str(x.device)!r}, but q is on {str(device)!r}{hint}")


def check_span(problem: Problem) -> None:
    """Check that an attention call can be computed in chunks of several blocks that are connected by running sums.

    This algorithm is called the spanning form. It needs blocks of equal size that form a sequence, not a 2-D or 3-D grid, and
    mixing coefficients of the class ``ExponentialMixing``.

    Raises:
        ValueError: if the mixing coefficients are of a different kind, the blocks differ in size, or the number of tokens is
            symbolic.
    """
    mixing, layout = problem.mixing, problem.layout
    if mixing.span_terms(bool(problem.weighting.causal)) is None:
        raise ValueError(
            f"form='spanning' takes an ExponentialMixing without a grid, not {mixing}; use form='chunked' or 'auto'"
        )
    if layout.block_offsets is not None or layout.is_open:
        unsupported = "block_offsets" if layout.block_offsets is not None else "an open number of tokens"
        raise ValueError(f"form='spanning' takes blocks of equal size, not {unsupported}; use form='chunked' or 'auto'")


def _check_mixing(mixing: Mixing, q: Tensor, causal: bool) -> None:
    try:
        mixing.check(q.shape[2], causal)
    except ValueError as error:
        hint = _sdpa_order(q) if mixing.heads not in (None, q.shape[2]) else ""
        raise ValueError(f"{error}{hint}") from None


def _check_mixing_size(mixing: Mixing, layout: TokenLayout, causal: Causal, q: Tensor) -> None:
    """Raise ValueError unless the mixing coefficients cover all blocks.

    Causal attention accepts coefficients for more blocks than there are; bidirectional attention does not.
    """
    size = mixing.blocks
    if size is None:
        return
    blocks, tokens, block_size = layout.blocks, layout.tokens, layout.block_size
    if blocks == 0 or (size >= blocks and (causal or size == blocks)):
        return
    source = f"N={tokens} tokens with block_size={block_size}" if block_size else f"block_offsets for N={tokens} tokens"
    if not causal:
        raise ValueError(
            f"{source} make {blocks} blocks, but mixing is for {size}: bidirectional attention needs exactly "
            f"{blocks}; change the blocks, or resize mixing to the new block grid with mhla_kernels.resize_mixing"
            f"{_sdpa_order(q)}"
        )
    fewer = f"at most N={size * block_size} tokens, block_size={-(-tokens // size)} or more"
    raise ValueError(
        f"{source} make {blocks} blocks, but mixing is for {size} at most: use {fewer if block_size else 'fewer blocks'}, "
        f"or extend mixing (mhla_kernels.extend_mixing){_sdpa_order(q)}"
    )


def read_numbers(values: Tensor, name: str) -> list[Any]:
    """Return the values of an integer tensor as a list of Python integers.

    Args:
        values: integer tensor to read.
        name: name of the tensor, for the error message.

    Raises:
        ValueError: if ``torch.vmap`` maps over the tensor, so that its values differ between the mapped calls.
    """
    if not torch.compiler.is_compiling():
        if is_mapped(values):
            raise ValueError(
                f"{name} is mapped by torch.vmap, but must be the same for all: map it with None in in_dims, or use a loop"
            )
        values = unwrapped(values)
    numbers: list[Any] = values.tolist()
    return numbers


def _as_integers(values: Tensor | Sequence[int], name: str) -> tuple[int, ...]:
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.is_floating_point() or values.dtype == torch.bool:
            raise ValueError(
                f"{name} must be a one-dimensional tensor of integers, got {values.dtype} {list(values.shape)}"
            )
        values = read_numbers(values, name)
    integers = [as_index(value) for value in values]
    if len(integers) < 2 or any(value is None for value in integers):
        raise ValueError(f"{name} must be at least two integers, got {list(values)[:8]}")
    return tuple(value for value in integers if value is not None)


def _check_bounds(values: tuple[int, ...], tokens: int, name: str, least: int) -> None:
    steps = [b - a for a, b in pairwise(values)]
    if values[0] != 0 or values[-1] != tokens or min(steps) < least:
        order = "increase" if least else "not decrease"
        raise ValueError(f"{name} must start at 0, {order}, and end at N={tokens}; got {values[:8]} .. {values[-1]}")


def _check_offsets(
    block_offsets: Tensor | Sequence[int],
    tokens: int,
    causal: Causal,
    cu_seqlens: Tensor | Sequence[int] | None,
) -> tuple[int, ...]:
    if causal is True:
        raise ValueError(
            "block_offsets is for bidirectional attention and causal='block'; causal blocks are equal: give block_size"
        )
    if cu_seqlens is not None:
        raise ValueError("block_offsets and cu_seqlens cannot be combined; packed sequences take block_size")
    offsets = _as_integers(block_offsets, "block_offsets")
    _check_bounds(offsets, tokens, "block_offsets", least=1)
    return offsets


def _check_cu_seqlens(
    cu_seqlens: Tensor | Sequence[int], q: Tensor, mixing: Mixing, layout: TokenLayout, causal: Causal
) -> Tensor:
    batch, tokens, block_size = q.shape[0], layout.tokens, layout.block_size
    if batch != 1:
        raise ValueError(f"cu_seqlens packs sequences in one row, but B={batch}; use B=1, or key_mask for padded rows")
    size = mixing.blocks
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.is_cuda or is_traced() or isinstance(cu_seqlens, FakeTensor)):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
            raise ValueError(
                f"cu_seqlens must be at least two integers, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )
        steps = cu_seqlens.diff()
        counts = (steps + block_size - 1) // block_size
        valid = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (steps >= 0).all()
        if size is not None:
            valid = valid & ((counts <= size) if causal else (counts == size) | (counts == 0)).all()
        # without waiting for the device: the CPU does not know the bounds
        assert_async(valid, "cu_seqlens must rise from 0 to N, and its sequences must fit the mixing")
        return cu_seqlens
    bounds = _as_integers(cu_seqlens, "cu_seqlens")
    _check_bounds(bounds, tokens, "cu_seqlens", least=0)
    for start, end in pairwise(bounds):
        if end > start:
            _check_mixing_size(mixing, TokenLayout(end - start, block_size), causal, q)
    return torch.tensor(bounds)
