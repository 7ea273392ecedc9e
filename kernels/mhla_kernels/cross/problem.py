"""Checked arguments of a cross-attention call, as one object that all algorithms take.

Shape letters: B batch, Nq queries, Nk keys, H heads, Hkv heads of keys and values, Dk and Dv widths of a key and of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhla_kernels.cross.layout import CrossLayout
from mhla_kernels.features import FEATURE_MAP_FLOOR, FeatureMap
from mhla_kernels.mixing import Mixing
from mhla_kernels.problem import Weighting, repeat_heads


class CrossProblem(NamedTuple):
    """Checked tensors and options of one cross-attention call.

    Attributes:
        q: queries, ``[B, Nq, H, Dk]``.
        k: keys, ``[B, Nk, Hkv, Dk]``.
        v: values, ``[B, Nk, Hkv, Dv]``; the outputs get their dtype.
        mixing: mixing coefficients between query blocks and key blocks.
        layout: partition of the queries and of the keys into blocks.
        weighting: normalization of the attention weights.
        feature_map: feature map that is still to be applied to q and k.
        query_mask: ``[B, Nq]`` bool, False for queries that are still to be masked; None if no query is masked.
        key_mask: ``[B, Nk]`` bool, False for keys that are still to be masked; None if no key is masked.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Mixing
    layout: CrossLayout
    weighting: Weighting
    feature_map: FeatureMap = "identity"
    query_mask: Tensor | None = None
    key_mask: Tensor | None = None

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype in which sums are computed: float64 if q, k or v is float64, otherwise float32."""
        return torch.float64 if torch.float64 in (self.q.dtype, self.k.dtype, self.v.dtype) else torch.float32


def prepare_cross(problem: CrossProblem) -> CrossProblem:
    """Prepare checked arguments for the PyTorch algorithms, and return them as a new object.

    Keys and values are repeated for every query head. All tensors are converted to the dtype in which sums are computed. The
    feature map is applied, and masked queries, keys and values are set to zero. The query mask stays in the result.
    """
    dtype = problem.accumulate
    k, v = repeat_heads(problem.q, problem.k, problem.v)
    q, k, v = (x if x.dtype == dtype else x.to(dtype) for x in (problem.q, k, v))
    if problem.feature_map == "relu":
        q, k = q.relu() + FEATURE_MAP_FLOOR, k.relu() + FEATURE_MAP_FLOOR
    # not a product with the mask: zero times NaN would be NaN
    q, k, v = hide(q, problem.query_mask), hide(k, problem.key_mask), hide(v, problem.key_mask)
    mixing = problem.mixing.to(dtype)
    return CrossProblem(q, k, v, mixing, problem.layout, problem.weighting, query_mask=problem.query_mask)


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set masked tokens to zero.

    Args:
        x: tokens, ``[B, N, H, D]``.
        mask: ``[B, N]`` bool, False for masked tokens, which may hold any value; None masks no token.
    """
    return x if mask is None else x.masked_fill(~mask[..., None, None], 0)
