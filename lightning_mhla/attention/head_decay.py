"""Parameters of each head in Mamba-2 and Gated DeltaNet: steps, decays, and a share of the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class HeadDecay(nn.Module):
    """Steps and decays for each token and head, as Mamba-2 (arXiv 2405.21060) and Gated DeltaNet (arXiv 2412.06464) have them.

    ``step = softplus(W x + bias)`` and ``log_decay = -exp(rate) step``. At the start ``exp(rate)`` is uniform in
    ``least_rate .. 16`` and the steps of x = 0 log-uniform in 0.001 .. 0.1.

    Args:
        dim: width of a token.
        heads: their number.
        least_rate: see above.
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
        """Draw new rates and steps; the projection is drawn by itself."""
        rates = torch.empty_like(self.rate).uniform_(self.least_rate, 16)
        self.rate.copy_(rates.clamp(min=1e-3).log())
        steps = torch.empty_like(self.bias).uniform_(1, 3).neg().mul(torch.log(torch.tensor(10.0))).exp()
        self.bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, N, dim]`` to steps and log-decays ``[B, N, H]``, float32."""
        steps = F.softplus(self.proj(x).float() + self.bias.float())
        return steps, -self.rate.float().exp() * steps


class HeadScale(nn.Module):
    """A number for each of ``heads`` heads, 1 at the start (Mamba-2's D)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)
