"""Checked arguments of an attention call, as one object that all algorithms take.

Shape letters: B batch, N tokens, H heads, Hkv heads of keys and values, Dk and Dv widths of a key and of a value.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.features import FeatureMap, map_features
from mhla_kernels.mixing import Mixing

Causal = bool | Literal["block"]
"""Tokens that a token attends to: all of them (False), those up to itself (True), or the tokens of its own block and of all
blocks before it (``"block"``)."""


class Weighting(NamedTuple):
    """Options that turn products of queries and keys into attention weights: causality, and normalization or a scale.

    Attributes:
        causal: whether token t attends to tokens ``j <= t`` only; ``"block"`` if it attends to all tokens of its own block and
            of the blocks before it.
        scale: factor on the outputs; None if each row of weights is divided by its sum + ``eps`` instead.
        eps: number that is added to the sum of each row of weights before dividing by it.
    """

    causal: Causal
    scale: float | None
    eps: float

    @property
    def normalize(self) -> bool:
        """Whether each row of attention weights is divided by its sum."""
        return self.scale is None


class Problem(NamedTuple):
    """Checked tensors and options of one attention call.

    Attributes:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, Hkv, Dk]``.
        v: values, ``[B, N, Hkv, Dv]``; the outputs get their dtype.
        mixing: mixing coefficients between blocks.
        layout: partition of the tokens into blocks.
        weighting: causality and normalization of the attention weights.
        feature_map: feature map that is still to be applied to q and k.
        key_mask: ``[B, N]`` bool, False for tokens that are still to be masked; None if no token is masked.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Mixing
    layout: TokenLayout
    weighting: Weighting
    feature_map: FeatureMap = "identity"
    key_mask: Tensor | None = None

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype in which sums are computed: float64 if q, k or v is float64, otherwise float32."""
        return dtype_of_sums(self.q, self.k, self.v)


def prepare(problem: Problem, features: bool = True) -> Problem:
    """Prepare checked arguments for the PyTorch algorithms, and return them as a new object.

    Keys and values are repeated for every query head. All tensors are converted to the dtype in which sums are computed. Masked
    tokens are set to zero.

    Args:
        problem: checked arguments.
        features: whether to apply the feature map. If False, the result names the map, and the algorithm applies it later. With
            a key mask, the map is applied here in either case, because masked tokens must be zero after it.
    """
    mask, here = problem.key_mask, features or problem.key_mask is not None
    applied: FeatureMap = problem.feature_map if here else "identity"
    remaining: FeatureMap = "identity" if here else problem.feature_map
    q, k, v = prepare_tokens(problem.q, problem.k, problem.v, applied, mask, mask)
    return Problem(q, k, v, problem.mixing.to(q.dtype), problem.layout, problem.weighting, remaining)


def prepare_tokens(
    q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare queries, keys and values for the PyTorch algorithms.

    Keys and values are repeated for every query head. All three are converted to the dtype in which sums are computed. The
    feature map is applied, and masked tokens are set to zero.

    Args:
        q: queries, ``[B, N, H, Dk]``; in cross-attention, ``[B, Nq, H, Dk]``.
        k: keys, ``[B, N, Hkv, Dk]``; in cross-attention, ``[B, Nk, Hkv, Dk]``.
        v: values, ``[B, N, Hkv, Dv]``; in cross-attention, ``[B, Nk, Hkv, Dv]``.
        feature_map: ``"identity"``, or ``"relu"`` for ``relu(x) + 1e-6``.
        query_mask: bool mask of the queries, False for masked ones, ``[B, N]`` or ``[B, Nq]``; None masks no query.
        key_mask: bool mask of keys and values, False for masked ones, ``[B, N]`` or ``[B, Nk]``; None masks none.

    Returns:
        Queries, keys and values with H heads each, in float32 (float64 if one of the tensors is float64).
    """
    dtype = dtype_of_sums(q, k, v)
    k, v = repeat_heads(q, k, v)
    q, k, v = (x if x.dtype == dtype else x.to(dtype) for x in (q, k, v))
    return map_features(q, k, v, feature_map, query_mask, key_mask)


def dtype_of_sums(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which sums over tensors are computed: float64 if one of them is float64, else float32."""
    return torch.float64 if torch.float64 in [x.dtype for x in tensors] else torch.float32


def default_scale(width: int) -> float:
    """Return the default factor on products of queries and keys with ``width`` features, ``width ** -0.5``.

    Without features, all products are zero, and the factor is 1.
    """
    return max(1, width) ** -0.5


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for every query head: with Hkv key heads, query head h uses key head ``h // (H / Hkv)``.

    Args:
        q: queries, ``[B, N, H, Dk]``, which give the number of heads.
        k: keys, ``[B, N, Hkv, Dk]``.
        v: values, ``[B, N, Hkv, Dv]``.

    Returns:
        Keys ``[B, N, H, Dk]`` and values ``[B, N, H, Dv]``.
    """
    # A call without heads is valid and has empty outputs, so H and Hkv may both be 0.
    repeats = q.shape[2] // max(1, k.shape[2])
    return repeat(k, repeats, 2), repeat(v, repeats, 2)


def repeat(x: Tensor, repeats: int, axis: int) -> Tensor:
    """Repeat every entry of ``x`` along ``axis``, with ``repeats`` adjacent copies. Return ``x`` itself for one copy."""
    return x.repeat_interleave(repeats, axis) if repeats > 1 else x


def nothing(problem: Problem, *others: Tensor | None) -> Tensor:
    """Return zero outputs ``[B, N, H, Dv]`` for an attention call without batch rows, tokens, heads or features.

    The outputs depend on all input tensors, so that autograd gives each of them a gradient of zeros.

    Args:
        problem: checked arguments of the call.
        others: further tensors that get a gradient of zeros; None for each one that the caller did not pass.
    """
    tensors = [x for x in others if x is not None]
    return zero_outputs(problem.q, problem.k, problem.v, *tensors, *problem.mixing.tensors.values())


def zero_outputs(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    """Return zero outputs ``[B, N, H, Dv]`` that depend on all given tensors, so that each of them gets a gradient of zeros.

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, of any shape.
        v: values, ``[..., Dv]``; the outputs get their dtype.
        others: further tensors that get a gradient of zeros.
    """
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=v.dtype)
    for x in (q, k, v, *others):
        # the empty sum ties x to the output: DDP waits for a gradient of every parameter
        out = out + x.flatten()[:0].sum().to(v.dtype)
    return out
