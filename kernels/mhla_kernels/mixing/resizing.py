"""Conversion of a learned matrix of mixing coefficients to a different block grid, or to more blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor


def _axis_weights(old: int, new: int, device: torch.device) -> Tensor:
    """Return float64 weights ``[new, old]`` that resize an axis from ``old`` to ``new`` blocks by linear interpolation.

    The interpolation is between block centers. If there are fewer new blocks than old ones, each row of weights is a triangle
    filter that averages several old blocks.
    """
    stretch = old / new
    center = (torch.arange(new, device=device, dtype=torch.float64) + 0.5) * stretch - 0.5
    distance = (center[:, None] - torch.arange(old, device=device, dtype=torch.float64)[None, :]).abs()
    weights = (1 - distance / max(1.0, stretch)).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def resize_mixing(mixing: Tensor, old_grid: Sequence[int], new_grid: Sequence[int]) -> Tensor:
    """Resize dense mixing coefficients from one block grid to another, for a different image, clip or sequence size.

    Coefficients are interpolated linearly between block centers, along the axes of the query block and of the key block. Then
    each row is scaled to the interpolated sum of the old rows, so that rows with a sum of 1 keep it. A row whose interpolated
    coefficients cancel to a sum of zero is scaled by ``prod(old_grid) / prod(new_grid)``. If the grids are equal, the values do
    not change.

    Args:
        mixing: ``[M, M]`` or ``[H, M, M]`` with ``M = prod(old_grid)``, blocks in row-major order of the grid.
        old_grid: number of blocks along each axis, for example ``(4, 4)``.
        new_grid: number of blocks along each axis of the new grid, which has as many axes as the old one.

    Returns:
        ``[M', M']`` or ``[H, M', M']`` with ``M' = prod(new_grid)``, in the dtype and on the device of ``mixing``.

    Raises:
        ValueError: if the grids differ in the number of axes, an axis has fewer than one block, or ``mixing`` does not have
            ``prod(old_grid)`` blocks.
    """
    if len(old_grid) != len(new_grid) or not old_grid or min(*old_grid, *new_grid) < 1:
        raise ValueError(
            f"old_grid {tuple(old_grid)} and new_grid {tuple(new_grid)} must have the same number of axes, each >= 1"
        )
    if mixing.dim() not in (2, 3) or mixing.shape[-2:] != (prod(old_grid), prod(old_grid)):
        raise ValueError(
            f"mixing has shape {list(mixing.shape)}, but old_grid {tuple(old_grid)} has {prod(old_grid)} blocks; "
            f"it must be [M, M] or [H, M, M] with M = {prod(old_grid)}"
        )
    carry = torch.ones(1, 1, device=mixing.device, dtype=torch.float64)
    # the grid is a product of axes, and so is its interpolation
    for old, new in zip(old_grid, new_grid, strict=True):
        carry = torch.kron(carry, _axis_weights(old, new, mixing.device))
    rows = carry @ mixing.double()
    resized = rows @ carry.T
    total = resized.sum(-1, keepdim=True)  # differs from the old sums, since fewer or more blocks are added up
    scale = torch.where(total == 0, prod(old_grid) / prod(new_grid), rows.sum(-1, keepdim=True) / total)
    resized = resized * scale
    return resized.to(mixing.dtype)


def extend_mixing(mixing: Tensor, blocks: int, tail: Literal["exponential", "last", "zero"] = "exponential") -> Tensor:
    """Extend learned causal coefficients to more blocks, so that a model runs on longer sequences than in training.

    The existing rows are not changed. A new row is computed in three steps:

    1. For each block distance in the existing matrix, the new coefficient is the mean of the coefficients at this distance in
       the last half of the existing rows, after each row is divided by its sum.
    2. For larger distances, the coefficient follows an exponential that never grows with distance. The exponential is fitted to
       the larger half of the existing distances. (See ``tail`` for alternatives.)
    3. The row is scaled to the mean sum of the last half of the existing rows.

    Args:
        mixing: nonnegative coefficients, ``[M, M]`` or ``[H, M, M]``; only the lower triangle counts.
        blocks: number of blocks of the result. If it is M or less, the result is the top left corner of ``mixing``.
        tail: coefficients beyond the largest existing distance: ``"exponential"``, ``"last"`` (the last existing value) or
            ``"zero"``.

    Returns:
        ``[blocks, blocks]`` or ``[H, blocks, blocks]``, in the dtype and on the device of ``mixing``. New rows are zero above
        the diagonal.

    Raises:
        ValueError: if the shape is wrong, ``blocks`` is not a positive integer, or ``tail`` is unknown.
        TypeError: if ``mixing`` is not a tensor.
    """
    if not isinstance(mixing, Tensor):
        raise TypeError(
            f"mixing is {type(mixing).__name__}; only dense tensors are extended (ExponentialMixing covers any length)"
        )
    if mixing.dim() not in (2, 3) or mixing.shape[-1] != mixing.shape[-2] or mixing.numel() == 0:
        raise ValueError(f"mixing has shape {list(mixing.shape)}; it must be [M, M] or [H, M, M]")
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise ValueError(f"blocks={blocks!r} must be a positive integer")
    if tail not in ("exponential", "last", "zero"):
        raise ValueError(f"tail={tail!r} is not one of 'exponential', 'last', 'zero'")
    size = mixing.shape[-1]
    if blocks <= size:
        return mixing[..., :blocks, :blocks].clone()
    existing = mixing.double().tril()
    sums = existing.sum(-1, keepdim=True)
    shares = torch.where(sums > 0, existing / sums, 0)
    half = size // 2
    # Entry n of diagonal d lies in row n + d, so that entries from half - d on are those of the last half of the rows.
    profile = torch.stack(
        [shares.diagonal(-distance, -2, -1)[..., max(0, half - distance) :].mean(-1) for distance in range(size)], -1
    )
    beyond = torch.arange(1, blocks - size + 1, device=mixing.device, dtype=torch.float64)
    continued = torch.cat([profile, _tail(profile, beyond, tail)], -1)  # [..., blocks]

    index = torch.arange(blocks, device=mixing.device)
    distance = index[size:, None] - index
    rows = torch.where(distance >= 0, continued[..., distance.clamp(min=0)], 0)
    total = rows.sum(-1, keepdim=True)
    rows = torch.where(total > 0, rows / total, 0) * sums[..., half:, :].mean(-2, keepdim=True)
    extended = torch.zeros(*mixing.shape[:-2], blocks, blocks, dtype=mixing.dtype, device=mixing.device)
    extended[..., :size, :size] = mixing
    extended[..., size:, :] = rows.to(mixing.dtype)
    return extended


def _tail(profile: Tensor, beyond: Tensor, tail: str) -> Tensor:
    """Extrapolate mixing coefficients beyond the largest existing block distance, M - 1.

    Args:
        profile: coefficient at each distance from 0 to M - 1, ``[..., M]``.
        beyond: differences between the n new distances and M - 1, ``[n]``.
        tail: ``"exponential"``, ``"last"`` (repeat the last coefficient) or ``"zero"``.

    Returns:
        Coefficients at the distances ``M - 1 + beyond``, ``[..., n]``.
    """
    last = profile[..., -1:]
    if tail == "zero":
        return torch.zeros_like(last) * beyond
    if tail == "last":
        return last * torch.ones_like(beyond)
    size = profile.shape[-1]
    start = size // 2
    far = profile[..., start:].clamp(min=1e-12).log()
    x = torch.arange(start, size, device=profile.device, dtype=torch.float64)
    x = x - x.mean()
    # Least squares for a straight line through the logarithms, with x measured from its mean.
    slope = ((x * far).sum(-1, keepdim=True) / x.square().sum().clamp(min=1e-12)).clamp(max=0)
    level = far.mean(-1, keepdim=True) + slope * x[-1]
    # Without the last factor, a profile of zeros would continue with the 1e-12 of the clamp above.
    return (level + slope * beyond).exp() * (profile[..., start:].sum(-1, keepdim=True) > 0)
