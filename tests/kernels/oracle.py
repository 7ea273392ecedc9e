"""Independent implementation of the operator's definition, head by head in float64, without code of the package."""

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
    causal: bool | str,
    normalize: bool,
    eps: float = 1e-6,
    key_mask: Tensor | None = None,
    constant_normalizer: bool = False,
) -> Tensor:
    """Compute the outputs of MHLA by its definition.

    Args:
        q: queries after the feature map, ``[B, N, H, Dk]``.
        k: keys after the feature map, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        mixing: mixing coefficients, ``[M, M]`` or ``[H, M, M]``.
        starts: first token of each block, and the end, for each packed sequence.
        causal: whether attention is causal; ``"block"`` if tokens attend to all of their own block and to earlier blocks.
        normalize: whether weights are divided by their sum.
        eps: term added to the normalizer.
        key_mask: mask of the keys to attend to, ``[B, N]`` bool; None for all.
        constant_normalizer: whether to ignore the normalizer in the gradient, to measure how much of the gradient it cancels.

    Returns:
        Outputs ``[B, N, H, Dv]`` float64.
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
    if causal == "block":
        order = block
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
    """Return the first tokens of blocks of equal size, of which the last may be shorter, and the end."""
    return [[*range(0, tokens, block_size), tokens]]


def packed_starts(bounds: list[int], block_size: int) -> list[list[int]]:
    """Return the first tokens of blocks that are counted from each packed sequence's first token, and the ends."""
    return [[*range(a, b, block_size), b] for a, b in pairwise(bounds)]


def relative_error(name: str, got: Tensor, want: Tensor) -> float:
    """Return ``||got - want|| / ||want||``, and check that ``got`` is finite and has the shape of ``want``."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} for {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{name} is not finite"
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-12))


def exponential_matrix(amplitude: Tensor, decay: Tensor, size: int) -> Tensor:
    """Compute the coefficients of exponential mixing, ``[size, size]`` or ``[H, size, size]``, term by term."""
    distance = torch.tensor([[abs(i - j) for j in range(size)] for i in range(size)], dtype=amplitude.dtype)
    total = torch.zeros((), dtype=amplitude.dtype)
    for a, rate in zip(amplitude.unbind(-1), decay.unbind(-1), strict=True):
        total = total + a[..., None, None] * torch.exp(-rate[..., None, None] * distance)
    return total
