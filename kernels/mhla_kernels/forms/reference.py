"""Reference form of attention: the ``N x J`` matrix of weights, by definition, for tests and analysis.

Memory grows with the number of queries N times the number of keys J. In self-attention, J is N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenBlocks
from mhla_kernels.forms.weights import expand_pairs, hide_later, weigh
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting


def weights(
    q_BNHK: Tensor,
    k_BJHK: Tensor,
    mixing: Tensor,
    weighting: Weighting,
    queries: TokenBlocks,
    keys: TokenBlocks,
) -> Tensor:
    """Compute the attention weights of N queries and J keys directly from their definition.

    The weight of query t and key j is ``m[b(t), b(j)] * (q_t . k_j)``, where b(t) is the block of token t. It is zero for
    tokens of different packed sequences and, in causal attention, for later keys (in block-causal attention, keys of later
    blocks). Then each row is divided by its sum + eps, or multiplied by a scale, depending on ``weighting``.

    Args:
        q_BNHK: queries, ``[B, N, H, K]``.
        k_BJHK: keys, ``[B, J, H, K]``.
        mixing: coefficients m of M blocks, ``[M, M]`` or ``[H, M, M]``; ``[Mq, Mk]`` or ``[H, Mq, Mk]`` in cross-attention.
        weighting: causality and normalization of the weights.
        queries: index of the block and of the packed sequence that contain each query.
        keys: index of the block and of the packed sequence that contain each key.

    Returns:
        Weights, ``[B, H, N, J]``.
    """
    causal = weighting.causal
    products = torch.einsum("bthk,bjhk->bhtj", q_BNHK, k_BJHK)
    products = weigh(products, expand_pairs(mixing, queries, keys), causal, queries, keys)
    if weighting.scale is not None:
        return products * weighting.scale
    shares = divide(products, products.sum(-1, keepdim=True), weighting.eps)
    # hide later keys again, so that no gradient reaches them, not even one that overflowed
    return hide_later(shares, causal, queries.order)


def attend(weights_BHNJ: Tensor, v_BJHV: Tensor) -> Tensor:
    """Apply weights ``[B, H, N, J]`` to values ``[B, J, H, Dv]``, and return the outputs ``[B, N, H, Dv]``."""
    return torch.einsum("bhtj,bjhv->bthv", weights_BHNJ, v_BJHV)
