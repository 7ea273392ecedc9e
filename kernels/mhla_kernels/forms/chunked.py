"""Chunked form of attention in PyTorch: it sums each block, mixes the sums, and applies the mixtures to the queries.

    S_b = k_b^T v_b,  z_b = sum k_b        summaries of block b
    S~ = m S,         z~ = m z             mixing: a GEMM of [M, M] with [M, K * V]
    o = q S~ / (q . z~ + eps)              outputs

The number of operations grows linearly with the number of tokens. In causal attention, only the part of the mixing matrix ``m``
below its diagonal is applied to the summaries. In addition, each query in block i attends to the tokens of its own block up to
itself, weighted by ``m[i, i]``. A block of more than 128 tokens (``TILE``) is processed in tiles, so that the cost of the token
pairs inside a block does not grow with C squared. In block-causal attention, each query in block i attends to all tokens of its
block, whose sums are weighted by ``m[i, i]``.

Shape letters: B batch, H heads, M blocks, C slots of a block, J tiles of a block, T slots of a tile, K key width, V value
width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.blocks import BlockPartition, divide_up, is_dynamic
from mhla_kernels.finite import finite_
from mhla_kernels.mixing import DenseMixing, Mixing
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting

TILE = 128
"""Largest number of tokens (slots) inside a causal block whose pairs are scored directly; see ``benchmarks.forms``."""


@dataclass
class Mixer:
    """Callable that applies mixing coefficients to block summaries, separately for each packed sequence.

    A block summary is a sum over the tokens of a block. The coefficient m[i, j] is the weight that block i gives to the summary
    of block j.

    Attributes:
        mixing: mixing coefficients m.
        own: coefficients m[i, i] with which blocks weigh their own tokens, ``[M]`` or ``[H, M]`` (the last axis may have length
            1).
        sequences: for each packed sequence, the index of its first block and the index after its last block; None to mix all
            blocks with each other.
    """

    mixing: Mixing
    own: Tensor
    sequences: tuple[tuple[int, int], ...] | None = None

    def __call__(self, summary: Tensor, causal: bool) -> Tensor:
        """Compute a weighted mixture of block summaries for each of M blocks.

        Args:
            summary: summaries of the blocks, ``[B, H, M, ...]``.
            causal: whether the mixture of a block contains only the summaries of earlier blocks, not its own.

        Returns:
            Mixtures, in the shape of ``summary``.
        """
        flat = summary.flatten(3)
        if self.sequences is None:
            mixed = self.mixing.mix(flat, causal)
        else:
            mixed = torch.cat([self.mixing.mix(flat[:, :, a:b], causal) for a, b in self.sequences], 2)
        return mixed.view(summary.shape)


def make_mixer(mixing: Mixing, blocks: BlockPartition) -> Mixer:
    """Create a callable that applies mixing coefficients to the block summaries of a partition.

    If the bounds of packed sequences are known only on the device, the callable applies one matrix to all blocks, with zeros
    between blocks of different sequences.

    Args:
        mixing: mixing coefficients between the blocks of one sequence.
        blocks: partition of the tokens into blocks.
    """
    if is_dynamic(blocks.blocks) or (blocks.local is not None and blocks.sequences is None):
        mixing = DenseMixing(blocks.expand_mixing(mixing.matrix(blocks.blocks)))
        return Mixer(mixing, mixing.own(slice(None), blocks.blocks))
    index = slice(blocks.blocks) if blocks.local is None else blocks.local
    return Mixer(mixing, mixing.own(index, blocks.blocks), blocks.sequences)


def chunked(q_BHMCK: Tensor, k_BHMCK: Tensor, v_BHMCV: Tensor, mixer: Mixer, weighting: Weighting) -> Tensor:
    """Compute attention from one summary per block, in time linear in the number of tokens (the chunked form).

    Args:
        q_BHMCK: queries in M blocks of C token positions, ``[B, H, M, C, K]``.
        k_BHMCK: keys in blocks, ``[B, H, M, C, K]``.
        v_BHMCV: values in blocks, ``[B, H, M, C, V]``.
        mixer: callable that applies the mixing coefficients to the block summaries.
        weighting: causality and normalization of the attention weights.

    Returns:
        Outputs, ``[B, H, M, C, V]``.
    """
    if not weighting.causal:
        return bidirectional(q_BHMCK, k_BHMCK, v_BHMCV, partial(mixer, causal=False), weighting)
    run = _block_causal
    if weighting.causal is True:
        run = _causal if v_BHMCV.shape[-2] <= TILE else _causal_tiled
    return _weigh(*run(q_BHMCK, k_BHMCK, v_BHMCV, mixer, weighting.normalize), weighting)


def bidirectional(q: Tensor, k: Tensor, v: Tensor, mix: Callable[[Tensor], Tensor], weighting: Weighting) -> Tensor:
    """Compute attention of all queries to all keys from one summary per block of keys.

    Args:
        q: queries in Mq blocks of C token positions, ``[B, H, Mq, C, K]``.
        k: keys in Mk blocks of C' token positions, ``[B, H, Mk, C', K]``.
        v: values in Mk blocks, ``[B, H, Mk, C', V]``.
        mix: function that mixes summaries ``[B, H, Mk, ...]`` of key blocks for each query block, ``[B, H, Mq, ...]``.
        weighting: normalization of the attention weights.

    Returns:
        Outputs, ``[B, H, Mq, C, V]``.
    """
    # The shape is [B, H, Mq, K, V].
    mixed = mix(k.transpose(-1, -2) @ v)
    return read_mixtures(q, mixed, mix(k.sum(-2)) if weighting.normalize else None, weighting)


def read_mixtures(q: Tensor, mixed: Tensor, totals: Tensor | None, weighting: Weighting) -> Tensor:
    """Compute the output of each query from the mixture of summaries for the query's block.

    Args:
        q: queries in M blocks of C token positions, ``[B, H, M, C, K]``.
        mixed: mixtures of sums of ``k^T v``, ``[B, H, M, K, V]``.
        totals: mixtures of sums of k, ``[B, H, M, K]``; None without normalization.
        weighting: normalization of the attention weights.

    Returns:
        Outputs, ``[B, H, M, C, V]``.
    """
    normalizer = None if totals is None else (q @ totals[..., None]).squeeze(-1)
    return _weigh(q @ mixed, normalizer, weighting)


def _weigh(out: Tensor, normalizer: Tensor | None, weighting: Weighting) -> Tensor:
    if weighting.scale is not None:
        return out * weighting.scale
    assert normalizer is not None
    return divide(out, normalizer[..., None], weighting.eps)


def _block_causal(q: Tensor, k: Tensor, v: Tensor, mixer: Mixer, normalize: bool) -> tuple[Tensor, Tensor | None]:
    # The shapes are [B, H, M, K, V] and [B, H, M, K].
    summary, total = k.transpose(-1, -2) @ v, k.sum(-2)
    # Overflowed sums are made finite, because earlier blocks multiply them by zero coefficients, and zero times infinity is
    # NaN. The outputs of the block itself become NaN by an addition: a multiplication would also make gradients of zero NaN.
    spoilt = summary.new_zeros(summary.shape[:3]).masked_fill(~_are_finite(summary, total), torch.nan)
    summary = finite_(summary)
    out = q @ torch.addcmul(mixer(summary, causal=True), mixer.own[..., None, None], summary) + spoilt[..., None, None]
    if not normalize:
        return out, None
    total = finite_(total)
    return out, (q @ torch.addcmul(mixer(total, causal=True), mixer.own[..., None], total)[..., None]).squeeze(-1)


def _are_finite(summary: Tensor, total: Tensor) -> Tensor:
    """Return whether all sums of each block are finite, ``[B, H, M]`` bool.

    Args:
        summary: sums of ``k^T v``, ``[B, H, M, K, V]``.
        total: sums of k, ``[B, H, M, K]``.
    """
    # the largest absolute value of each block: a norm reads the sums once, without a copy
    of_products = torch.linalg.vector_norm(summary.detach(), torch.inf, (-2, -1))
    of_keys = torch.linalg.vector_norm(total.detach(), torch.inf, -1)
    return of_products.isfinite() & of_keys.isfinite()


def summarize(k: Tensor, v: Tensor) -> Tensor:
    """Compute the summary ``k^T v`` of each block, ``[..., K, V]``, and replace infinite and NaN sums with finite numbers.

    Args:
        k: keys of the C tokens of each block, ``[..., C, K]``.
        v: values of the C tokens of each block, ``[..., C, V]``.
    """
    return finite_(k.transpose(-1, -2) @ v)


def _causal(q: Tensor, k: Tensor, v: Tensor, mixer: Mixer, normalize: bool) -> tuple[Tensor, Tensor | None]:
    # the own coefficients multiply q instead of the masked scores, whose zeros times an overflowed gradient would be NaN
    scores = (q * mixer.own[..., None, None] @ k.transpose(-1, -2)).tril()
    out = q @ mixer(summarize(k, v), causal=True) + scores @ v
    if not normalize:
        return out, None
    return out, (q @ mixer(finite_(k.sum(-2)), causal=True)[..., None]).squeeze(-1) + scores.sum(-1)


def _causal_tiled(q: Tensor, k: Tensor, v: Tensor, mixer: Mixer, normalize: bool) -> tuple[Tensor, Tensor | None]:
    slots = v.shape[-2]
    tiles = divide_up(slots, TILE)
    tile = divide_up(slots, tiles)  # tiles of equal size need less padding than full tiles and a remainder
    pad = (0, 0, 0, tiles * tile - slots)
    # The shapes are [B, H, M, J, T, K or V].
    q, k, v = (F.pad(x, pad).unflatten(3, (tiles, tile)) for x in (q, k, v))
    own_coefficients = mixer.own[..., None, None, None]

    summary = k.transpose(-1, -2) @ v  # of each tile; the sum over the tiles is the summary of the block
    # What each tile reads, [B, H, M, J, K, V]: earlier blocks, and earlier tiles of its own block with the coefficient m[i, i].
    mixed = mixer(finite_(summary.sum(3)), causal=True)[:, :, :, None] + own_coefficients * _sums_before(summary)
    scores = (q * own_coefficients @ k.transpose(-1, -2)).tril()
    out = (q @ mixed + scores @ v).flatten(3, 4)[..., :slots, :]
    if not normalize:
        return out, None
    total = k.sum(-2)
    mixed = mixer(finite_(total.sum(3)), causal=True)[:, :, :, None] + own_coefficients[..., 0] * _sums_before(total)
    normalizer = (q @ mixed[..., None]).squeeze(-1) + scores.sum(-1)
    return out, normalizer.flatten(3, 4)[..., :slots]


def _sums_before(x: Tensor) -> Tensor:
    """Compute, for each tile of a block, the sum over the block's earlier tiles: an exclusive cumulative sum along axis 3.

    The result is not computed as ``cumsum - x``, because a large value in ``x`` would leave a rounding error behind.

    Args:
        x: sums of the J tiles of each of M blocks, ``[B, H, M, J, ...]``.

    Returns:
        Sums over the earlier tiles, in the shape of ``x``. Infinite and NaN sums are replaced with finite numbers.
    """
    return finite_(F.pad(x[:, :, :, :-1], (0, 0) * (x.dim() - 4) + (1, 0)).cumsum(3))
