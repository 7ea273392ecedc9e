"""Parallel form of attention in PyTorch: products of all token pairs, times the mixing coefficient of their two blocks.

The number of operations grows with N squared. Two large matrix products take most of the time, which makes this form the
fastest one for up to a few hundred tokens. Tokens stay where they are: the coefficients are expanded to pairs of tokens, once
for all batch rows, instead of moving the tokens of each row into blocks.

Shape letters: B batch, H heads, N queries, J keys (N in self-attention), M blocks, K key width, V value width.
"""

from __future__ import annotations

from torch import Tensor

from mhla_kernels.blocks import TokenBlocks
from mhla_kernels.forms.parts import in_parts
from mhla_kernels.forms.weights import expand_pairs, weigh
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting


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
    pairs_NJ = expand_pairs(mixing, queries, keys)

    def attend(q_BNHK: Tensor, k_BJHK: Tensor, v_BJHV: Tensor) -> Tensor:
        products_BHNJ = q_BNHK.transpose(1, 2) @ k_BJHK.permute(0, 2, 3, 1)
        scores_BHNJ = weigh(products_BHNJ, pairs_NJ, weighting.causal, queries, keys)
        out_BHNV = scores_BHNJ @ v_BJHV.transpose(1, 2)
        if weighting.scale is not None:
            out_BHNV = out_BHNV * weighting.scale
        else:
            out_BHNV = divide(out_BHNV, scores_BHNJ.sum(-1, keepdim=True), weighting.eps)
        return out_BHNV.transpose(1, 2)

    return in_parts(attend, (q_BNHK, k_BJHK, v_BJHV), q_BNHK.shape[1] * q_BNHK.shape[2] * k_BJHK.shape[1])
