"""Checks of the arguments of the attention operator.

:func:`check_problem` returns the checked arguments as one object. Every error message names the invalid value and the remedy.
"""

# Longer than other modules because it contains all checks of a call, in the order in which they are made.

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenLayout, are_readable
from mhla_kernels.features import FeatureMap
from mhla_kernels.mixing import Mixing, MixingLike, as_mixing
from mhla_kernels.problem import Causal, Problem, Weighting, default_scale
from mhla_kernels.torch_private import assert_async, has_values, is_mapped, unwrapped

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
    # 0, 1 and NumPy's booleans pass the check above, but later code compares by `is True`.
    causal = "block" if causal == "block" else bool(causal)
    mixing = as_mixing(mixing)
    block_size = None if block_size is None else check_block_size(block_size)
    check_tensors(q, k, v)
    _check_mixing(mixing, q, bool(causal))
    tokens = q.shape[1]
    weighting = check_weighting(q, causal, normalize, scale, eps, feature_map)
    if key_mask is not None:
        check_mask("key_mask", key_mask, q, "N")
    if (block_size is None) == (block_offsets is None):
        raise ValueError("give exactly one of block_size (equal blocks) and block_offsets (uneven blocks)")

    if block_offsets is not None:
        if causal is True:
            raise ValueError(
                "block_offsets is for bidirectional attention and causal='block'; causal blocks are equal: give block_size"
            )
        if cu_seqlens is not None:
            raise ValueError("block_offsets and cu_seqlens cannot be combined; packed sequences take block_size")
        layout = TokenLayout(tokens, 0, check_offsets(block_offsets, tokens))
    else:
        assert block_size is not None
        layout = TokenLayout(tokens, block_size)
    if cu_seqlens is None:
        _check_mixing_size(mixing, layout, causal, q)
    else:

        def check_sequence(tokens: int) -> None:
            # The mixing covers one sequence, not the row of all of them.
            _check_mixing_size(mixing, TokenLayout(tokens, layout.block_size), causal, q)

        layout = check_packed(layout, cu_seqlens, q.shape[0], mixing.blocks, bool(causal), check_sequence)

    if normalize and feature_map == "identity":
        check_features({"q": (q, key_mask), "k": (k, key_mask)}, NEGATIVE_FEATURES)
    return Problem(q, k, v, mixing, layout, weighting, feature_map, key_mask)


NEGATIVE_FEATURES = (
    "rows of weights cannot be divided by their sums. Pass feature_map='relu', map q and k to nonnegative features before the "
    "call, or pass normalize=False"
)


def check_weighting(
    q: Tensor, causal: Causal, normalize: bool, scale: float | None, eps: float, feature_map: FeatureMap
) -> Weighting:
    """Check the options that turn products of queries and keys into weights, and return them as one object.

    Args:
        q: queries, ``[B, N, H, Dk]``, whose width gives the default scale.
        causal: False, True or ``"block"``, as in :func:`mhla_kernels.mhla_attention`.
        normalize: whether each row of weights is divided by its sum.
        scale: factor on the output, only without ``normalize``; None for the default.
        eps: number that is added to the sum of a row of weights.
        feature_map: name of the feature map.

    Raises:
        TypeError: if ``scale`` or ``eps`` is a tensor that requires a gradient, which it would not get.
        ValueError: if an option is unknown, if ``scale`` is set together with ``normalize``, or if ``eps`` is not positive with
            ``normalize``.
    """
    for name, value in {"scale": scale, "eps": eps}.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise TypeError(
                f"{name} is a constant and gets no gradient; multiply the output by a learned factor instead"
            )
    if feature_map not in ("identity", "relu"):
        raise ValueError(f"feature_map={feature_map!r} is not one of 'identity', 'relu'; map q and k before the call")
    if normalize and scale is not None:
        raise ValueError(f"scale={scale} has no effect with normalize=True; pass normalize=False or leave scale out")
    if normalize and not eps > 0:
        raise ValueError(f"eps={eps} must be positive: the output of a row that sees no key is divided by it")
    if not normalize:
        scale = default_scale(q.shape[-1]) if scale is None else float(scale)
    return Weighting(causal, scale, eps)


