"""The chunked form in PyTorch: block summaries, one GEMM that mixes them, outputs. Arithmetic grows linearly with N.

    S_b = k_b^T v_b,  z_b = sum k_b        summaries of block b
    S~ = m S,         z~ = m z             mixing: a GEMM of [M, M] with [M, K * V]
    o = q S~ / (q . z~ + eps)              outputs

Causal: ``m`` counts below its diagonal only, and block i adds its own tokens up to the query, weighted by ``m[i, i]``.
A block longer than ``TILE`` is walked in tiles, so that the token pairs inside a block never cost C squared.

Shape letters: B batch, H heads, M blocks, C slots of a block, J tiles of a block, T slots of a tile, K key width,
V value width.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 128
"""Longest run of tokens (slots) whose pairs are scored directly inside a causal block; see ``benchmarks.forms``."""


def chunked(
    q_BHMCK: Tensor,
    k_BHMCK: Tensor,
    v_BHMCV: Tensor,
    mixing: Tensor,
    *,
    causal: bool,
    scale: float | None,
    eps: float,
) -> Tensor:
    """Outputs ``[B, H, M, C, V]``; ``mixing`` is ``[M, M]`` or ``[H, M, M]``; ``scale`` None asks for the normaliser."""
    if scale is not None:
        mixing = mixing * scale
    run = _bidirectional if not causal else _causal if v_BHMCV.shape[-2] <= TILE else _causal_tiled
    out, normalizer = run(q_BHMCK, k_BHMCK, v_BHMCV, mixing, scale is None)
    return out if normalizer is None else out / (normalizer[..., None] + eps)


def _mix(mixing: Tensor, summary_BHMKV: Tensor) -> Tensor:
    """Summaries mixed over the blocks: one batched GEMM, which torch would otherwise fold with two copies."""
    batch, heads, blocks, *width = summary_BHMKV.shape
    coefficients = mixing.expand(batch, heads, blocks, blocks).reshape(batch * heads, blocks, blocks)
    return torch.bmm(coefficients, summary_BHMKV.reshape(batch * heads, blocks, prod(width))).view(
        batch, heads, blocks, *width
    )


def _bidirectional(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    out = q @ _mix(mixing, k.transpose(-1, -2) @ v)
    if not normalize:
        return out, None
    return out, (q @ _mix(mixing, k.sum(-2))[..., None]).squeeze(-1)


def _causal(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    before, own = mixing.tril(-1), mixing.diagonal(dim1=-2, dim2=-1)
    scores = (q @ k.transpose(-1, -2)).tril() * own[..., None, None]
    out = q @ _mix(before, k.transpose(-1, -2) @ v) + scores @ v
    if not normalize:
        return out, None
    return out, (q @ _mix(before, k.sum(-2))[..., None]).squeeze(-1) + scores.sum(-1)


def _causal_tiled(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    slots = v.shape[-2]
    tiles = -(-slots // TILE)
    tile = -(-slots // tiles)
    pad = (0, 0, 0, tiles * tile - slots)
    q, k, v = (F.pad(x, pad).unflatten(3, (tiles, tile)) for x in (q, k, v))
    before = mixing.tril(-1)
    own = mixing.diagonal(dim1=-2, dim2=-1)[..., None, None, None]

    summary = k.transpose(-1, -2) @ v
    earlier = summary.cumsum(3) - summary
    mixed = _mix(before, summary.sum(3))[:, :, :, None] + own * earlier
    scores = (q @ k.transpose(-1, -2)).tril() * own
    out = (q @ mixed + scores @ v).flatten(3, 4)[..., :slots, :]
    if not normalize:
        return out, None
    total = k.sum(-2)
    earlier = total.cumsum(3) - total
    mixed = _mix(before, total.sum(3))[:, :, :, None] + own[..., 0] * earlier
    normalizer = (q @ mixed[..., None]).squeeze(-1) + scores.sum(-1)
    return out, normalizer.flatten(3, 4)[..., :slots]
