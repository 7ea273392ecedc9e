"""Sums of exponentials as chunks of several blocks see them: inside a chunk a small matrix, between chunks running sums.

With blocks counted from the start of their chunk, g for the query's and h for the key's, a term of the coefficient between
two chunks that lie D >= 1 apart is a product of what reads, what lies between, and what writes:

    a exp(-lambda (D G + g - h)) = a exp(-lambda (g + 1))  *  exp(-lambda G (D - 1))  *  exp(-lambda (G - 1 - h))

for earlier chunks, and with the blocks counted from the end of the chunk for later ones. No factor is above a.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Coefficients by chunks of G blocks; T terms, and heads of length 1 where they share them.

    Attributes:
        matrix: between the blocks of a chunk, ``[H or 1, G, G]``.
        reading: how the queries of a block read each running sum, ``[H or 1, T, G]``.
        writing: how its keys enter them, ``[H or 1, T, G]``.
        decay: exponents by which the sums fade over a chunk, ``[H or 1, T]``.
        later: how many of the terms, the last ones, sum up later chunks: none, or half of them.
    """

    matrix: Tensor
    reading: Tensor
    writing: Tensor
    decay: Tensor
    later: int


def make_span(amplitude: Tensor, decay: Tensor, blocks: int, causal: bool) -> Span:
    """For chunks of ``blocks`` blocks; ``amplitude`` and ``decay`` ``[H or 1, R]``. Causal: R terms, else 2 R."""
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
