"""Short causal convolution over the tokens, with a state for generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShortConvolution(nn.Module):
    """Causal depthwise convolution along the tokens, optionally without mixing packed sequences.

    Args:
        channels: number of channels of a token.
        taps: number of tokens that an output depends on, including its own.
        bias: whether a bias is added.
    """

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(taps, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw uniform weights in the range that torch's convolutions use; set the bias to 0."""
        nn.init.uniform_(self.weight, -(self.taps**-0.5), self.taps**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def pass_through(self) -> None:
        """Set the weights so that the output equals the input."""
        nn.init.zeros_(self.weight)
        self.weight[-1] = 1.0

    def forward(self, x: Tensor, last: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Convolve tokens ``[B, N, channels]``; the output has the same shape.

        Args:
            x: tokens.
            last: ``[B, taps - 1, channels]``, the tokens before ``x``; None for zeros.
            positions: ``[N]``, position of each token in its packed sequence; None for one sequence per row.
        """
        tokens, weight = x.shape[1], self.weight.to(x.dtype)
        x = F.pad(x, (0, 0, self.taps - 1, 0)) if last is None else torch.cat([last.to(x.dtype), x], 1)
        out = x[:, self.taps - 1 :] * weight[-1]
        for back in range(1, self.taps):
            shifted = x[:, self.taps - 1 - back : self.taps - 1 - back + tokens]
            if positions is not None:
                shifted = shifted * (positions >= back)[:, None]
            out = torch.addcmul(out, shifted, weight[-1 - back])
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def carry(self, x: Tensor, last: Tensor | None, counts: Sequence[int]) -> Tensor:
        """Return the latest inputs ``[B, taps - 1, channels]``, to pass as ``last`` with the tokens that follow ``x``.

        Args:
            x: tokens ``[B, N, channels]``, padded on the right.
            last: latest inputs before ``x``; None for zeros.
            counts: number of tokens of ``x`` in each row without padding.
        """
        last = x.new_zeros(len(x), self.taps - 1, x.shape[-1]) if last is None else last
        x = torch.cat([last.to(x.dtype), x], 1)
        if len(set(counts)) == 1:
            return x[:, counts[0] : counts[0] + self.taps - 1].clone()  # a view would keep the whole prompt
        index = torch.tensor(counts, device=x.device)[:, None] + torch.arange(self.taps - 1, device=x.device)
        return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
