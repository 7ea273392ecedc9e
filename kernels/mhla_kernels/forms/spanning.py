"""Spanning form of attention in PyTorch, which processes chunks of several blocks and connects them by running sums.

The form requires mixing coefficients that are sums of exponentials. Its cost does not depend on the block size. (With short
blocks, the block summaries of the chunked form need as much memory as the tokens.) A chunk spans G blocks. Pairs of tokens
inside a chunk are weighted by a ``[G, G]`` matrix. T running sums pass from chunk to chunk, which is linear attention with T
times as many features:

    o_t = sum_{j in chunk} m[b(t), b(j)] (q_t . k_j) v_j  +  sum_r reading[r, b(t)] q_t^T H_r
    H_r = sum over earlier (later) chunks of e^{-decay_r (chunks in between)} sum_j writing[r, b(j)] k_j v_j^T

Shape letters: B batch, H heads, M chunks, C slots of a chunk, T running sums, K key width, V value width, F = T K.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.blocks import BlockPartition, at_most
from mhla_kernels.finite import finite_
from mhla_kernels.forms.weights import hide_later
from mhla_kernels.mixing.exponential import earlier
from mhla_kernels.mixing.span import Span
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting

CHUNK: dict[str, int] = {"torch": 128, "triton": 256}
"""Largest number of tokens in a chunk by backend, unless one block is longer.