def check_is_tensor(name: str, x: Any) -> None:
    """Raise TypeError unless ``x``, the argument with the given name, is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; it must be a tensor")


def check_are_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise TypeError unless queries, keys and values are tensors."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)


def check_mask(name: str, mask: Tensor, tokens: Tensor, letter: str) -> None:
    """Check the dtype and the shape of a token mask.

    Args:
        name: name of the mask, for the error message.
        mask: mask to check.
        tokens: tokens that the mask applies to, ``[B, N, H, D]``.
        letter: symbol for the number of tokens in the error message, such as ``"N"``.

    Raises:
        ValueError: if the mask is not bool, or is not ``[B, N]``.
        TypeError: if the mask is not a tensor.
    """
    check_is_tensor(name, mask)
    if mask.dtype != torch.bool or mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"{name} is {mask.dtype} {list(mask.shape)}; it must be bool [B, {letter}] = {list(tokens.shape[:2])}"
            f"{sdpa_order(tokens)}"
        )


SMALLEST_SHARE = 1e-5
"""Negative features up to this fraction of the largest feature count as rounding errors."""

_looked_at: set[torch.device] = set()
"""Accelerators on which a call has been checked for negative features. Later calls there are not checked."""


def check_features(features: dict[str, tuple[Tensor, Tensor | None]], way_out: str) -> None:
    """Check that the queries and keys have no negative features, apart from rounding errors.

    With negative features, the attention weights of a query may sum to nearly zero, which makes its output meaningless.
    Negative values count as rounding errors if their magnitude is at most 1e-5 times the largest feature.

    On a CPU, every call is checked. On each accelerator, only the first call of the process is checked, since reading a value
    waits for the device. Calls under ``torch.compile``, ``torch.export``, transformations of ``torch.func`` and CUDA graph
    capture are not checked.

    Args:
        features: for each tensor name, features ``[B, N, H, D]`` and their mask ``[B, N]`` bool. The mask is False for masked
            tokens, which may hold any value. It is None if no token is masked.
        way_out: advice on how to fix the call, placed at the end of the error message.

    Raises:
        ValueError: if a negative feature is not a rounding error; the message gives the name of its tensor and the smallest
            value.
    """
    tensors = [x for x, _ in features.values()]
    if not has_values(*tensors):
        return
    device = tensors[0].device
    # reading a value waits for the device, and breaks the capture of a CUDA graph
    if device in _looked_at or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    for name, (x, mask) in features.items():
        if not x.numel():
            return
        visible = x.detach() if mask is None else x.detach().masked_fill(~mask[..., None, None], 0)
        low = float(visible.amin())
        if low < 0 and low < -SMALLEST_SHARE * float(visible.amax()):
            raise ValueError(f"{name} holds negative features, {low:.3g} for example: {way_out}")
    if device.type != "cpu":
        _looked_at.add(device)


def check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q, k and v have four axes and a supported dtype.

    Raises:
        ValueError: if a tensor does not have four axes.
        TypeError: if one of them is not a tensor, or if a dtype is not float32, bfloat16 or float64.
    """
    check_are_tensors(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name} is {x.dtype}; use float32 or bfloat16 (float16 is not supported: sums over a block overflow)"
            )
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [B, N, H, D]")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q, k and v have supported dtypes and matching shapes for self-attention.

    The shapes must be ``[B, N, H, Dk]``, ``[B, N, Hkv, Dk]`` and ``[B, N, Hkv, Dv]``, where Hkv divides H.

    Raises:
        ValueError: if a shape does not fit the others.
        TypeError: if one of them is not a tensor, or if a dtype is not float32, bfloat16 or float64.
    """
    check_types(q, k, v)
    heads, shared = q.shape[2], k.shape[2]
    if (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]) or (heads != shared and (not shared or heads % shared)):
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} must be [B, N, H, Dk] and [B, N, Hkv, Dk], Hkv a divisor of H"
            + sdpa_order(q)
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v {list(v.shape)} must share B, N and heads with k {list(k.shape)}{sdpa_order(q)}")


def sdpa_order(q: Tensor) -> str:
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


def check_block_size(block_size: int, name: str = "block_size") -> int:
    """Return ``block_size`` as a Python integer; NumPy and torch integers are accepted.

    Args:
        block_size: number of tokens in a block.
        name: name of the argument, for the error message.

    Raises:
        ValueError: if ``block_size`` is not a positive integer.
    """
    size = as_index(block_size)
    if size is None or size < 1:
        raise ValueError(f"{name}={block_size!r} must be a positive integer, the number of tokens in a block")
    return size


def as_index(value: Any) -> int | None:
    """Convert a Python, NumPy or torch integer to a Python integer. Return None for booleans and all other values.

    Symbolic integers of a graph are returned unchanged.
    """
    if isinstance(value, int | torch.SymInt):
        return None if isinstance(value, bool) else value  # type: ignore[return-value]  # a symbol stands for an int
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
    tensors = {"k": problem.k, "v": problem.v, **problem.mixing.tensors, "key_mask": problem.key_mask}
    check_one_device(problem.q.device, tensors)


def check_one_device(device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    """Check that tensors are on the device of q.

    Args:
        device: device of q.
        tensors: tensors to check, by the names that the error message uses. None values are skipped.

    Raises:
        ValueError: if a tensor is on a different device; the message names both devices.
    """
    for name, x in tensors.items():
        if x is not None and x.device != device:
            hint = "; it was never given values (to_empty and load_state_dict do)" if x.is_meta else ""
            raise ValueError(f"{name} is on {str(x.device)!r}, but q is on {str(device)!r}{hint}")


def check_span(problem: Problem) -> None:
    """Check that the spanning form of attention supports a call.

    This algorithm processes chunks of several blocks, and connects the chunks by running sums. It needs blocks of equal size
    that form a sequence, not a 2-D or 3-D grid, and mixing coefficients with such sums, such as an ``ExponentialMixing``.

    Raises:
        ValueError: if the mixing coefficients do not support the spanning form, the blocks differ in size, or the number of
            tokens is symbolic.
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
        hint = sdpa_order(q) if mixing.heads not in (None, q.shape[2]) else ""
        raise ValueError(f"{error}{hint}") from None


