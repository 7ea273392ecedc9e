"""Kind of mixing defined outside the package: one coefficient per block distance, zero beyond the last one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mhla_kernels.mixing import Mixing
from torch import Tensor


@dataclass(frozen=True)
class Toeplitz(Mixing):
    """Mixing with coefficients ``m[i, j] = weights[|i - j|]`` for weights ``[L]`` or ``[H, L]``."""

    learned = ("weights",)
    weights: Tensor

    @property
    def heads(self) -> int | None:
        return len(self.weights) if self.weights.dim() == 2 else None

    def matrix(self, blocks: int) -> Tensor:
        index = torch.arange(blocks, device=self.weights.device)
        distance = (index[:, None] - index).abs()
        known = self.weights.shape[-1]
        return torch.where(distance < known, self.weights[..., distance.clamp(max=known - 1)], 0)


def toeplitz_matrix(weights: Tensor, size: int) -> Tensor:
    """Compute the coefficients of :class:`Toeplitz` one by one, ``[size, size]`` or ``[H, size, size]``."""
    zeros = weights.new_zeros(weights.shape[:-1])
    rows = [
        [weights[..., abs(i - j)] if abs(i - j) < weights.shape[-1] else zeros for j in range(size)]
        for i in range(size)
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)
