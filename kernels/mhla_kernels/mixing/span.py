"""Exponential mixing for chunks of several blocks, by a small matrix inside a chunk and running sums between chunks.

Let a chunk have G blocks. Count blocks from the start of their chunk, and let g be the index of the query's block and h the
index of the key's block. For two chunks that are D >= 1 apart, each exponential term of the mixing coefficient is a product of
three factors, for reading, for the chunks in between, and for writing:

    a exp(-lambda (D G + g - h)) = a exp(-lambda (g + 1))  *  exp(-lambda G (D - 1))  *  exp(-lambda (G - 1 - h))

This is for earlier chunks. For later chunks, blocks are counted from the end of the chunk. No exponential is larger than 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Mixing coefficients for attention in chunks of G consecutive blocks.

    Tokens of other chunks are read through T running sums over the keys and values of these chunks.

    Axis 0 of every tensor has length 1 if all heads share the coefficients.

    Attributes:
        matrix: coefficients between the blocks of one chunk, ``[H or 1, G, G]``.
        reading: weights with which the queries of a block read each running sum, ``[H or 1, T, G]``.
        writing: weights with which the keys of a block enter each running sum, ``[H or 1, T, G]``.
        decay: decay rate of each running sum, ``[H or 1, T]``. From one chunk to the next, a sum is multiplied by
            ``exp(-decay)``.
        later: number of running sums over later chunks, 0 or T / 2. They are the last ones of the T sums. The others are over
            earlier chunks.
    """

    matrix: Tensor
    reading: Tensor
    writing: Tensor
    decay: Tensor
    later: int


def make_span(amplitude: Tensor, decay: Tensor, blocks: int, causal: bool) -> Span:
    """Convert a sum of R exponentials of block distance to mixing coefficients for chunks of several blocks.

    Args:
        amplitude: amplitude of each exponential, ``[H or 1, R]``.
        decay: decay per block of each exponential, ``[H or 1, R]``.
        blocks: number of blocks in a chunk, G.
        causal: whether chunks read only earlier chunks, through R running sums. Otherwise, they also read later chunks, through
            R more running sums.
    """
    index = torch.arange(blocks, device=decay.device, dtype=decay.dtype)
    distance = (index[:, None] - index).abs()
    matrix = (amplitude[..., None, None] * (-decay[..., None, None] * distance).exp()).sum(1)
    rates = decay[..., None]
    reading, writing = amplitude[..., None] * (-rates * (index + 1)).exp(), (-rates * (blocks - 1 - index)).exp()
    between = blocks * decay
    if causal:
        return Span(matrix, reading, writing, between, 0)
    reading, writing = torch.cat([reading, reading.flip(-1)], 1), torch.cat([writing, writing.flip(-1)], 1)
    return Span(matrix, reading, writing, torch.cat([between, between], 1), decay.shape[-1])
