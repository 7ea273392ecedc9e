"""Local positional encoding: a depthwise convolution of the values over the token grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.attention.layout import BlockLayout, LayoutTables, Placement


class LocalPositionalEncoding(LayoutTables):
    """Local positional encoding: a depthwise convolution of the values over the token grid.

    Configurations call it ``lepe``, and the MHLA paper (arXiv 2601.07832) calls it CPE. Inputs and outputs are in the
    block order of ``layout``, or of the layout last passed to :meth:`fit`. Precomputed indices put the values into the order of
    the grid and back. The output of prefix tokens, which have no neighbors, is zero.

    Args:
        layout: token grid and its partition into blocks.
        channels: number of features of the values of all heads.
        width: width of the convolution along each axis, odd.
        buffers: whether the indices are buffers. If not, they are plain attributes, and copies of the module may have indices
            of different sizes.
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
        """Adapt the module to a different token layout. The weights of the convolution stay the same.

        Args:
            layout: new layout, with as many axes as the old one.
            device: device of the tokens; None for the CPU.
        """
        self.layout = layout
        for name, values in self.tables().items():
            setattr(self, name, values.to(device))

    @override
    def tables(self) -> dict[str, Tensor]:
        prefix = self.layout.prefix_tokens
        return {"to_grid": self.layout.inverse[prefix:], "from_grid": self.layout.order[prefix:] - prefix}

    def forward(self, v: Tensor, key_mask: Tensor | None = None, placement: Placement | None = None) -> Tensor:
        """Convolve values ``[B, N, channels]`` over the token grid. The output has the same shape and order.

        Args:
            v: values in the block order of the layout.
            key_mask: ``[B, N]`` bool, False for hidden tokens, which count as zeros; None if no token is hidden.
            placement: permutation of the tokens into block order, for this call only; None for the layout of the last
                :meth:`fit`.
        """
        v = hide_rows(v, key_mask)
        if placement is not None:
            return self._placed(v, placement)
        # Values [B, channels, ...], with the axes of the grid at the end.
        grid = v.index_select(1, self.to_grid).transpose(1, 2).unflatten(-1, self.layout.grid)
        out = self.conv(grid).flatten(2).transpose(1, 2).index_select(1, self.from_grid)
        return F.pad(out, (0, 0, self.layout.prefix_tokens, 0))

    def _placed(self, v: Tensor, placement: Placement) -> Tensor:
        """Convolve values ``[B, S, channels]`` in the order of ``placement``. Outputs in padding slots are arbitrary."""
        layout, order, inverse = placement.layout, placement.order, placement.inverse
        prefix = layout.prefix_tokens
        tokens = v[:, prefix:] if inverse is None else v.index_select(1, inverse[prefix:])
        out = self.conv(tokens.transpose(1, 2).unflatten(-1, layout.grid)).flatten(2).transpose(1, 2)
        if order is None:
            return F.pad(out, (0, 0, prefix, 0))
        # Prefix tokens have no place on the grid. The clamp gives them a valid index, whose value `where` drops.
        out = out.index_select(1, (order - prefix).clamp(min=0))
        return torch.where((order >= prefix)[:, None], out, 0)


def hide_rows(out: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return a copy of token vectors in which the vectors of hidden tokens are zero.

    Args:
        out: vectors of the tokens, ``[B, N, ...]``.
        key_mask: ``[B, N]`` bool, False for hidden tokens. If it is None, ``out`` itself is returned.
    """
    if key_mask is None:
        return out
    return torch.where(key_mask.view(*key_mask.shape, *(1,) * (out.dim() - 2)), out, 0)
