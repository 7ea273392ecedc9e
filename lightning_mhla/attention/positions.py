"""Angles of rotary position embedding, and positions of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from mhla_kernels import rotary_features
from torch import Tensor


class Rotary(NamedTuple):
    """Angles by which rotary position embedding rotates queries and keys.

    Attributes:
        cos: cosine, ``[N, D / 2]`` or ``[B, N, D / 2]``.
        sin: sine, of the same shape.
        interleaved: whether features 2i and 2i + 1 are a pair, instead of i and i + D / 2.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def turn(self, x: Tensor, feature_map: Literal["identity", "relu"] = "identity") -> Tensor:
        """Apply the feature map to ``[B, N, H, D]`` and rotate; see :func:`mhla_kernels.rotary_features`."""
        return rotary_features(x, self.cos, self.sin, feature_map=feature_map, interleaved=self.interleaved)

    def select(self, order: Tensor) -> Rotary:
        """Return the angles of tokens in the order of ``[N]`` indices."""
        return Rotary(self.cos.index_select(-2, order), self.sin.index_select(-2, order), self.interleaved)


def rotary_angles(positions: Tensor, width: int, base: float = 10_000.0) -> Rotary:
    """Compute cosine and sine of rotary angles (RoFormer, arXiv 2104.09864, equation 15).

    Pair i of a feature of width D is rotated by ``position * base^(-2 i / D)``.

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
    """Compute rotary angles for the tokens of an image: half of a head's features encode the row, half the column.

    Pair i of the n = D / 4 pairs in each half is rotated by ``position * base^(-i / (n - 1))``, as in the code of RAVLT
    (arXiv 2411.07635). Frequencies range from 1 to ``1 / base``, both included. Features 2i and 2i + 1 form a pair.

    Args:
        grid: rows and columns.
        width: D, a multiple of 4.
        base: base of the geometric series of frequencies.

    Returns:
        Cosine and sine ``[N, D / 2]``, float32, on the CPU, tokens in raster order.

    Raises:
        ValueError: if the width is not a multiple of 4.
    """
    if width % 4:
        raise ValueError(f"rotary positions in images need heads of a width that 4 divides, not {width}")
    frequencies = base ** -torch.linspace(0, 1, width // 4, dtype=torch.float64, device="cpu")
    rows, columns = (torch.arange(length, dtype=torch.float64, device="cpu") for length in grid)
    by_row, by_column = (torch.outer(places, frequencies) for places in (rows, columns))
    angles = torch.cat([by_row.repeat_interleave(grid[1], 0), by_column.repeat(grid[0], 1)], -1)
    return Rotary(angles.cos().float(), angles.sin().float(), interleaved=True)


def sequence_positions(x: Tensor, cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
    """Compute the position of each token in its sequence, ``[N]`` int64.

    Args:
        x: tokens ``[B, N, ...]``.
        cu_seqlens: ``[S + 1]``, first token of each sequence packed into the row, followed by N; None for one sequence.
    """
    position = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return position
    bounds = torch.as_tensor(cu_seqlens, device=x.device)
    return position - bounds[torch.searchsorted(bounds, position, right=True) - 1]


def next_positions(lengths: Sequence[int], x: Tensor) -> Tensor:
    """Compute the positions of tokens ``[B, N, dim]`` that follow rows of ``lengths`` tokens.

    Returns:
        ``[N]`` int64 if all rows are equally long, else ``[B, N]``.
    """
    position = torch.arange(x.shape[1], device=x.device)
    if len(set(lengths)) < 2:
        return position + max(lengths, default=0)
    return position + torch.tensor(lengths, device=x.device)[:, None]
