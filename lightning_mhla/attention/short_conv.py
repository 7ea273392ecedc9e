"""Short causal convolution over the tokens, with a state for generation token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over the tokens, which can keep packed sequences separate.

    Args:
        channels: number of channels of a token.
        taps: width of the convolution: the number of tokens that each output depends on, including the output's own token.
        bias: whether the convolution has a bias.
    """

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(taps, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly from the range that PyTorch's convolutions use, and set the bias to 0."""
        nn.init.uniform_(self.weight, -(self.taps**-0.5), self.taps**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def pass_through(self) -> None:
        """Set the weights so that the output equals the input, apart from the bias."""
        nn.init.zeros_(self.weight)
        self.weight[-1] = 1.0

    def forward(self, x: Tensor, last: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Convolve tokens ``[B, N, channels]``; the output has the same shape.

        Args:
            x: tokens.
            last: the ``taps - 1`` tokens before ``x``, ``[B, taps - 1, channels]``; None for zeros.
            positions: position of each token in its packed sequence, ``[N]``; None for one sequence in each row.
        """
        tokens, weight = x.shape[1], self.weight.to(x.dtype)
        x = F.pad(x, (0, 0, self.taps - 1, 0)) if last is None else torch.cat([last.to(x.dtype), x], 1)
        # weight[-1] belongs to the token itself, weight[-1 - back] to the token that is `back` places before it.
        out = x[:, self.taps - 1 :] * weight[-1]
        for back in range(1, self.taps):
            shifted = x[:, self.taps - 1 - back : self.taps - 1 - back + tokens]
            if positions is not None:
                # The first tokens of a packed sequence do not read the sequence before it.
                shifted = shifted * (positions >= back)[:, None]
            out = torch.addcmul(out, shifted, weight[-1 - back])
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def carry(self, x: Tensor, last: Tensor | None, counts: Sequence[int]) -> Tensor:
        """Return the latest ``taps - 1`` tokens of each row, which :meth:`forward` needs as ``last`` in the next call.

        Args:
            x: tokens ``[B, N, channels]``. Rows with fewer tokens than others are padded on the right.
            last: the ``taps - 1`` tokens before ``x``, ``[B, taps - 1, channels]``; None for zeros.
            counts: number of tokens of ``x`` in each row, without padding.

        Returns:
            Latest tokens, ``[B, taps - 1, channels]``.
        """
        last = x.new_zeros(len(x), self.taps - 1, x.shape[-1]) if last is None else last
        x = torch.cat([last.to(x.dtype), x], 1)
        if len(set(counts)) == 1:
            return x[:, counts[0] : counts[0] + self.taps - 1].clone()  # a view would keep the whole prompt
        index = torch.tensor(counts, device=x.device)[:, None] + torch.arange(self.taps - 1, device=x.device)
        return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
