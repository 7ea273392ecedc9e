"""Summaries of key blocks, computed once for many calls of cross-attention, such as the steps of text generation.

Shape letters: B batch, N tokens, H heads, Mq and Mk blocks of queries and of keys, K and V widths of a key and of a value.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.features import FeatureMap, hide, map_tokens
from mhla_kernels.forms.chunked import read_mixtures
from mhla_kernels.mixing.base import apply_matrix
from mhla_kernels.problem import Weighting, dtype_of_sums


class KeySummaries(NamedTuple):
    """Sums over the keys and values of each block, or mixtures of these sums for blocks of queries.

    Attributes:
        products: sums of ``k^T v``, ``[B, H, M, K, V]``, in float32, or in float64 if k or v is float64. M is Mk for sums over
            key blocks, and Mq for mixtures.
        totals: sums of k, ``[B, H, M, K]``, in the same dtype.
    """

    products: Tensor
    totals: Tensor

    def mix(self, matrix: Tensor) -> KeySummaries:
        """Mix the summaries of Mk key blocks for each of Mq query blocks, and return the Mq mixtures.

        Args:
            matrix: mixing coefficients, ``[Mq, Mk]`` or ``[H, Mq, Mk]``.
        """
        matrix = matrix.to(self.products.dtype)
        products = apply_matrix(matrix, self.products.flatten(3)).unflatten(3, self.products.shape[3:])
        return KeySummaries(products, apply_matrix(matrix, self.totals))

    def select(self, rows: Tensor) -> KeySummaries:
        """Return the summaries of the batch rows with the indices ``rows``, ``[B']`` int64; an index may be repeated."""
        return KeySummaries(*(x.index_select(0, rows.to(x.device)) for x in self))


def summarize_keys(
    k: Tensor, v: Tensor, layout: TokenLayout, feature_map: FeatureMap, key_mask: Tensor | None
) -> KeySummaries:
    """Compute the summaries of the M blocks of keys: the sums of ``k^T v`` and of k over the tokens of each block.

    Args:
        k: keys, ``[B, N, H, K]``.
        v: values, ``[B, N, H, V]``.
        layout: partition of the keys into blocks, without packed sequences.
        feature_map: feature map of the keys.
        key_mask: ``[B, N]`` bool, False for masked keys, which add nothing; None if no key is masked.
    """
    dtype = dtype_of_sums(k, v)
    k, v = map_tokens(k.to(dtype), feature_map, key_mask), hide(v.to(dtype), key_mask)
    blocks = layout.partition(k.device)
    keys = blocks.split(k)
    return KeySummaries(keys.transpose(-1, -2) @ blocks.split(v), keys.sum(-2))


def read_summaries(
    q: Tensor,
    mixtures: KeySummaries,
    layout: TokenLayout,
    weighting: Weighting,
    feature_map: FeatureMap,
    query_mask: Tensor | None,
) -> Tensor:
    """Compute the output of each query from the mixture of key summaries for the query's block.

    The outputs are those of :func:`mhla_kernels.mhla_attention` for the same queries, keys, values and coefficients.

    Args:
        q: queries, ``[B, N, H, K]``.
        mixtures: mixtures for the Mq blocks of the queries.
        layout: partition of the queries into these blocks.
        weighting: normalization of the attention weights.
        feature_map: feature map of the queries.
        query_mask: ``[B, N]`` bool, False for masked queries, whose outputs are zero; None if no query is masked.

    Returns:
        Outputs ``[B, N, H, V]``, in the dtype of the mixtures.
    """
    q = map_tokens(q.to(mixtures.products.dtype), feature_map, query_mask)
    totals = mixtures.totals if weighting.normalize else None
    if mixtures.products.shape[2] == 1:  # without the slots of a complete block, for a single token
        out = read_mixtures(q.transpose(1, 2)[:, :, None], mixtures.products, totals, weighting)[:, :, 0].transpose(
            1, 2
        )
    else:
        blocks = layout.partition(q.device)
        out = blocks.merge(read_mixtures(blocks.split(q), mixtures.products, totals, weighting))
    return hide(out, query_mask)
