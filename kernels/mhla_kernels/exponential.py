"""Mixing coefficients as a sum of exponentials of block distance: cost linear in the number of blocks, any length.

    m[i, j] = sum_r a_r prod_axis exp(-lambda_{r, axis} |i_axis - j_axis|)

A sum of R such terms is applied to M block summaries by running sums, R at a time, instead of a matrix of M squared; the
causal state is R summaries whatever the length. Learned dense coefficients of language models were found to be close to a
function of distance alone (the "Toeplitz Block Mixing" report, 2026-03); the distance here is the weighted L1 one, since
that separates over the axes of a grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from mhla_kernels.finite import finite_

GROUP = 32
"""Blocks that are mixed by a small matrix at once, between the steps of a running sum."""


@dataclass(frozen=True)
class ExponentialMixing:
    """Mixing coefficients ``m[i, j] = sum_r a_r prod_axis exp(-lambda_{r, axis} |i_axis - j_axis|)``.

    A pytree of its two tensors; gradients reach both.

    Args:
        amplitude: a, nonnegative, ``[R]`` for all heads or ``[H, R]``.
        decay: lambda, per block, nonnegative: of amplitude's shape in one dimension (``grid`` None); for a grid of A axes
            amplitude's shape and a last axis of length A.
        grid: blocks along each axis, row-major, for 2-D and 3-D grids; None for a sequence of any length. Causal
            attention needs None.

    Raises:
        ValueError: if the shapes do not fit.
    """

    amplitude: Tensor
    decay: Tensor
    grid: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.amplitude, Tensor):  # torch unflattens pytrees with placeholders
            return
        if self.amplitude.dim() not in (1, 2) or self.amplitude.numel() == 0:
            raise ValueError(f"amplitude has shape {list(self.amplitude.shape)}; it must be [R] or [H, R]")
        axes = () if self.grid is None else (len(self.grid),)
        if self.decay.shape != (*self.amplitude.shape, *axes):
            wanted = [*self.amplitude.shape, *axes]
            raise ValueError(f"decay has shape {list(self.decay.shape)}; with grid={self.grid} it must be {wanted}")
        if self.grid is not None and (not self.grid or min(self.grid) < 1):
            raise ValueError(f"grid={self.grid} must be blocks along each axis, each >= 1")

    @property
    def terms(self) -> int:
        """R."""
        return self.amplitude.shape[-1]

    @property
    def heads(self) -> int | None:
        """H, or None when all heads share the coefficients."""
        return self.amplitude.shape[0] if self.amplitude.dim() == 2 else None

    def to(self, dtype: torch.dtype) -> ExponentialMixing:
        """Both tensors in ``dtype``."""
        return ExponentialMixing(self.amplitude.to(dtype), self.decay.to(dtype), self.grid)

    def dense(self, blocks: int | None = None) -> Tensor:
        """The matrix it stands for, ``[M, M]`` or ``[H, M, M]``; ``blocks`` is M where ``grid`` is None.

        Raises:
            ValueError: if ``blocks`` is missing, or is not the number of blocks of ``grid``.
        """
        if self.grid is None:
            if blocks is None:
                raise ValueError("a mixing without a grid is of any length; give the number of blocks")
            distance = _distance(blocks, self.amplitude)
            return _kernel(self.amplitude, self.decay, distance)
        size = prod(self.grid)
        if blocks not in (None, size):
            raise ValueError(f"grid={self.grid} has {size} blocks, not {blocks}")
        axes = [_distance(length, self.amplitude) for length in self.grid]
        exponent = None
        for axis, distance in enumerate(axes):
            own = self.decay[..., axis, None, None] * distance
            exponent = own if exponent is None else _outer_sum(exponent, own)
        assert exponent is not None
        return (self.amplitude[..., None, None] * (-exponent).exp()).sum(-3)

    def mix(self, summary: Tensor, causal: bool) -> Tensor:
        """Summaries mixed, ``[B, H, M, W]`` to the same; causal: earlier blocks only, without the block itself.

        The cost is O(M R W) (times a group or the length of an axis), never O(M^2 W).
        """
        amplitude, decay = (x if self.heads else x[None] for x in (self.amplitude, self.decay))
        if causal:
            return _earlier(summary, amplitude, decay)
        if self.grid is None:
            later = _earlier(summary.flip(2), amplitude, decay).flip(2)
            own = amplitude.sum(-1)[:, None, None] * summary
            return _earlier(summary, amplitude, decay) + own + later
        if self.terms * sum(self.grid) > prod(self.grid):
            return torch.einsum("hib,nhbw->nhiw", self.dense().expand(summary.shape[1], -1, -1), summary)
        return _separable(summary, amplitude, decay, self.grid)

    @classmethod
    def fit(
        cls,
        mixing: Tensor,
        terms: int = 4,
        *,
        grid: tuple[int, ...] | None = None,
        causal: bool = False,
        any_row_scale: bool = False,
        steps: int = 500,
    ) -> tuple[ExponentialMixing, Tensor]:
        """The sum of exponentials nearest to learned dense coefficients, and how much of their variance it explains.

        Least squares over the coefficients that count (the lower triangle if ``causal``): Adam on the logarithms of the
        decays, the best nonnegative amplitudes being solved for at each step.

        Args:
            mixing: ``[M, M]`` or ``[H, M, M]``; every head is fitted on its own.
            terms: R.
            grid: block grid in 2-D or 3-D, with ``prod(grid)`` = M.
            causal: whether only the lower triangle counts.
            any_row_scale: whether every row of the fit may be scaled to match. An operator with a normaliser, or an RMSNorm
                after it, does not see the scale of a row, and rows that sum to 1 are no function of distance alone.
            steps: optimiser steps.

        Returns:
            The mixing, float32, and the explained variance (R^2: 1 - residual / variance about the mean; about zero where
            all coefficients are alike), a scalar or ``[H]``.
        """
        return _fit(cls, mixing, terms, grid, causal, any_row_scale, steps)


def _flatten(mixing: ExponentialMixing) -> tuple[list[Tensor], tuple[int, ...] | None]:
    return [mixing.amplitude, mixing.decay], mixing.grid


def _unflatten(children: Iterable[Any], grid: Any) -> ExponentialMixing:
    amplitude, decay = children
    return ExponentialMixing(amplitude, decay, grid)


pytree.register_pytree_node(
    ExponentialMixing,
    _flatten,
    _unflatten,
    serialized_type_name="mhla_kernels.ExponentialMixing",
    flatten_with_keys_fn=lambda mixing: (
        [(pytree.GetAttrKey("amplitude"), mixing.amplitude), (pytree.GetAttrKey("decay"), mixing.decay)],
        mixing.grid,
    ),
)


def _distance(length: int, like: Tensor) -> Tensor:
    place = torch.arange(length, device=like.device, dtype=like.dtype)
    return (place[:, None] - place[None, :]).abs()


def _kernel(amplitude: Tensor, decay: Tensor, distance: Tensor) -> Tensor:
    """``sum_r a_r exp(-lambda_r d)`` for distances ``[...]``; ``amplitude`` and ``decay`` are ``[..., R]``."""
    rates = decay.reshape(*decay.shape, *(1,) * distance.dim())
    weights = amplitude.reshape(*amplitude.shape, *(1,) * distance.dim())
    return (weights * (-rates * distance).exp()).sum(amplitude.dim() - 1)


def _outer_sum(a: Tensor, b: Tensor) -> Tensor:
    """``[..., I, J]`` and ``[..., K, L]`` to ``[..., I K, J L]``: what a Kronecker product is to products."""
    joined = a[..., :, None, :, None] + b[..., None, :, None, :]
    return joined.flatten(-4, -3).flatten(-2, -1)


def _earlier(summary: Tensor, amplitude: Tensor, decay: Tensor) -> Tensor:
    """``sum_{b < i} sum_r a_r exp(-lambda_r (i - b)) S_b``, in groups of blocks, between which R sums go on.

    ``summary`` ``[B, H, M, W]``; ``amplitude`` and ``decay`` ``[H or 1, R]``.
    """
    batch, heads, blocks, width = summary.shape
    group = min(GROUP, blocks)
    groups = -(-blocks // group)
    whole = groups * group == blocks
    x = summary if whole else F.pad(summary, (0, 0, 0, groups * group - blocks))
    x = x.reshape(-1, group, width)
    place = torch.arange(group, device=summary.device, dtype=summary.dtype)
    within = _kernel(amplitude, decay, (place[:, None] - place[None, :]).abs()).tril(-1)

    def everywhere(matrix: Tensor) -> Tensor:
        return matrix[None, :, None].expand(batch, heads, groups, *matrix.shape[-2:]).flatten(0, 2)

    if groups == 1:
        out = torch.bmm(everywhere(within), x)
    else:
        reading = amplitude[:, None] * (-decay[:, None] * (place[:, None] + 1)).exp()  # [H, G, R]
        writing = (-decay[..., None] * (group - 1 - place)).exp()  # [H, R, G]
        sums = torch.bmm(everywhere(writing), x).view(batch, heads, groups, -1, width).transpose(2, 3).flatten(1, 2)
        before = F.pad(finite_(sums)[:, :, :-1], (0, 0, 1, 0))  # [B, H R, groups, W]
        fading = (group * decay).expand(heads, -1).reshape(-1, 1)
        states = before + _earlier(before, torch.ones_like(fading), fading)  # a sequence of groups
        states = states.unflatten(1, (heads, -1)).transpose(2, 3).flatten(0, 2)
        out = torch.baddbmm(torch.bmm(everywhere(reading), states), everywhere(within), x)
    out = out.view(batch, heads, -1, width)
    return out if whole else out[:, :, :blocks]


def _separable(summary: Tensor, amplitude: Tensor, decay: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Mixing over a grid, one axis after the other for each term; shapes as for :func:`_earlier`, decay ``[H, R, A]``."""
    shape = summary.shape
    out = torch.zeros_like(summary)
    for term in range(amplitude.shape[-1]):
        x = summary
        for axis, length in enumerate(grid):
            outer, inner = prod(grid[:axis]), prod(grid[axis + 1 :])
            weight = (-decay[:, term, axis, None, None] * _distance(length, summary)).exp()
            lines = x.reshape(*shape[:2], outer, length, inner * shape[-1])
            x = (weight[None, :, None] @ lines).reshape(shape)
        out = out + amplitude[:, term, None, None] * x
    return out


