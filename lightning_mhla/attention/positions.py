"""Positions of tokens as angles (rotary position embedding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from mhla_kernels import rotary_features
from torch import Tensor


class Rotary(NamedTuple):
    """Angles that rotary position embedding turns queries and keys by.

    Attributes:
        cos: cosine, ``[N, D / 2]`` or ``[B, N, D / 2]``.
        sin: sine, of the same shape.
        interleaved: whether features 2i and 2i + 1 are a pair, instead of i and i + D / 2.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def turn(self, x: Tensor, feature_map: Literal["identity", "relu"] = "identity") -> Tensor:
        """Map and turn ``[B, N, H, D]``; see :func:`mhla_kernels.rotary_features`."""
        return rotary_features(x, self.cos, self.sin, feature_map=feature_map, interleaved=self.interleaved)

    def select(self, order: Tensor) -> Rotary:
        """The angles of tokens in another order, ``[N]`` indices."""
        return Rotary(self.cos.index_select(-2, order), self.sin.index_select(-2, order), self.interleaved)


def rotary_angles(positions: Tensor, width: int, base: float = 10_000.0) -> Rotary:
    """Cosine and sine of the angles that rotary position embedding turns by (RoFormer, arXiv 2104.09864, equation 15).

    Pair i of a width-D feature turns by ``position * base^(-2 i / D)``.

    Args:
        positions: ``[N]`` or ``[B, N]``, integers.
        width: D, even.
        base: base of the geometric series of frequencies.

    Returns:
        Cosine and sine ``[..., N, D / 2]``, float32.
    """
    device = positions.device
    if device.type == "mps":  # has no float64, which far positions need
        positions = positions.cpu()
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    angles = positions.double()[..., None] * base**-exponent
    return Rotary(angles.cos().float().to(device), angles.sin().float().to(device))


def grid_angles(grid: tuple[int, int], width: int, base: float = 10_000.0) -> Rotary:
    """Angles of the tokens of an image: half of a head's features turn with the row, half with the column (RAVLT).

    Pair i of n = D / 4 pairs of each half turns by ``position * base^(-i / (n - 1))``, as in the code of RAVLT
    (arXiv 2411.07635): frequencies from 1 to ``1 / base``, both included. Features 2i and 2i + 1 are a pair.

    Args:
        grid: rows and columns.
        width: D, a multiple of 4.
        base: base of the geometric series of frequencies.

    Returns:
        Cosine and sine ``[N, D / 2]``, float32, on the CPU, tokens in raster order.

    Raises:
        ValueError: for another width.
    """
    if width % 4:
        raise ValueError(f"rotary positions in images need heads of a width that 4 divides, not {width}")
    frequencies = base ** -torch.linspace(0, 1, width // 4, dtype=torch.float64, device="cpu")
    rows, columns = (torch.arange(length, dtype=torch.float64, device="cpu") for length in grid)
    by_row, by_column = (torch.outer(places, frequencies) for places in (rows, columns))
    angles = torch.cat([by_row.repeat_interleave(grid[1], 0), by_column.repeat(grid[0], 1)], -1)
    return Rotary(angles.cos().float(), angles.sin().float(), interleaved=True)


def sequence_positions(x: Tensor, cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
    """``[N]`` int64: position of the tokens ``[B, N, ...]`` in its sequence.

    Args:
        x: the tokens.
        cu_seqlens: ``[S + 1]``: first token of each of the sequences that are packed in the one row, and N; None for one.
    """
    position = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return position
    bounds = torch.as_tensor(cu_seqlens, device=x.device)
    return position - bounds[torch.searchsorted(bounds, position, right=True) - 1]


def next_positions(lengths: Sequence[int], x: Tensor) -> Tensor:
    """Positions of the next tokens ``[B, N, dim]`` after rows of ``lengths``: ``[N]``, or ``[B, N]`` where they differ."""
    position = torch.arange(x.shape[1], device=x.device)
    if len(set(lengths)) < 2:
        return position + max(lengths, default=0)
    return position + torch.tensor(lengths, device=x.device)[:, None]
