"""Parallel form of attention in PyTorch: products of all token pairs, times the mixing coefficient of their two blocks.

The number of operations grows with N squared. Two large matrix products take most of the time, which makes this form the
fastest one for up to a few hundred tokens.

Shape letters: B batch, H heads, N tokens (with the padding of blocks), J tokens of the keys (N in self-attention), M blocks, K
key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhla_kernels.forms.later import hide_later
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting


def parallel(q_BHNK: Tensor, k_BHJK: Tensor, v_BHJV: Tensor, mixing: Tensor, weighting: Weighting) -> Tensor:
    """Compute attention from the products of all token pairs (the parallel form).

    Args:
        q_BHNK: queries, ``[B, H, N, K]``.
        k_BHJK: keys, ``[B, H, J, K]``.
        v_BHJV: values, ``[B, H, J, V]``.
        mixing: coefficients between Mq blocks of ``N / Mq`` queries and Mk blocks of ``J / Mk`` keys, ``[Mq, Mk]`` or ``[H, Mq,
            Mk]``.
        weighting: causality and normalization of the attention weights.

    Returns:
        Outputs, ``[B, H, N, V]``.
    """
    scores, causal = q_BHNK @ k_BHJK.transpose(-1, -2), weighting.causal
    shape, (rows, columns) = scores.shape, mixing.shape[-2:]
    block = torch.arange(shape[-1], device=scores.device) // (shape[-1] // columns) if causal == "block" else None
    if causal == "block":
        # hide later scores before the product too: an overflowed one times zero would make the gradient of mixing NaN
        scores = hide_later(scores, causal, block)
    # multiply a view by blocks: expanding the coefficients to N x J would take one more matrix of this size
    by_block = scores.view(shape[0], shape[1], rows, shape[2] // rows, columns, shape[3] // columns)
    scores = (by_block * mixing.unsqueeze(-1).unsqueeze(-3)).view(shape)
    if causal:
        scores = hide_later(scores, causal, block)
    out = scores @ v_BHJV
    if weighting.scale is not None:
        return out * weighting.scale
    return divide(out, scores.sum(-1, keepdim=True), weighting.eps)