def _fit(
    cls: type[ExponentialMixing],
    mixing: Tensor,
    terms: int,
    grid: tuple[int, ...] | None,
    causal: bool,
    any_row_scale: bool,
    steps: int,
) -> tuple[ExponentialMixing, Tensor]:
    if mixing.dim() not in (2, 3) or mixing.shape[-1] != mixing.shape[-2] or mixing.numel() == 0:
        raise ValueError(f"mixing has shape {list(mixing.shape)}; it must be [M, M] or [H, M, M]")
    if not torch.isfinite(mixing).all():
        raise ValueError("mixing holds numbers that are not finite")
    if terms < 1:
        raise ValueError(f"terms={terms} must be positive")
    if causal and grid is not None:
        raise ValueError("causal mixing is over a sequence; leave grid out")
    size = mixing.shape[-1]
    axes = grid or (size,)
    if prod(axes) != size:
        raise ValueError(f"grid={grid} has {prod(axes)} blocks, but mixing is for {size}")
    target = mixing.detach().double().reshape(-1, size, size)
    counts = torch.ones(size, size, dtype=torch.bool, device=mixing.device)
    if causal:
        counts = counts.tril()
    wanted = target[:, counts]  # [H, n]
    where = torch.cartesian_prod(*(torch.arange(length, device=mixing.device) for length in axes)).view(size, -1)
    distance = (where[:, None] - where[None, :]).abs().double()[counts]  # [n, A]

    with torch.enable_grad(), torch.inference_mode(False):
        heads, spread = len(wanted), max(axes)
        start = torch.logspace(-2, 0.7, terms, dtype=torch.float64, device=mixing.device) * 8 / min(8, spread)
        log_decay = start.log()[None, :, None].repeat(heads, 1, len(axes)).requires_grad_()
        optimizer = torch.optim.Adam([log_decay], lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        wanted, distance = wanted.clone(), distance.clone()
        amplitude = torch.ones(heads, terms, dtype=torch.float64, device=mixing.device)
        row = torch.arange(size, device=mixing.device)[:, None].expand(size, size)[counts]
        scale = torch.ones_like(wanted)
        for _ in range(steps):
            features = scale[..., None] * (-distance @ log_decay.exp().transpose(-1, -2)).exp()  # [H, n, R]
            amplitude = _nonnegative_least_squares(features.detach(), wanted, amplitude, sweeps=2)
            fitted = (features @ amplitude[..., None]).squeeze(-1)
            optimizer.zero_grad()
            (wanted - fitted).square().sum().backward()
            optimizer.step()
            schedule.step()
            if any_row_scale:
                scale = _row_scales(wanted, fitted.detach() / scale, row, size)
    features = scale[..., None] * (-distance @ log_decay.detach().exp().transpose(-1, -2)).exp()
    amplitude = _nonnegative_least_squares(features, wanted, amplitude, sweeps=500)
    residual = (wanted - (features @ amplitude[..., None]).squeeze(-1)).square().sum(-1)
    variance = (wanted - wanted.mean(-1, keepdim=True)).square().sum(-1)
    square = wanted.square().sum(-1)
    variance = torch.where(variance > 1e-9 * square, variance, square)  # all alike: nothing varies about the mean
    explained = torch.where(variance > 0, 1 - residual / variance, 1.0).float()
    decay = log_decay.detach().exp()
    if grid is None:
        decay = decay.squeeze(-1)
    if mixing.dim() == 2:
        amplitude, decay, explained = amplitude[0], decay[0], explained[0]
    return cls(amplitude.float(), decay.float(), grid), explained


def _row_scales(wanted: Tensor, fitted: Tensor, row: Tensor, size: int) -> Tensor:
    """The factor of each row that brings ``fitted`` nearest to ``wanted`` (both ``[H, n]``), of mean 1, ``[H, n]``."""
    zeros = wanted.new_zeros(len(wanted), size)
    along = zeros.index_add(1, row, wanted * fitted)
    scale = along / zeros.index_add(1, row, fitted.square()).clamp(min=1e-300)
    scale = scale / scale.mean(-1, keepdim=True).clamp(min=1e-300)
    return scale[:, row]


def _nonnegative_least_squares(features: Tensor, wanted: Tensor, start: Tensor, sweeps: int) -> Tensor:
    """``argmin_{a >= 0} |features a - wanted|`` for each head, by coordinate descent on the normal equations.

    ``features`` ``[H, n, R]``, ``wanted`` ``[H, n]``, ``start`` ``[H, R]``; ``[H, R]``.
    """
    gram = features.transpose(-1, -2) @ features
    right = (features.transpose(-1, -2) @ wanted[..., None]).squeeze(-1)
    ridge = 1e-12 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    amplitude = start.clone()
    for _ in range(sweeps):
        for term in range(right.shape[-1]):
            rest = (gram[:, term] * amplitude).sum(-1) - gram[:, term, term] * amplitude[:, term]
            amplitude[:, term] = ((right[:, term] - rest) / (gram[:, term, term] + ridge)).clamp(min=0)
    return amplitude