On a GPU, moving sums costs more than scoring pairs. For a CPU, see ``benchmarks.short_blocks``."""


def chunk_tokens(tokens: int, block_size: int, backend: Literal["torch", "triton"] = "torch") -> int:
    """Return the number of tokens in a chunk, the group of blocks that the spanning form of attention processes at once.

    A chunk holds as many complete blocks as fit into 128 tokens in PyTorch, or 256 tokens in Triton. It holds at least one
    block, and at most all tokens.

    Args:
        tokens: number of tokens N.
        block_size: tokens in a block.
        backend: ``"torch"`` or ``"triton"``.
    """
    return at_most(tokens, max(1, CHUNK[backend] // block_size) * block_size)


def spanning(
    q_BHMCK: Tensor,
    k_BHMCK: Tensor,
    v_BHMCV: Tensor,
    span: Span,
    block_size: int,
    chunks: BlockPartition,
    weighting: Weighting,
) -> Tensor:
    """Compute attention in chunks of several blocks that are connected by running sums (the spanning form).

    Args:
        q_BHMCK: queries in M chunks of C slots (one token each, or padding), ``[B, H, M, C, K]``.
        k_BHMCK: keys in chunks, ``[B, H, M, C, K]``.
        v_BHMCV: values in chunks, ``[B, H, M, C, V]``.
        span: mixing coefficients within and between chunks.
        block_size: tokens in a block.
        chunks: partition of the tokens into chunks.
        weighting: causality and normalization of the attention weights.

    Returns:
        Outputs, ``[B, H, M, C, V]``.
    """
    q, k, v = q_BHMCK, k_BHMCK, v_BHMCV
    if weighting.normalize:
        # The outputs of a column of ones are the sums of the weights.
        v = F.pad(v, (0, 1), value=1.0)
    block = torch.arange(v.shape[-2], device=v.device) // block_size
    scores = q @ k.transpose(-1, -2)
    # [H or 1, 1, C, C]: the coefficient of the blocks of each pair of slots
    matrix = span.matrix[:, None, block][..., block]
    # mask before the product too: a masked score that overflowed would make the gradient of the matrix NaN
    scores = hide_later(hide_later(scores, weighting.causal, block) * matrix, weighting.causal, block)
    out = scores @ v
    if q.shape[2] > 1:
        reading, writing = (x[:, None, :, block].transpose(-1, -2) for x in (span.reading, span.writing))
        # [B, H, M, F, V + 1]: one summary of the chunk for each running sum
        sums = _times(k, writing).transpose(-1, -2) @ v
        out = out + _times(q, reading) @ _before(sums, span, chunks)
    if weighting.scale is not None:
        return out * weighting.scale
    return divide(out[..., :-1], out[..., -1:], weighting.eps)


def _times(x_BHMCK: Tensor, weights_H1CT: Tensor) -> Tensor:
    return (x_BHMCK[..., None, :] * weights_H1CT[..., None]).flatten(-2)


def _before(sums_BHMFV: Tensor, span: Span, chunks: BlockPartition) -> Tensor:
    """Compute the running sums that each chunk reads: over the chunks before it and, in bidirectional attention, after it.

    A chunk is a group of consecutive blocks. A running sum adds up ``sums_BHMFV`` over chunks, with a decay from each
    chunk to the next.

    Args:
        sums_BHMFV: weighted sums of the key-value products of each of M chunks, ``[B, H, M, F, V]``, with F = T * K for T
            running sums and key width K.
        span: mixing coefficients within and between chunks.
        chunks: partition of the tokens into chunks.

    Returns:
        Running sums, ``[B, H, M, F, V]``. They include only chunks of the same packed sequence.
    """
    batch, heads, number, features, width = sums_BHMFV.shape
    terms = span.decay.shape[-1]
    x = finite_(sums_BHMFV).unflatten(3, (terms, -1)).permute(0, 1, 3, 2, 4, 5).flatten(4)  # [B, H, T, M, K V]
    decay = span.decay.expand(heads, -1)
    # Sums over later chunks are sums over earlier ones of the reversed sequence.
    parts = [x] if span.later == 0 else [x[:, :, : -span.later], x[:, :, -span.later :].flip(3)]
    states = []
    for part, later in zip(parts, (False, True), strict=False):
        rates = (decay[:, -span.later :] if later else decay[:, : part.shape[2]]).reshape(-1, 1)
        state = _carry(part.flatten(1, 2), rates, chunks, later).view(part.shape)
        states.append(state.flip(3) if later else state)
    x = states[0] if span.later == 0 else torch.cat(states, 2)
    return x.unflatten(4, (-1, width)).permute(0, 1, 3, 2, 4, 5).reshape(batch, heads, number, features, width)


def _carry(sums: Tensor, decay: Tensor, chunks: BlockPartition, later: bool) -> Tensor:
    """Compute decayed running sums over the preceding chunks of each sequence: ``sum_{c < i} exp(-decay (i - 1 - c)) sums[c]``.

    A chunk is a group of consecutive blocks. In the shapes, ``rows`` is the number of running sums of all heads together.

    Args:
        sums: sums of each of M chunks, with W numbers each, ``[B, rows, M, W]``. If ``later``, the last chunk comes first.
        decay: exponent of the decay per chunk, ``[rows, 1]``.
        chunks: partition of the tokens into chunks.
        later: whether ``sums`` is in reverse order, so that a running sum is over the chunks after chunk i.

    Returns:
        Running sums, in the shape and order of ``sums``.
    """
    number = sums.shape[2]
    if chunks.local is not None and chunks.sequences is None:  # only the device knows the bounds of packed rows
        assert chunks.owner is not None
        local, owner = (x.flip(0) if later else x for x in (chunks.local, chunks.owner))
        between = (local[:, None] - local).abs() - 1
        counts = ((owner[:, None] == owner) & (between >= 0)).tril(-1)
        # [rows, M, M]: one matrix for all chunks, because the sequences cannot be sliced apart
        weights = (-decay[..., None] * between.clamp(min=0)).exp() * counts
        return weights @ sums
    sequences = chunks.sequences or ((0, number),)
    if later:
        sequences = tuple((number - last, number - first) for first, last in reversed(sequences))
    states = []
    for first, last in sequences:
        # The sum of the chunk before, undecayed. With one or two chunks, there is nothing further to add.
        preceding = F.pad(sums[:, :, first : last - 1], (0, 0, 1, 0))
        states.append(preceding + earlier(preceding, torch.ones_like(decay), decay) if last - first > 2 else preceding)
    return states[0] if len(states) == 1 else torch.cat(states, 2)
