"""Checked arguments of a cross-attention call, as one object that all algorithms take.

Shape letters: B batch, Nq queries, Nk keys, H heads, Hkv heads of keys and values, Dk and Dv widths of a key and of a value.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mhla_kernels.cross.layout import CrossLayout
from mhla_kernels.features import FeatureMap
from mhla_kernels.mixing import Mixing
from mhla_kernels.problem import Weighting, prepare_tokens


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


def prepare_cross(problem: CrossProblem) -> CrossProblem:
    """Prepare checked arguments for the PyTorch algorithms, and return them as a new object.

    Keys and values are repeated for every query head. All tensors are converted to the dtype in which sums are computed. The
    feature map is applied, and masked queries, keys and values are set to zero. The result keeps the query mask, but
    not the key mask.
    """
    masks = problem.query_mask, problem.key_mask
    q, k, v = prepare_tokens(problem.q, problem.k, problem.v, problem.feature_map, *masks)
    mixing = problem.mixing.to(q.dtype)
    return CrossProblem(q, k, v, mixing, problem.layout, problem.weighting, query_mask=problem.query_mask)
