"""Order of the tokens in an operator: in blocks for most kinds, in raster order for scans."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.layout import BlockLayout, LayoutTables, Placement


class TokenOrder(LayoutTables):
    """Permutation of a layer's tokens into the order of its operator, and back. :meth:`fit` comes before the first use.

    Args:
        block_ordered: whether tokens enter and leave in block order instead of raster order.
        buffers: whether the permutations are buffers. As plain attributes, they let a copy of the model, such as a weight
            average, be fitted to different sizes.
    """

    order: Tensor | None
    inverse: Tensor | None

    def __init__(self, block_ordered: bool, buffers: bool) -> None:
        super().__init__()
        self.block_ordered = block_ordered
        if buffers:
            self.register_buffer("order", None, persistent=False)
            self.register_buffer("inverse", None, persistent=False)

    def fit(self, layout: BlockLayout, device: torch.device | None = None) -> None:
        """Switch to the permutation of a layout's tokens."""
        self.layout = layout
        tables = self.tables()
        self.order = tables["order"].to(device) if tables else None
        self.inverse = tables["inverse"].to(device) if tables else None

    @property
    def placement(self) -> Placement:
        """Permutation of the tokens of the last :meth:`fit`."""
        return Placement(self.layout, self.order, self.inverse, {})

    @staticmethod
    def operator_layout(layout: BlockLayout) -> BlockLayout:
        """Return the layout whose block order is the order of the operator."""
        raise NotImplementedError


class BlockOrder(TokenOrder):
    """Order of an operator that works on blocks, or that may have its tokens in any order."""

    @override
    def tables(self) -> dict[str, Tensor]:
        """Return the permutation from raster order into blocks and back; nothing if tokens enter in blocks."""
        if self.block_ordered or self.layout.is_raster:
            return {}
        return {"order": self.layout.order, "inverse": self.layout.inverse}

    @staticmethod
    @override
    def operator_layout(layout: BlockLayout) -> BlockLayout:
        return layout


class RasterOrder(TokenOrder):
    """Order of an operator that scans the tokens one after the other."""

    @override
    def tables(self) -> dict[str, Tensor]:
        """Return the permutation from blocks into raster order and back; nothing if tokens enter in raster order."""
        if not self.block_ordered or self.layout.is_raster:
            return {}
        return {"order": self.layout.inverse, "inverse": self.layout.order}

    @staticmethod
    @override
    def operator_layout(layout: BlockLayout) -> BlockLayout:
        """Return the same grid as a single block, whose order is raster order."""
        return replace(layout, blocks=(1,) * len(layout.grid), block_size=None)
