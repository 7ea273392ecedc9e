"""Reference form of attention: the ``N x N`` matrix of weights, by definition, for tests and analysis.

Memory grows with N squared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenBlocks
from mhla_kernels.forms.later import hide_later
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting


def weights(q_BNHK: Tensor, k_BNHK: Tensor, mixing: Tensor, where: TokenBlocks, weighting: Weighting) -> Tensor:
    """Compute the attention weights of all token pairs directly from their definition.

    The weight of query t and key j is ``m[b(t), b(j)] * (q_t . k_j)``, where b(t) is the block of token t. It is zero for
    tokens of different packed sequences and, with causality, for later keys. Then each row is divided by its sum +
    eps, or is multiplied by a scale, as ``weighting`` says.

    Args:
        q_BNHK: queries, ``[B, N, H, K]``.
        k_BNHK: keys, ``[B, N, H, K]``.
        mixing: coefficients m of M blocks, ``[M, M]`` or ``[H, M, M]``.
        where: index of the block and of the packed sequence that contain each token.
        weighting: causality and normalization of the weights.

    Returns:
        Weights, ``[B, H, N, N]``.
    """
    block, causal = where.block, weighting.causal
    products = torch.einsum("bthk,bjhk->bhtj", q_BNHK, k_BNHK)
    if (
        causal == "block"
    ):  # hide them before the product too: zero times an overflowed score would be NaN in its gradient
        products = hide_later(products, causal, where.order)
    products = products * mixing[..., block[:, None], block[None, :]]
    if where.sequence is not None:
        products = products * (where.sequence[:, None] == where.sequence[None, :])
    if causal:
        products = hide_later(products, causal, where.order)
    if weighting.scale is not None:
        return products * weighting.scale
    shares = divide(products, products.sum(-1, keepdim=True), weighting.eps)
    # hide them again: no gradient comes from later keys, even if it overflows
    return hide_later(shares, causal, where.order)


def attend(weights_BHNN: Tensor, v_BNHV: Tensor) -> Tensor:
    """Apply weights ``[B, H, N, N]`` to values ``[B, N, H, Dv]``, and return the outputs ``[B, N, H, Dv]``."""
    return torch.einsum("bhtj,bjhv->bthv", weights_BHNN, v_BNHV)
