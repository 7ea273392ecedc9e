"""Windowed attention without causality, computed from the scores of all token pairs, for short sequences and small images.

The number of operations grows with N squared, but most of them are in large matrix products, and no tokens are copied into
blocks.

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

GATHER = 130
"""Cost of copying one element of a near key or value into the window of a block, in multiply-adds.

With ``lightning bench layers`` on an Intel Xeon with AMX (torch 2.14.1), scoring all pairs is faster at 1,370 tokens, and
copying is faster at 2,917 tokens. The cost is therefore between 83 and 177."""


class Forms(NamedTuple):
    """Flags for the parts of non-causal windowed attention that are computed from all pairs of tokens, instead of in blocks.

    Attributes:
        near: whether the softmax part computes the scores of all pairs of tokens and masks the far pairs, instead of copying
            the near tokens of each block.
        far: whether far tokens are weighed pair by pair, instead of by summaries of blocks; only together with ``near``.
    """

    near: bool
    far: bool


def cheapest_forms(layout: TokenLayout, axes: Sequence[int], width: int, features: int, value_width: int) -> Forms:
    """Choose how each part of windowed attention is computed, by the lowest estimated number of multiply-adds.

    If the number of tokens is symbolic, both parts are computed in blocks.

    Args:
        layout: partition of the tokens into blocks.
        axes: number of blocks along each axis.
        width: width of a key, Dk.
        features: width of a key's features, K.
        value_width: width of a value, V.
    """
    if layout.is_open:
        return Forms(near=False, far=False)
    cost, tokens, blocks = CONSTANTS["torch"], layout.tokens, layout.blocks
    near_blocks = prod([min(3, length) for length in axes])  # torch.compile takes no generator here
    near_pair = width + value_width + cost["pair"]
    near = tokens**2 * near_pair
    near_in_blocks = tokens * near_blocks * (layout.largest * near_pair + GATHER * (width + value_width))
    far = tokens**2 * (features + value_width + cost["pair"])
    far_in_blocks = (2 * tokens + blocks**2 + cost["summary"] * blocks) * features * (value_width + 1)
    # Far pairs are only computed together with near pairs, so both parts of the sum are compared.
    if near > near_in_blocks and near + far > near_in_blocks + far_in_blocks:
        return Forms(near=False, far=False)
    return Forms(near=True, far=far < far_in_blocks)


def near_pairs(near_blocks: Tensor, block: Tensor, sinks: int) -> Tensor:
    """Return a mask of pairs of tokens that are near each other, ``[N, N]`` bool.

    Args:
        near_blocks: ``[M, M]`` bool, True for pairs of blocks that are the same or next to each other.
        block: index of each token's block, ``[N]`` int64.
        sinks: number of sinks, the first tokens, each of which is near every token.
    """
    is_sink = torch.arange(len(block), device=block.device) < sinks
    return near_blocks[block[:, None], block] | is_sink[:, None] | is_sink


def weigh_pairs(tokens: Sequence[Tensor], mixing: Tensor, near: Tensor) -> FarTokens:
    """Compute the sums over the far tokens of each query, those outside its softmax window, from the scores of all pairs.

    The result holds the sums, ``[B, H, N, V + 1]``, and the logarithm of a factor on them, ``[B, H, N, 1]``. The sums are V
    weighted sums of values and, in the last column, the sum of the weights.

    Args:
        tokens: queries, keys, values, features of queries and of keys, and the logarithm of the factor on far tokens,
            ``[B, N, H, ...]`` each. The features of masked keys are zero.
        mixing: mixing coefficient of the blocks of each query (row) and key (column), ``[N, N]`` or ``[H, N, N]``.
        near: ``[N, N]`` bool, True where a key (column) is in the window of a query (row), so that the sums leave it out.
    """
    _, _, v, f, g, far = (x.transpose(1, 2) for x in tokens)
    f, log_factor = scale_features(f, far)
    # not a coefficient of zero: a score of near tokens may overflow
    weights = ((f @ g.transpose(-1, -2)) * mixing).masked_fill(near, 0)
    return FarTokens(finite_(weights @ F.pad(v, (0, 1), value=1.0)), log_factor)


def attend_near(tokens: Sequence[Tensor], real: Tensor, near: Tensor, far: FarTokens) -> Tensor:
    """Compute windowed attention, ``[B, N, H, V]``: softmax attention to near tokens, combined with given sums over far tokens.

    All token pairs are scored, and the scores of far ones are masked.

    Args:
        tokens: the queries (already multiplied by the scale of the scores), the keys, and the values, ``[B, N, H, ...]`` each.
            Further tensors are ignored.
        real: mask of tokens that may be attended to, ``[B, N]`` bool.
        near: ``[N, N]`` bool, or broadcastable to it, True where a key (column) is near a query (row).
        far: sums over the far tokens of each query, which are added to those over the near tokens.
    """
    q, k, v = (x.transpose(1, 2) for x in tokens[:3])
    return combine(q, [NearTokens(k, v, near & real[:, None, None])], far).transpose(1, 2)
