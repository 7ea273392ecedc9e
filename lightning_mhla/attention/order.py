"""Order in which attention processes the tokens: block order, raster order, or the order of the layer's inputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.layout import BlockLayout, LayoutTables, Placement


class TokenOrder(LayoutTables):
    """Base class of modules that permute the tokens of an attention layer into the order in which it processes them.

    Call :meth:`fit` before the first use.

    Args:
        block_ordered: whether inputs and outputs of the layer are in block order (block by block) instead of raster order (row
            by row).
        buffers: whether the permutations are registered as buffers. If not, they are plain attributes, so that copies of the
            model, such as a weight average, may have permutations of different sizes.
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
        """Compute and store the permutation for a token layout.

        Args:
            layout: token grid and its partition into blocks.
            device: device of the tokens; None for the CPU.
        """
        self.layout = layout
        tables = self.tables()
        self.order = tables["order"].to(device) if tables else None
        self.inverse = tables["inverse"].to(device) if tables else None

    @property
    def placement(self) -> Placement:
        """Layout of the last :meth:`fit`, and the permutation of input tokens into the order in which attention reads them."""
        return Placement(self.layout, self.order, self.inverse, {})

    def operator_layout(self, layout: BlockLayout) -> BlockLayout:
        """Return a layout of the same grid whose block order is the order that this class produces.

        Subclasses implement this method.
        """
        raise NotImplementedError


class BlockOrder(TokenOrder):
    """Module that puts tokens into block order, in which the tokens of each block are contiguous."""

    @override
    def tables(self) -> dict[str, Tensor]:
        """Return a dict with the permutation from raster to block order (``order``) and its inverse (``inverse``).

        Both are ``[N]`` int64. The dictionary is empty if no permutation is needed.
        """
        if self.block_ordered or self.layout.is_raster:
            return {}
        return {"order": self.layout.order, "inverse": self.layout.inverse}

    @override
    def operator_layout(self, layout: BlockLayout) -> BlockLayout:
        return layout


class RasterOrder(TokenOrder):
    """Module that puts tokens into raster order (row by row), for attention that reads them one after the other."""

    @override
    def tables(self) -> dict[str, Tensor]:
        """Return a dict with the permutation from block to raster order (``order``) and its inverse (``inverse``).

        Both are ``[N]`` int64. The dictionary is empty if no permutation is needed.
        """
        if not self.block_ordered or self.layout.is_raster:
            return {}
        return {"order": self.layout.inverse, "inverse": self.layout.order}

    @override
    def operator_layout(self, layout: BlockLayout) -> BlockLayout:
        """Return a layout in which the token grid is a single block, so that its block order is raster order."""
        return _raster_layout(layout)


class GivenOrder(TokenOrder):
    """Module that keeps the order of the layer's inputs.

    The module is for kinds of attention that give the same results in block order and in raster order. In a backbone that puts
    the tokens of all layers into block order, the inputs are in block order; otherwise, they are in raster order. Causal
    attention has a 1-D grid, in which the two orders are the same.
    """

    @override
    def tables(self) -> dict[str, Tensor]:
        """Return an empty dictionary, because no permutation is needed."""
        return {}

    @override
    def operator_layout(self, layout: BlockLayout) -> BlockLayout:
        """Return ``layout`` if the inputs are in block order; otherwise, a layout whose block order is raster order."""
        return layout if self.block_ordered else _raster_layout(layout)


def _raster_layout(layout: BlockLayout) -> BlockLayout:
    return replace(layout, blocks=(1,) * len(layout.grid), block_size=None)
