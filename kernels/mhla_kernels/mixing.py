"""Mixing coefficients as tensors: carrying a learned matrix to another block grid."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def _axis_weights(old: int, new: int, device: torch.device) -> Tensor:
    """``[new, old]`` weights of linear interpolation between block centres; a triangle filter when there are fewer."""
    stretch = old / new
    centre = (torch.arange(new, device=device, dtype=torch.float64) + 0.5) * stretch - 0.5
    distance = (centre[:, None] - torch.arange(old, device=device, dtype=torch.float64)[None, :]).abs()
    weights = (1 - distance / max(1.0, stretch)).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def resize_mixing(mixing: Tensor, old_grid: Sequence[int], new_grid: Sequence[int]) -> Tensor:
    """Carry dense mixing coefficients from one block grid to another, for a new image, clip or sequence size.

    Coefficients are interpolated linearly between block centres, along the axes of the query block and of the key
    block alike; then each row is scaled to the interpolated sum of the old rows, so that rows that summed to 1 still
    do. The same grid gives the same values back.

    Args:
        mixing: ``[M, M]`` or ``[H, M, M]`` with ``M = prod(old_grid)``, blocks in row-major order of the grid.
        old_grid: blocks along each axis, for example ``(4, 4)``.
        new_grid: blocks along each axis, as many axes as ``old_grid``.

    Returns:
        ``[M', M']`` or ``[H, M', M']`` with ``M' = prod(new_grid)``, in the dtype and on the device of ``mixing``.

    Raises:
        ValueError: if the grids do not fit each other or the matrix.
    """
    if len(old_grid) != len(new_grid) or not old_grid or min(*old_grid, *new_grid) < 1:
        raise ValueError(
            f"old_grid {tuple(old_grid)} and new_grid {tuple(new_grid)} must have equally many axes, each >= 1"
        )
    if mixing.dim() not in (2, 3) or mixing.shape[-2:] != (prod(old_grid), prod(old_grid)):
        raise ValueError(
            f"mixing has shape {list(mixing.shape)}, but old_grid {tuple(old_grid)} has {prod(old_grid)} blocks; "
            f"it must be [M, M] or [H, M, M] with M = {prod(old_grid)}"
        )
    carry = torch.ones(1, 1, device=mixing.device, dtype=torch.float64)
    for old, new in zip(old_grid, new_grid, strict=True):
        carry = torch.kron(carry, _axis_weights(old, new, mixing.device))
    rows = carry @ mixing.double()
    resized = rows @ carry.T
    total = resized.sum(-1, keepdim=True)
    resized = torch.where(total == 0, 0, resized * rows.sum(-1, keepdim=True) / total)
    return resized.to(mixing.dtype)