def _check_mixing_size(mixing: Mixing, layout: TokenLayout, causal: Causal, q: Tensor) -> None:
    """Raise ValueError unless the number of blocks that the mixing coefficients cover fits the sequence.

    The coefficients must cover all blocks. Causal attention accepts coefficients for additional blocks. Bidirectional attention
    does not.

    Args:
        mixing: mixing coefficients between blocks.
        layout: partition of the tokens into blocks.
        causal: causality of the attention.
        q: queries, ``[B, N, H, Dk]``, which decide whether the error message mentions transposed axes.
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
            f"{sdpa_order(q)}"
        )
    fewer = f"at most N={size * block_size} tokens, block_size={-(-tokens // size)} or more"
    raise ValueError(
        f"{source} make {blocks} blocks, but mixing is for {size} at most: use {fewer if block_size else 'fewer blocks'}, "
        f"or extend mixing (mhla_kernels.extend_mixing){sdpa_order(q)}"
    )


def read_numbers(values: Tensor, name: str) -> list[Any]:
    """Return the values of a tensor as a list of Python numbers, nested if the tensor has several axes.

    Args:
        values: tensor to read.
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


def as_indices(values: Any, name: str) -> list[int] | None:
    """Convert a tensor or a sequence of integers to a list of Python integers; return None for any other value.

    Args:
        values: integers along one axis.
        name: name of the argument, for the error message.

    Raises:
        ValueError: if ``torch.vmap`` maps over a tensor, so that its values differ between the mapped calls.
    """
    if isinstance(values, Tensor):
        values = read_numbers(values, name)
    if not isinstance(values, Iterable):
        return None
    integers = []
    for value in values:
        integer = as_index(value)
        if integer is None:
            return None
        integers.append(integer)
    return integers


def check_integers(values: Tensor, name: str) -> None:
    """Check that a tensor holds integers along one axis. Its values are not read.

    Args:
        values: tensor to check.
        name: name of the tensor, for the error message.

    Raises:
        ValueError: if the tensor has several axes or none, or if its dtype is not an integer dtype.
    """
    if values.dim() != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(
            f"{name} must be a one-dimensional tensor of integers, got {values.dtype} {list(values.shape)}"
        )


