"""The definition, written out: an N x N attention matrix. For tests and analysis; memory grows with N squared."""

from __future__ import annotations

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenBlocks
from mhla_kernels.normalizer import divide


def weights(
    q_BNHK: Tensor,
    k_BNHK: Tensor,
    mixing: Tensor,
    where: TokenBlocks,
    *,
    causal: bool,
    scale: float | None,
    eps: float,
) -> Tensor:
    """Attention weights ``[B, H, N, N]``: ``m[b(t), b(j)] * (q_t . k_j)``, zero where masked.

    Each row is divided by its sum + ``eps`` when ``scale`` is None (the normalised operator), else multiplied by ``scale``.
    """
    block = where.block
    products = torch.einsum("bthk,bjhk->bhtj", q_BNHK, k_BNHK)
    products = products * mixing[..., block[:, None], block[None, :]]
    if where.sequence is not None:
        products = products * (where.sequence[:, None] == where.sequence[None, :])
    if causal:
        products = products.tril()
    if scale is not None:
        return products * scale
    shares = divide(products, products.sum(-1, keepdim=True), eps)
    return shares.tril() if causal else shares  # no gradient from above the diagonal, even where it overflows


def attend(weights_BHNN: Tensor, v_BNHV: Tensor) -> Tensor:
    """``[B, N, H, Dv]``: every row of weights applied to the values."""
    return torch.einsum("bhtj,bjhv->bthv", weights_BHNN, v_BNHV)
