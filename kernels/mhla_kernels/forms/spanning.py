"""The spanning form in PyTorch: chunks of several blocks, for sums of exponentials. Its cost does not depend on the block.

In short blocks the chunked form holds as many numbers in its summaries as in its tokens. Here a chunk spans G blocks: pairs
of tokens inside it are weighed by a ``[G, G]`` matrix, and T running sums go from chunk to chunk, which is linear attention
with T times as many features:

    o_t = sum_{j in chunk} m[b(t), b(j)] (q_t . k_j) v_j  +  sum_r reading[r, b(t)] q_t^T H_r
    H_r = sum over earlier (later) chunks of e^{-decay_r (chunks in between)} sum_j writing[r, b(j)] k_j v_j^T

Shape letters: B batch, H heads, M chunks, C slots of a chunk, T terms, K key width, V value width, F = T K.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.blocks import BlockPartition, at_most
from mhla_kernels.finite import finite_
from mhla_kernels.mixing.exponential import earlier
from mhla_kernels.mixing.span import Span
from mhla_kernels.normalizer import divide

CHUNK: dict[str, int] = {"torch": 128, "triton": 256}
"""Tokens that a chunk holds at most by backend, if its block is not longer. On a GPU sums that are moved cost more than
pairs; on a CPU see ``benchmarks.short_blocks``."""


def chunk_tokens(tokens: int, block_size: int, backend: Literal["torch", "triton"] = "torch") -> int:
    """Tokens of a chunk: whole blocks, up to ``CHUNK`` tokens or one block, or all there are."""
    return at_most(tokens, max(1, CHUNK[backend] // block_size) * block_size)


def spanning(
    q_BHMCK: Tensor,
    k_BHMCK: Tensor,
    v_BHMCV: Tensor,
    span: Span,
    block_size: int,
    chunks: BlockPartition,
    *,
    causal: bool,
    scale: float | None,
    eps: float,
) -> Tensor:
    """Outputs ``[B, H, M, C, V]``; ``scale`` None asks for the normaliser, which is one more column of values."""
    q, k, v = q_BHMCK, k_BHMCK, v_BHMCV
    if scale is None:
        v = F.pad(v, (0, 1), value=1.0)
    block = torch.arange(v.shape[-2], device=v.device) // block_size
    scores = q @ k.transpose(-1, -2)
    matrix = span.matrix[:, None, block][..., block]
    # before the product too: a masked score that overflowed would make NaN of the matrix's gradient
    scores = (scores.tril() * matrix).tril() if causal else scores * matrix
    out = scores @ v
    if q.shape[2] > 1:
        reading, writing = (x[:, None, :, block].transpose(-1, -2) for x in (span.reading, span.writing))
        sums = _times(k, writing).transpose(-1, -2) @ v
        out = out + _times(q, reading) @ _before(sums, span, chunks)
    if scale is not None:
        return out * scale
    return divide(out[..., :-1], out[..., -1:], eps)


def _times(x_BHMCK: Tensor, weights_H1CT: Tensor) -> Tensor:
    """``[B, H, M, C, F]``: the tokens, weighed for each term."""
    return (x_BHMCK[..., None, :] * weights_H1CT[..., None]).flatten(-2)


def _before(sums_BHMFV: Tensor, span: Span, chunks: BlockPartition) -> Tensor:
    """The running sums that each chunk reads, of the chunks before it in its sequence, or after it."""
    batch, heads, number, features, width = sums_BHMFV.shape
    terms = span.decay.shape[-1]
    x = finite_(sums_BHMFV).unflatten(3, (terms, -1)).permute(0, 1, 3, 2, 4, 5).flatten(4)  # [B, H, T, M, K V]
    decay = span.decay.expand(heads, -1)
    parts = [x] if span.later == 0 else [x[:, :, : -span.later], x[:, :, -span.later :].flip(3)]
    states = []
    for part, later in zip(parts, (False, True), strict=False):
        rates = (decay[:, -span.later :] if later else decay[:, : part.shape[2]]).reshape(-1, 1)
        found = _carry(part.flatten(1, 2), rates, chunks, later).view(part.shape)
        states.append(found.flip(3) if later else found)
    x = states[0] if span.later == 0 else torch.cat(states, 2)
    return x.unflatten(4, (-1, width)).permute(0, 1, 3, 2, 4, 5).reshape(batch, heads, number, features, width)


def _carry(sums: Tensor, decay: Tensor, chunks: BlockPartition, later: bool) -> Tensor:
    """``sum_{c < i} exp(-decay (i - 1 - c)) sums[c]`` along axis 2, which runs from the end if ``later``."""
    number = sums.shape[2]
    if chunks.local is not None and chunks.sequences is None:  # packed rows whose bounds only the device knows
        assert chunks.owner is not None
        local, owner = (x.flip(0) if later else x for x in (chunks.local, chunks.owner))
        between = (local[:, None] - local).abs() - 1
        counts = ((owner[:, None] == owner) & (between >= 0)).tril(-1)
        weights = (-decay[..., None] * between.clamp(min=0)).exp() * counts
        return weights @ sums
    sequences = chunks.sequences or ((0, number),)
    if later:
        sequences = tuple((number - last, number - first) for first, last in reversed(sequences))
    states = []
    for first, last in sequences:
        before = F.pad(sums[:, :, first : last - 1], (0, 0, 1, 0))
        states.append(before + earlier(before, torch.ones_like(decay), decay) if last - first > 2 else before)
    return states[0] if len(states) == 1 else torch.cat(states, 2)
