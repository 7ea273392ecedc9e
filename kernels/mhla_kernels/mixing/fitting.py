"""Least-squares fit of a sum of exponentials of block distance to learned dense mixing coefficients."""

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
    """Fit a sum of R exponentials of block distance to dense mixing coefficients, by least squares.

    The fitted coefficient of blocks i and j, at positions x_i and x_j along each axis a of the grid, is

        fitted[i, j] = c_i * sum_r amplitude[r] * exp(-sum_a decay[r, a] * |x_i[a] - x_j[a]|)

    Amplitudes are nonnegative, and decays are positive rates per block. The row factors c_i are 1, or are fitted if
    ``any_row_scale`` is true. A sequence has one axis.

    Args:
        mixing: dense coefficients of M blocks, ``[M, M]`` or ``[H, M, M]``; each head is fitted separately.
        terms: number of exponentials R.
        grid: number of blocks along each axis of a 2-D or 3-D grid; None for a sequence.
        causal: whether to fit only the lower triangle, including the diagonal; requires a sequence.
        any_row_scale: whether to fit the row factors c_i, which are not returned.
        steps: number of optimizer steps.

    Returns:
        Amplitudes ``[R]``, decays ``[R]`` (``[R, A]`` over a grid of A axes), and the fraction of the variance of the
        coefficients that the fit explains, a scalar. If ``mixing`` has an axis of heads, each result has heads as axis 0. All
        are float32.

    Raises:
        ValueError: if ``mixing`` has a wrong shape or a number that is not finite, ``terms`` is less than 1, ``grid`` does not
            have M blocks, or ``grid`` is set although ``causal`` is true.
    """
    if mixing.dim() not in (2, 3) or mixing.shape[-1] != mixing.shape[-2] or mixing.numel() == 0:
        raise ValueError(f"mixing has shape {list(mixing.shape)}; it must be [M, M] or [H, M, M]")
    if not torch.isfinite(mixing).all():
        raise ValueError("mixing holds numbers that are not finite")
    if terms < 1:
        raise ValueError(f"terms={terms} must be positive")
    if causal and grid is not None:
        raise ValueError("causal mixing needs a sequence; leave grid out")
    size = mixing.shape[-1]
    axes = grid or (size,)
    if prod(axes) != size:
        raise ValueError(f"grid={grid} has {prod(axes)} blocks, but mixing is for {size}")
    target = mixing.detach().double().reshape(-1, size, size)
    counts = torch.ones(size, size, dtype=torch.bool, device=mixing.device)
    if causal:
        counts = counts.tril()
    coefficients = target[:, counts]  # [H, n]
    coordinates = torch.cartesian_prod(*(torch.arange(length, device=mixing.device) for length in axes)).view(size, -1)
    distance = (coordinates[:, None] - coordinates[None, :]).abs().double()[counts]  # [n, A]

    # works in any grad mode; tensors made in inference mode are cloned below, so that autograd accepts them
    with torch.enable_grad(), torch.inference_mode(False):
        heads, spread = len(coefficients), max(axes)
        # decays from slow to fast; faster ones for a small grid, which has short distances only
        start = torch.logspace(-2, 0.7, terms, dtype=torch.float64, device=mixing.device) * 8 / min(8, spread)
        log_decay = start.log()[None, :, None].repeat(heads, 1, len(axes)).requires_grad_()
        optimizer = torch.optim.Adam([log_decay], lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        coefficients, distance = coefficients.clone(), distance.clone()
        amplitude = torch.ones(heads, terms, dtype=torch.float64, device=mixing.device)
        row = torch.arange(size, device=mixing.device)[:, None].expand(size, size)[counts]
        scale = torch.ones_like(coefficients)
        for _ in range(steps):
            features = scale[..., None] * (-distance @ log_decay.exp().transpose(-1, -2)).exp()  # [H, n, R]
            # Solve for the amplitudes, from the last ones on, so that Adam only searches for the decays.
            amplitude = _nonnegative_least_squares(features.detach(), coefficients, amplitude, sweeps=2)
            fitted = (features @ amplitude[..., None]).squeeze(-1)
            optimizer.zero_grad()
            (coefficients - fitted).square().sum().backward()
            optimizer.step()
            schedule.step()
            if any_row_scale:
                # `fitted` contains the previous factors; the new ones are fitted to the values without them.
                scale = _row_scales(coefficients, fitted.detach() / scale, row, size)
    features = scale[..., None] * (-distance @ log_decay.detach().exp().transpose(-1, -2)).exp()
    # Once more with many sweeps, since the decays have changed after the last two.
    amplitude = _nonnegative_least_squares(features, coefficients, amplitude, sweeps=500)
    residual = (coefficients - (features @ amplitude[..., None]).squeeze(-1)).square().sum(-1)
    variance = (coefficients - coefficients.mean(-1, keepdim=True)).square().sum(-1)
    square = coefficients.square().sum(-1)
    variance = torch.where(variance > 1e-9 * square, variance, square)  # equal coefficients have no variance
    explained = torch.where(variance > 0, 1 - residual / variance, 1.0).float()
    decay = log_decay.detach().exp()
    if grid is None:
        decay = decay.squeeze(-1)
    if mixing.dim() == 2:
        amplitude, decay, explained = amplitude[0], decay[0], explained[0]
    return amplitude.float(), decay.float(), explained


def _row_scales(target: Tensor, fitted: Tensor, row: Tensor, size: int) -> Tensor:
    """Compute for each matrix row the factor on ``fitted`` that minimizes the squared error of the row.

    The factors of each head are then divided by their mean.

    Args:
        target: coefficients to approximate, ``[H, n]``.
        fitted: fitted coefficients, ``[H, n]``.
        row: index of the row that contains each coefficient, ``[n]``.
        size: number of rows.

    Returns:
        Factor of the row that contains each coefficient, ``[H, n]``.
    """
    zeros = target.new_zeros(len(target), size)
    along = zeros.index_add(1, row, target * fitted)
    scale = along / zeros.index_add(1, row, fitted.square()).clamp(min=1e-300)
    # A common factor of all rows is the same as a factor of the amplitudes; this fixes it.
    scale = scale / scale.mean(-1, keepdim=True).clamp(min=1e-300)
    return scale[:, row]


def _nonnegative_least_squares(features: Tensor, target: Tensor, start: Tensor, sweeps: int) -> Tensor:
    """Minimize ``|features a - target|`` over nonnegative a, for each head, by coordinate descent on the normal equations.

    Args:
        features: R features for each of n targets, ``[H, n, R]``.
        target: targets, ``[H, n]``.
        start: initial guess of a, ``[H, R]``.
        sweeps: number of passes over all R coordinates.

    Returns:
        The solution a, ``[H, R]``.
    """
    gram = features.transpose(-1, -2) @ features
    right = (features.transpose(-1, -2) @ target[..., None]).squeeze(-1)
    # keeps the division below finite if one of the features vanishes
    ridge = 1e-12 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    amplitude = start.clone()
    for _ in range(sweeps):
        for term in range(right.shape[-1]):
            other_terms = (gram[:, term] * amplitude).sum(-1) - gram[:, term, term] * amplitude[:, term]
            amplitude[:, term] = ((right[:, term] - other_terms) / (gram[:, term, term] + ridge)).clamp(min=0)
    return amplitude
