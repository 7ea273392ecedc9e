"""Parallel form of attention in PyTorch: products of all token pairs, times the mixing coefficient of their two blocks.

The number of operations grows with N squared. Two large matrix products take most of the time, which makes this form the
fastest one for up to a few hundred tokens. Tokens stay where they are: the coefficients are expanded to pairs of tokens, once
for all batch rows, instead of moving the tokens of each row into blocks.

Shape letters: B batch, H heads, N queries, J keys (N in self-attention), M blocks, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenBlocks
from mhla_kernels.forms.later import hide_later
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting

PART = 2 * 2**20
"""Bytes of scores that are held at once on a CPU, which fit into the cache of one of its cores."""


def parallel(
    q_BNHK: Tensor,
    k_BJHK: Tensor,
    v_BJHV: Tensor,
    mixing: Tensor,
    weighting: Weighting,
    queries: TokenBlocks,
    keys: TokenBlocks,
) -> Tensor:
    """Compute attention from the products of all token pairs (the parallel form).

    On a CPU, as many batch rows at a time are computed as have at most :data:`PART` bytes of scores.

    Args:
        q_BNHK: queries, ``[B, N, H, K]``.
        k_BJHK: keys, ``[B, J, H, K]``.
        v_BJHV: values, ``[B, J, H, V]``.
        mixing: coefficients between Mq blocks of queries and Mk blocks of keys, ``[Mq, Mk]`` or ``[H, Mq, Mk]``.
        weighting: causality and normalization of the attention weights.
        queries: index of the block and of the packed sequence that contain each query.
        keys: the same for each key.

    Returns:
        Outputs, ``[B, N, H, V]``.
    """
    # one axis after the other: the gradient of a selection of pairs would be added up pair by pair
    pairs_NJ = mixing.index_select(-2, queries.block).index_select(-1, keys.block)
    if queries.sequence is not None and keys.sequence is not None:
        pairs_NJ = pairs_NJ * (queries.sequence[:, None] == keys.sequence)
    order = queries.order if weighting.causal == "block" else None
    batch, rows, heads, _ = q_BNHK.shape
    if q_BNHK.device.type != "cpu" or torch.compiler.is_compiling() or batch == 1:
        return _attend(q_BNHK, k_BJHK, v_BJHV, pairs_NJ, weighting, order)
    count = max(1, PART // max(1, heads * rows * k_BJHK.shape[1] * q_BNHK.element_size()))
    parts = zip(q_BNHK.split(count), k_BJHK.split(count), v_BJHV.split(count), strict=True)
    return torch.cat([_attend(q, k, v, pairs_NJ, weighting, order) for q, k, v in parts])


def _attend(
    q_BNHK: Tensor, k_BJHK: Tensor, v_BJHV: Tensor, pairs_NJ: Tensor, weighting: Weighting, order: Tensor | None
) -> Tensor:
    """Compute the outputs of some batch rows, ``[B, N, H, V]``.

    Args:
        q_BNHK: queries, ``[B, N, H, K]``.
        k_BJHK: keys, ``[B, J, H, K]``.
        v_BJHV: values, ``[B, J, H, V]``.
        pairs_NJ: coefficients of all token pairs, ``[N, J]`` or ``[H, N, J]``.
        weighting: causality and normalization of the attention weights.
        order: number of each token's block for block-causal attention, as in :attr:`TokenBlocks.order`; None otherwise.
    """
    scores_BHNJ = q_BNHK.transpose(1, 2) @ k_BJHK.permute(0, 2, 3, 1)
    if order is not None:
        # hide them before the product too: zero times an overflowed score would be NaN in its gradient
        scores_BHNJ = hide_later(scores_BHNJ, "block", order)
    scores_BHNJ = scores_BHNJ * pairs_NJ
    if weighting.causal:
        scores_BHNJ = hide_later(scores_BHNJ, weighting.causal, order)
    out_BHNV = scores_BHNJ @ v_BJHV.transpose(1, 2)
    if weighting.scale is not None:
        out_BHNV = out_BHNV * weighting.scale
    else:
        out_BHNV = divide(out_BHNV, scores_BHNJ.sum(-1, keepdim=True), weighting.eps)
    return out_BHNV.transpose(1, 2)
