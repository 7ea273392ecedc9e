"""Windowed attention to all tokens from the scores of all token pairs, for short sequences and small images.

The number of operations grows with N squared, but all of them are large matrix products, and no tokens are copied into blocks.

Shape letters: B batch, N tokens, H heads, M blocks, K width of a key's features, V width of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.finite import finite_
from mhla_kernels.forms.cost import CONSTANTS
from mhla_kernels.near_far import FarTokens, NearTokens, combine, scale_features

GATHER = 220
"""Cost of copying a number of a near key or value into the window of a block, in multiply-adds.

On one thread of an Intel Xeon with AMX (torch 2.14.1), for grids of 4 x 4 blocks, heads of 64 and 128 features."""


def pairs_are_cheaper(layout: TokenLayout, axes: Sequence[int], width: int, features: int, value_width: int) -> bool:
    """Return whether scores of all token pairs cost less than summaries of blocks, by their multiply-adds.

    Args:
        layout: partition of the tokens into blocks.
        axes: number of blocks along each axis.
        width: width of a key, Dk.
        features: width of a key's features, K.
        value_width: width of a value, V.
    """
    if layout.is_open:
        return False
    cost, tokens, blocks = CONSTANTS["torch"], layout.tokens, layout.blocks
    near = width + value_width + cost["pair"]
    near_blocks = prod(min(3, length) for length in axes)
    summary = features * (value_width + 1)
    in_blocks = tokens * near_blocks * (layout.largest * near + GATHER * (width + value_width))
    in_blocks += (2 * tokens + blocks * blocks + cost["summary"] * blocks) * summary
    return tokens * tokens * (near + features + value_width + cost["pair"]) < in_blocks


class TokenPairs(NamedTuple):
    """Pairs of tokens in windowed attention.

    Attributes:
        mixing: mixing coefficients of the blocks of both tokens, ``[N, N]`` or ``[H, N, N]``.
        near: mask of the pairs whose weight is that of softmax attention, ``[N, N]`` bool.
    """

    mixing: Tensor
    near: Tensor

    @classmethod
    def of(cls, matrix: Tensor, near_blocks: Tensor, block: Tensor, sinks: int) -> TokenPairs:
        """Expand coefficients and neighborhoods from pairs of blocks to pairs of tokens.

        Args:
            matrix: mixing coefficients, ``[M, M]`` or ``[H, M, M]``.
            near_blocks: mask of blocks that are the same or next to each other, ``[M, M]`` bool.
            block: index of each token's block, ``[N]`` int64.
            sinks: number of first tokens that are near for all tokens, and all tokens for them.
        """
        is_sink = torch.arange(len(block), device=block.device) < sinks
        near = near_blocks[block[:, None], block] | is_sink[:, None] | is_sink
        return cls(matrix.index_select(-2, block).index_select(-1, block), near)


def attend_pairs(tokens: Sequence[Tensor], real: Tensor, *, pairs: TokenPairs) -> Tensor:
    """Compute the outputs of windowed attention to all tokens, ``[B, N, H, V]``, from the scores of all token pairs.

    Args:
        tokens: queries multiplied by the scale of the scores, keys, values, features of queries and of keys, and the logarithm
            of the factor on far tokens, ``[B, N, H, ...]`` each. The features of masked keys are zero.
        real: mask of tokens that may be attended to, ``[B, N]`` bool.
        pairs: coefficients and neighborhood of all token pairs.
    """
    q, k, v, f, g, far = (x.transpose(1, 2) for x in tokens)
    f, log_factor = scale_features(f, far)
    # not a coefficient of zero: a score of near tokens may overflow
    weights = ((f @ g.transpose(-1, -2)) * pairs.mixing).masked_fill(pairs.near, 0)
    sums = finite_(weights @ F.pad(v, (0, 1), value=1.0))
    near = NearTokens(k, v, pairs.near & real[:, None, None])
    return combine(q, [near], FarTokens(sums, log_factor)).transpose(1, 2)
