"""Positions of tokens as angles (rotary position embedding)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, width: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles that rotary position embedding turns by (RoFormer, arXiv 2104.09864, equation 15).

    Pair i of a width-D feature turns by ``position * base^(-2 i / D)``.

    Args:
        positions: ``[N]`` or ``[B, N]``, integers.
        width: D, even.
        base: of the geometric series of frequencies.

    Returns:
        Two tensors ``[..., N, D / 2]``, float32.
    """
    device = positions.device
    if device.type == "mps":  # has no float64, which far positions need
        positions = positions.cpu()
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    angles = positions.double()[..., None] * base**-exponent
    return angles.cos().float().to(device), angles.sin().float().to(device)


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """``[tokens]`` int64: place of each token in its own sequence, for sequences packed in one row.

    Args:
        cu_seqlens: ``[S + 1]`` int64, first token of each sequence, and their number of tokens at the end.
        tokens: of the row, ``cu_seqlens[-1]``.
    """
    place = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, place, right=True) - 1
    return place - cu_seqlens[sequence]
