"""The definition once more, head by head in float64, sharing no code with the package."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    starts: list[list[int]],
    *,
    causal: bool,
    normalize: bool,
    eps: float = 1e-6,
    key_mask: Tensor | None = None,
    constant_normalizer: bool = False,
) -> Tensor:
    """Output ``[B, N, H, Dv]`` in float64.

    Args:
        q: ``[B, N, H, Dk]``, mapped.
        k: ``[B, N, H, Dk]``, mapped.
        v: ``[B, N, H, Dv]``.
        mixing: ``[M, M]`` or ``[H, M, M]``.
        starts: for each packed sequence the first token of each of its blocks, and its end.
        causal: see the operator.
        normalize: see the operator.
        eps: see the operator.
        key_mask: ``[B, N]``.
        constant_normalizer: leave the normalizer out of the gradient, to see how much of the gradient it cancels.
    """
    q, k, v, mixing = (x.double() for x in (q, k, v, mixing))
    batch, tokens, heads, width = q.shape
    mixing = mixing if mixing.dim() == 3 else mixing.expand(heads, -1, -1)
    place = {
        t: (s, b)
        for s, bounds in enumerate(starts)
        for b, (first, last) in enumerate(pairwise(bounds))
        for t in range(first, last)
    }
    owner, block = (torch.tensor(each) for each in zip(*(place[t] for t in range(tokens)), strict=True))
    order = torch.arange(tokens)
    visible = (owner[:, None] == owner) & ((order <= order[:, None]) | torch.tensor(not causal))
    coefficient = mixing[:, block][:, :, block] * visible
    rows = []
    for b in range(batch):
        for h in range(heads):
            weight = coefficient[h] * (q[b, :, h] @ k[b, :, h].T)
            value = v[b, :, h]
            if key_mask is not None:
                weight = weight.masked_fill(~key_mask[b][None, :], 0).masked_fill(~key_mask[b][:, None], 0)
                value = value.masked_fill(~key_mask[b][:, None], 0)
            total = weight.sum(-1, keepdim=True) + eps
            weight = weight / (total.detach() if constant_normalizer else total) if normalize else weight * width**-0.5
            rows.append(weight @ value)
    return torch.stack(rows).view(batch, heads, tokens, -1).transpose(1, 2)


def equal_starts(tokens: int, block_size: int) -> list[list[int]]:
    """Blocks of equal size, the last one short."""
    return [[*range(0, tokens, block_size), tokens]]


def packed_starts(bounds: list[int], block_size: int) -> list[list[int]]:
    """Blocks counted from each sequence's first token."""
    return [[*range(a, b, block_size), b] for a, b in pairwise(bounds)]


def relative_error(name: str, got: Tensor, want: Tensor) -> float:
    """``||got - want|| / ||want||``, with a check that ``got`` is finite and of ``want``'s shape."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} for {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{name} is not finite"
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-12))


def exponential_matrix(amplitude: Tensor, decay: Tensor, size: int) -> Tensor:
    """``[size, size]`` or ``[H, size, size]`` coefficients of exponential mixing on a sequence, term by term."""
    distance = torch.tensor([[abs(i - j) for j in range(size)] for i in range(size)], dtype=amplitude.dtype)
    total = torch.zeros((), dtype=amplitude.dtype)
    for a, rate in zip(amplitude.unbind(-1), decay.unbind(-1), strict=True):
        total = total + a[..., None, None] * torch.exp(-rate[..., None, None] * distance)
    return total