def as_integers(values: Tensor | Sequence[int], name: str) -> tuple[int, ...]:
    """Convert a sequence or a tensor of at least two integers to a tuple of Python integers.

    Args:
        values: integers to convert.
        name: name of the argument, for the error message.

    Raises:
        ValueError: if a value is not an integer, if there are fewer than two values, or if ``torch.vmap`` maps over a tensor,
            so that its values differ between the mapped calls.
    """
    if isinstance(values, Tensor):
        check_integers(values, name)
    integers = as_indices(values, name)
    if integers is None or len(integers) < 2:
        raise ValueError(f"{name} must be at least two integers, got {reprlib.repr(values)}")
    return tuple(integers)


def _check_bounds(values: tuple[int, ...], tokens: int, name: str, least: int) -> None:
    steps = [b - a for a, b in pairwise(values)]
    if values[0] != 0 or values[-1] != tokens or min(steps) < least:
        order = "increase" if least else "not decrease"
        raise ValueError(f"{name} must start at 0, {order}, and end at N={tokens}; got {values[:8]} .. {values[-1]}")


def check_offsets(offsets: Tensor | Sequence[int], tokens: int, name: str = "block_offsets") -> tuple[int, ...]:
    """Check the offsets of uneven blocks, and return them as integers.

    Args:
        offsets: index of the first token of each block, followed by the number of tokens.
        tokens: number of tokens.
        name: name of the argument, for the error message.

    Raises:
        ValueError: if the offsets are not integers that increase from 0 to the number of tokens.
    """
    integers = as_integers(offsets, name)
    _check_bounds(integers, tokens, name, least=1)
    return integers


def check_packed(
    layout: TokenLayout,
    cu_seqlens: Tensor | Sequence[int],
    batch: int,
    size: int | None,
    may_be_shorter: bool,
    check_sequence: Callable[[int], None],
    name: str = "cu_seqlens",
) -> TokenLayout:
    """Check the bounds of packed sequences, and return the layout with these bounds.

    If the bounds are on an accelerator or are traced by torch, their values are checked later, on the device.

    Args:
        layout: layout of the tokens, in blocks of equal size.
        cu_seqlens: index of the first token of each sequence, followed by the number of tokens.
        batch: number of batch rows.
        size: number of blocks that the mixing covers; None for any number.
        may_be_shorter: whether a sequence may have fewer blocks than the mixing covers.
        check_sequence: function that takes a number of tokens, and raises ValueError unless the mixing covers a sequence of
            this length. It is called for each non-empty sequence whose bounds can be read.
        name: name of the argument, for the error message.

    Raises:
        ValueError: if the bounds are not integers that start at 0, never decrease, and end at the number of tokens; if the
            mixing does not cover a sequence; or if there is not exactly one batch row.
    """
    if batch != 1:
        raise ValueError(f"{name} packs sequences in one row, but B={batch}; use B=1, or key_mask for padded rows")
    tokens, block_size = layout.tokens, layout.block_size
    if not isinstance(cu_seqlens, Tensor) or are_readable(cu_seqlens):
        bounds = as_integers(cu_seqlens, name)
        _check_bounds(bounds, tokens, name, least=0)
        for start, end in pairwise(bounds):
            if end > start:
                check_sequence(end - start)
        return layout._replace(cu_seqlens=torch.tensor(bounds))
    check_integers(cu_seqlens, name)
    if len(cu_seqlens) < 2:
        raise ValueError(f"{name} must be at least two integers, got {list(cu_seqlens.shape)}")
    steps = cu_seqlens.diff()
    counts = (steps + block_size - 1) // block_size
    valid = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (steps >= 0).all()
    if size is not None:
        valid = valid & ((counts <= size) if may_be_shorter else (counts == size) | (counts == 0)).all()
    # without waiting for the device: the CPU does not know the bounds
    assert_async(valid, f"{name} must rise from 0 to N, and its sequences must fit the mixing")
    return layout._replace(cu_seqlens=cu_seqlens)
