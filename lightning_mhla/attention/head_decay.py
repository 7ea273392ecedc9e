"""Learned decays, step sizes and skip-connection scales for each head, used by Mamba-2 and Gated DeltaNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class HeadDecay(nn.Module):
    """Learned projection of tokens to a step size and a decay for each head.

    Mamba-2 (arXiv 2405.21060) and Gated DeltaNet (arXiv 2412.06464) use it. For a token x, ``step = softplus(W x + bias)``
    and ``log_decay = -exp(rate) step``, where W, ``rate`` and ``bias`` are learned. Initially, ``exp(rate)`` is uniform between
    ``least_rate`` and 16, and ``softplus(bias)`` is log-uniform between 0.001 and 0.1.

    Args:
        dim: width of a token.
        heads: number of heads.
        least_rate: lower bound of the initial ``exp(rate)``.
    """

    def __init__(self, dim: int, heads: int, least_rate: float) -> None:
        super().__init__()
        self.least_rate = least_rate
        self.proj = nn.Linear(dim, heads, bias=False)
        self.rate = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new initial values for the learned ``rate`` and ``bias`` of each head.

        The learned matrix that maps tokens to step sizes is not changed.
        """
        # The lower bound is 1 in Mamba-2 and 0 in Gated DeltaNet. A rate of 0 has no logarithm, so rates are clamped.
        rates = torch.empty_like(self.rate).uniform_(self.least_rate, 16)
        self.rate.copy_(rates.clamp(min=1e-3).log())
        # 10 ** -u for u between 1 and 3, which is log-uniform between 0.001 and 0.1
        steps = torch.empty_like(self.bias).uniform_(1, 3).neg().mul(torch.log(torch.tensor(10.0))).exp()
        self.bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the step sizes and the log-decays of tokens ``[B, N, dim]``.

        Returns:
            Step sizes and log-decays for H heads, both ``[B, N, H]`` in float32 (float64 for float64 inputs).
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        steps = F.softplus(self.proj(x).to(wide) + self.bias.to(wide))
        return steps, -self.rate.to(wide).exp() * steps


class HeadScale(nn.Module):
    """Learned scale of each head's skip connection, initially 1 (the parameter D of Mamba-2).

    Args:
        heads: number of heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the skip-connection scales of all heads to 1."""
        nn.init.ones_(self.weight)
