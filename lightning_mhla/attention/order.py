"""Order of the tokens in an operator: in blocks for most kinds, in raster order for scans."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.layout import BlockLayout, LayoutTables, Placement


class TokenOrder(LayoutTables):
    """Permutation of a layer's tokens into the order of its operator, and back. Call :meth:`fit` before the first use.

    Args:
        block_ordered: whether tokens enter and leave in block order instead of raster order.
        buffers: whether the permutations are buffers. If not, they are plain attributes, which may have different sizes in a
            copy of the model, such as a weight average.
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
        """Compute the permutation for a token layout, on ``device`` (None for the CPU)."""
        self.layout = layout
        tables = self.tables()
        self.order = tables["order"].to(device) if tables else None
        self.inverse = tables["inverse"].to(device) if tables else None

    @property
    def placement(self) -> Placement:
        """Permutation of the tokens, for the layout of the last :meth:`fit`."""
        return Placement(self.layout, self.order, self.inverse, {})

    @staticmethod
    def operator_layout(layout: BlockLayout) -> BlockLayout:
        """Return the token layout whose block order is the order in which the operator takes the tokens."""
        raise NotImplementedError


class BlockOrder(TokenOrder):
    """Token order in which the tokens of each block are consecutive; also for operators to which the order does not matter."""

    @override
    def tables(self) -> dict[str, Tensor]:
        """Return the permutation from raster to block order and its inverse, by name; empty if no permutation is needed."""
        if self.block_ordered or self.layout.is_raster:
            return {}
        return {"order": self.layout.order, "inverse": self.layout.inverse}

    @staticmethod
    @override
    def operator_layout(layout: BlockLayout) -> BlockLayout:
        return layout


class RasterOrder(TokenOrder):
    """Token order of an operator that scans the tokens one after the other, in raster order."""

    @override
    def tables(self) -> dict[str, Tensor]:
        """Return the permutation from block to raster order and its inverse, by name; empty if no permutation is needed."""
        if not self.block_ordered or self.layout.is_raster:
            return {}
        return {"order": self.layout.inverse, "inverse": self.layout.order}

    @staticmethod
    @override
    def operator_layout(layout: BlockLayout) -> BlockLayout:
        """Return the layout of the same token grid as a single block, whose block order is raster order."""
        return replace(layout, blocks=(1,) * len(layout.grid), block_size=None)
