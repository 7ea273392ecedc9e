"""Parallel form of attention in PyTorch: products of all token pairs, times the mixing coefficient of their two blocks.

The number of operations grows with N squared. Two large matrix products take most of the time, which makes this form the
fastest one for up to a few hundred tokens.

Shape letters: B batch, H heads, N tokens (with the padding of blocks), M blocks, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhla_kernels.forms.later import hide_later
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting


def parallel(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, mixing: Tensor, weighting: Weighting) -> Tensor:
    """Compute attention from the products of all token pairs (the parallel form).

    Args:
        q_BHNK: queries, ``[B, H, N, K]``.
        k_BHNK: keys, ``[B, H, N, K]``.
        v_BHNV: values, ``[B, H, N, V]``.
        mixing: coefficients between M blocks of ``N / M`` tokens each, ``[M, M]`` or ``[H, M, M]``.
        weighting: causality and normalization of the attention weights.

    Returns:
        Outputs, ``[B, H, N, V]``.
    """
    scores, causal = q_BHNK @ k_BHNK.transpose(-1, -2), weighting.causal
    shape, blocks = scores.shape, mixing.shape[-1]
    slots = shape[-1] // blocks
    block = torch.arange(shape[-1], device=scores.device) // slots if causal == "block" else None
    if (
        causal == "block"
    ):  # hide them before the product too: zero times an overflowed score would be NaN in its gradient
        scores = hide_later(scores, causal, block)
    # a view by blocks: expanding the coefficients to N x N would cost another matrix of this size
    by_block = scores.view(shape[0], shape[1], blocks, slots, blocks, slots)
    scores = (by_block * mixing.unsqueeze(-1).unsqueeze(-3)).view(shape)
    if causal:
        scores = hide_later(scores, causal, block)
    out = scores @ v_BHNV
    if weighting.scale is not None:
        return out * weighting.scale
    return divide(out, scores.sum(-1, keepdim=True), weighting.eps)
