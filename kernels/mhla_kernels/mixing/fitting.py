"""Fitting a sum of exponentials to dense coefficients that were learned."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


def fit_exponentials(
    mixing: Tensor,
    terms: int,
    grid: tuple[int, ...] | None,
    causal: bool,
    any_row_scale: bool,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Amplitudes, decays and explained variance; see :meth:`ExponentialMixing.fit` for the arguments and errors."""
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
    return amplitude.float(), decay.float(), explained


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
