"""Local positional encoding: a depthwise convolution of the values over the token grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.attention.layout import BlockLayout, LayoutTables, Placement


class LocalPositionalEncoding(LayoutTables):
    """Depthwise convolution of the values over the token grid; ``lepe`` in configurations, CPE in the MHLA paper.

    Inputs and outputs are in block order. Precomputed indices bring the values into the order of the grid and back. The output
    of prefix tokens, which have no neighbors, is zero.
    """

    to_grid: Tensor
    from_grid: Tensor

    def __init__(self, layout: BlockLayout, channels: int, width: int, buffers: bool = True) -> None:
        super().__init__()
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(layout.grid) - 1]
        self.conv = kind(channels, channels, width, padding=width // 2, groups=channels)
        if buffers:
            self.register_buffer("to_grid", None, persistent=False)
            self.register_buffer("from_grid", None, persistent=False)
        self.fit(layout)

    def fit(self, layout: BlockLayout, device: torch.device | None = None) -> None:
        """Adapt the module to a different token layout; the weights of the convolution stay the same."""
        self.layout = layout
        for name, values in self.tables().items():
            setattr(self, name, values.to(device))

    @override
    def tables(self) -> dict[str, Tensor]:
        prefix = self.layout.prefix_tokens
        return {"to_grid": self.layout.inverse[prefix:], "from_grid": self.layout.order[prefix:] - prefix}

    def forward(self, v: Tensor, key_mask: Tensor | None = None, placement: Placement | None = None) -> Tensor:
        """Convolve values ``[B, N, channels]``; the output has the same shape.

        Args:
            v: values in block order.
            key_mask: ``[B, N]`` bool, False for hidden tokens, which count as zeros.
            placement: permutation of the tokens into block order; None for the one of the last :meth:`fit`.
        """
        v = hide_rows(v, key_mask)
        if placement is not None:
            return self._placed(v, placement)
        grid = v.index_select(1, self.to_grid).transpose(1, 2).unflatten(-1, self.layout.grid)
        out = self.conv(grid).flatten(2).transpose(1, 2).index_select(1, self.from_grid)
        return F.pad(out, (0, 0, self.layout.prefix_tokens, 0))

    def _placed(self, v: Tensor, placement: Placement) -> Tensor:
        """Convolve values in block order when blocks may have empty slots; the outputs of empty slots have no meaning."""
        layout, order, inverse = placement.layout, placement.order, placement.inverse
        prefix = layout.prefix_tokens
        tokens = v[:, prefix:] if inverse is None else v.index_select(1, inverse[prefix:])
        out = self.conv(tokens.transpose(1, 2).unflatten(-1, layout.grid)).flatten(2).transpose(1, 2)
        if order is None:
            return F.pad(out, (0, 0, prefix, 0))
        out = out.index_select(1, (order - prefix).clamp(min=0))
        return torch.where((order >= prefix)[:, None], out, 0)


def hide_rows(out: Tensor, key_mask: Tensor | None) -> Tensor:
    """Set tokens of ``out`` ``[B, N, ...]`` to zero where ``key_mask`` ``[B, N]`` is False."""
    if key_mask is None:
        return out
    return torch.where(key_mask.view(*key_mask.shape, *(1,) * (out.dim() - 2)), out, 0)
