"""Weighting of token pairs by the coefficients of their blocks, and masking of later keys and of other packed sequences."""

from __future__ import annotations

from torch import Tensor

from mhla_kernels.blocks import TokenBlocks
from mhla_kernels.problem import Causal


def hide_later(scores_TT: Tensor, causal: Causal, block: Tensor | None = None, *, inplace: bool = False) -> Tensor:
    """Set to zero the scores of later keys that a query must not attend to, and return the scores.

    Hidden scores get gradients of zero. They may hold any value, infinity and NaN included.

    Args:
        scores_TT: scores of T queries (rows) and T keys, ``[..., T, T]``.
        causal: whether a query attends to keys up to itself only; ``"block"`` if it attends to all keys of its own block and of
            the blocks before it. False hides nothing.
        block: index of each token's block, ``[T]`` integers that do not decrease; required for ``"block"`` only.
        inplace: whether to change the scores themselves, which must not need a gradient.
    """
    if causal == "block":
        assert block is not None
        later = block[:, None] < block
        return scores_TT.masked_fill_(later, 0) if inplace else scores_TT.masked_fill(later, 0)
    if causal:
        return scores_TT.tril_() if inplace else scores_TT.tril()
    return scores_TT


def expand_pairs(mixing: Tensor, queries: TokenBlocks, keys: TokenBlocks) -> Tensor:
    """Expand mixing coefficients from pairs of blocks to pairs of tokens.

    Args:
        mixing: coefficients, ``[..., Mq, Mk]``.
        queries: index of the block that contains each of N queries.
        keys: index of the block that contains each of J keys.

    Returns:
        ``[..., N, J]``.
    """
    if mixing.device.type == "cpu":
        # columns first: their single numbers are few, and the rows that are copied afterwards lie in one piece
        return mixing.index_select(-1, keys.block).index_select(-2, queries.block)
    # slower on a CPU; but on a GPU, the gradient of index_select is added up in a different order in each run
    return mixing[..., queries.block[:, None], keys.block]


def hide_pairs(x: Tensor, causal: Causal, queries: TokenBlocks, keys: TokenBlocks, *, inplace: bool = False) -> Tensor:
    """Set to zero the entries of token pairs whose query must not attend to the key, and return the result.

    These are the pairs that :func:`hide_later` hides, and pairs of tokens from different packed sequences.

    Args:
        x: values of pairs of N queries and J keys, ``[..., N, J]``.
        causal: causality, as for :func:`hide_later`.
        queries: index of the block and of the packed sequence that contain each query.
        keys: index of the block and of the packed sequence that contain each key.
        inplace: whether to change ``x`` itself, which must not need a gradient.
    """
    if queries.sequence is not None and keys.sequence is not None:
        other = queries.sequence[:, None] != keys.sequence
        x = x.masked_fill_(other, 0) if inplace else x.masked_fill(other, 0)
    return hide_later(x, causal, queries.order if causal == "block" else None, inplace=inplace)


def weigh(products: Tensor, pairs: Tensor, causal: Causal, queries: TokenBlocks, keys: TokenBlocks) -> Tensor:
    """Multiply the products of token pairs by their mixing coefficients, and hide pairs whose query must not attend to the key.

    Later keys, and keys of a different packed sequence, are hidden twice. They are hidden before the multiplication, because
    zero times a product that overflowed would be NaN, in the weights and in the gradient of the coefficients. They are hidden
    again after the multiplication, so that no gradient reaches them, not even one that overflowed.

    Args:
        products: products of N queries and J keys, ``[B, H, N, J]``.
        pairs: coefficients of :func:`expand_pairs`, ``[N, J]`` or ``[H, N, J]``.
        causal: causality, as for :func:`hide_later`.
        queries: index of the block and of the packed sequence that contain each query.
        keys: index of the block and of the packed sequence that contain each key.

    Returns:
        Weights before normalization, ``[B, H, N, J]``.
    """
    products = hide_pairs(products, causal, queries, keys)
    return hide_pairs(products * pairs, causal, queries, keys)
