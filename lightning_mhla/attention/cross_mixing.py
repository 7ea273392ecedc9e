"""Mixing coefficients of cross-attention, between the blocks of the queries and the blocks of the context."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from mhla_kernels.blocks import is_dynamic
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention.config import MixingInit
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.mixing import (
    LOWER,
    ExponentialCoefficients,
    FreeCoefficients,
    bounded,
    check_init,
    for_heads,
)


def initial_cross_mixing(layout: BlockLayout, context_layout: BlockLayout, init: MixingInit = "locality") -> Tensor:
    """Compute initial mixing coefficients between the Mq blocks of the queries and the Mk blocks of the context.

    With ``"uniform"``, or if the two grids have different numbers of axes, all coefficients are 1 / Mk. With ``"locality"``,
    the query grid is scaled to the context grid along each axis, so that both have the same ends, and coefficients decrease
    with the Euclidean distance between block centers. They are proportional to ``1 - dist(i, j) / max_k dist(i, k)``. Blocks of
    prefix tokens have distance 0 to all blocks. For equal grids, the coefficients equal those of self-attention
    (:func:`lightning_mhla.attention.mixing.locality_mixing`).

    Args:
        layout: token grid of the queries and its partition into blocks.
        context_layout: token grid of the context and its partition into blocks.
        init: ``"locality"`` or ``"uniform"``.

    Returns:
        ``[Mq, Mk]`` float32 on the CPU, with rows that sum to 1.

    Raises:
        ValueError: if ``init`` is unknown.
    """
    check_init(init)
    if init == "uniform" or len(layout.grid) != len(context_layout.grid):
        return torch.full((layout.num_blocks, context_layout.num_blocks), 1 / context_layout.num_blocks, device="cpu")
    ratios = zip(context_layout.block_grid, layout.block_grid, strict=True)
    scale = torch.tensor([keys / queries for keys, queries in ratios], dtype=torch.float64, device="cpu")
    # Query block i covers i * scale to (i + 1) * scale in blocks of the context, and context block j covers j to j + 1.
    distance = torch.cdist((layout.centers + 0.5) * scale - 0.5, context_layout.centers)
    farthest = distance.amax(-1, keepdim=True)
    weight = 1 - torch.where(farthest > 0, distance / farthest, 0)
    prefix = (int(context_layout.prefix_tokens > 0), 0, int(layout.prefix_tokens > 0), 0)
    weight = nn.functional.pad(weight, prefix, value=1.0)
    # the only blocks of a row may all have the largest distance, such as two blocks on either side of one query block
    weight = torch.where(weight.sum(-1, keepdim=True) > 0, weight, 1.0)
    return (weight / weight.sum(-1, keepdim=True)).float()


class DenseCrossCoefficients(FreeCoefficients):
    """Dense mixing coefficients of cross-attention, with a free coefficient for each query block and each context block.

    Args:
        layout: token grid of the queries and its partition into Mq blocks.
        context_layout: token grid of the context and its partition into Mk blocks.
        heads: number of heads, each with its own coefficients; None for coefficients shared by all heads.
        init: initial coefficients, see :func:`initial_cross_mixing`.
        trainable: whether the coefficients are trained.

    Raises:
        ValueError: if ``init`` is unknown.
    """

    def __init__(
        self,
        layout: BlockLayout,
        context_layout: BlockLayout,
        heads: int | None = None,
        init: MixingInit = "locality",
        trainable: bool = True,
    ) -> None:
        super().__init__(initial_cross_mixing(layout, context_layout, init), heads, trainable)
        self.grid, self.layouts = layout.block_grid, (layout, context_layout)

    def forward(  # type: ignore[override]
        self, queries: tuple[int, ...], keys: tuple[int, ...], first: int = 0
    ) -> Tensor:
        """Return the mixing coefficients of one call, ``[Mq, Mk]``, or ``[H, Mq, Mk]`` if each of H heads has its own.

        Args:
            queries: number of query blocks along each axis.
            keys: number of context blocks along each axis.
            first: number of query blocks before these, for a later part of a sequence.

        Raises:
            ValueError: if there are more blocks than the coefficients were made for, or if a layout without ``block_size`` has
                a different number of blocks along an axis than the coefficients were made for.
        """
        blocks = []
        for name, grid, skipped, layout in zip(
            ("query", "context"), (queries, keys), (first, 0), self.layouts, strict=True
        ):
            count, covered = skipped + prod(grid) + (layout.prefix_tokens > 0), layout.num_blocks
            if count > covered or (layout.block_size is None and grid != layout.block_grid):
                raise ValueError(
                    f"{list(grid)} {name} blocks{f' after {skipped} others' if skipped else ''} do not fit dense coefficients, "
                    f"which were made for {list(layout.block_grid)}; mixing: exponential takes any number"
                )
            blocks.append(count)
        weight = bounded(self.weight)
        # a slice that may be the complete matrix would fix the size in an exported graph
        if any(map(is_dynamic, blocks)):
            rows, columns = (torch.arange(a, b, device=weight.device) for a, b in ((first, blocks[0]), (0, blocks[1])))
            return weight[..., rows[:, None], columns]
        return weight[..., first : blocks[0], : blocks[1]]

    @override
    def carried(self, name: str, values: Tensor, block_grid: tuple[int, ...] | None) -> Tensor | None:
        """Convert coefficients of another layer to the number of heads of this layer.

        Args:
            name: name of the parameter; ignored, because there is only one.
            values: coefficients of the other layer, ``[Mq, Mk]`` or ``[H', Mq, Mk]`` for H' heads.
            block_grid: number of query blocks along each axis in the other layer; None if it is unknown.

        Returns:
            Values in the shape of this layer's parameter; None if the blocks differ, or if both layers have coefficients for
            each head and the numbers of heads differ.
        """
        if values.shape[-2:] != self.weight.shape[-2:] or block_grid not in (None, self.grid):
            return None
        return for_heads(bounded(values), self.weight)


class ExponentialCrossCoefficients(ExponentialCoefficients):
    """Exponential mixing coefficients of cross-attention, which are sums of exponentials of the distance between blocks.

    Block i of the queries is at position ``(i + 1/2) s - 1/2`` along an axis, in blocks of the context. For grids, s is the
    number of context blocks divided by the number of query blocks, so that both grids have the same ends. For sequences, s is
    this ratio for the layouts that the layer was built with, and stays the same if the lengths change between calls. The
    coefficients take any number of blocks, and their matrix is computed in each call.

    Args:
        layout: token grid of the queries and its partition into blocks, without prefix tokens.
        context_layout: token grid of the context, with as many axes, and its partition into blocks, without prefix tokens.
        terms: number of exponentials.
        heads: number of heads, each with its own sum; None for one sum shared by all heads.
        init: ``"locality"`` or ``"uniform"``, see :class:`ExponentialCoefficients`.
        trainable: whether the coefficients are trained.
        min_decay: smallest decay per block of the context, from 1e-5 to 2.5.

    Raises:
        ValueError: if the grids differ in the number of axes or have prefix tokens, ``init`` is unknown, ``terms`` is below 1,
            or ``min_decay`` is out of range.
    """

    def __init__(
        self,
        layout: BlockLayout,
        context_layout: BlockLayout,
        terms: int = 4,
        heads: int | None = None,
        init: MixingInit = "locality",
        trainable: bool = True,
        min_decay: float = LOWER,
    ) -> None:
        if len(layout.grid) != len(context_layout.grid) or layout.prefix_tokens:
            raise ValueError(
                f"exponential mixing needs queries and context on the same axes, without prefix tokens, not {layout} and "
                f"{context_layout}; use mixing: dense"
            )
        super().__init__(context_layout, terms, heads, init, trainable=trainable, min_decay=min_decay)
        self.layouts, self.sequence = (layout, context_layout), layout.block_size is not None

    @override
    def forward(  # type: ignore[override]
        self, queries: tuple[int, ...], keys: tuple[int, ...], first: int = 0
    ) -> Tensor:
        """Return the mixing coefficients of one call, ``[Mq, Mk]``, or ``[H, Mq, Mk]`` if each of H heads has its own.

        Args:
            queries: number of query blocks along each axis.
            keys: number of context blocks along each axis.
            first: number of query blocks before these, for a later part of a sequence.
        """
        mixing = super().forward(keys)
        built = [layout.block_grid for layout in self.layouts] if self.sequence else [queries, keys]
        # [..., terms, axes], also for a sequence
        terms: Any = mixing.decay[..., None] if self.grid is None else mixing.decay
        weight = mixing.amplitude[..., None, None]
        factors = []
        for axis, (count, length) in enumerate(zip(queries, keys, strict=True)):
            scale = built[1][axis] / built[0][axis]
            place = (torch.arange(count, device=weight.device) + first + 0.5) * scale - 0.5
            distance = (place[:, None] - torch.arange(length, device=weight.device)).abs()
            # [..., terms, query blocks, context blocks] of one axis
            factors.append((-terms[..., axis, None, None] * distance).exp())
        return (weight * _products(factors)).sum(-3)

    @override
    def matrix(self) -> Tensor:
        """Return the coefficients between the blocks of the layouts that the layer was built with, for analysis.

        Returns:
            ``[Mq, Mk]``, or ``[H, Mq, Mk]`` if each of H heads has its own coefficients.
        """
        coefficients: Tensor = self(self.layouts[0].block_grid, self.layouts[1].block_grid)
        return coefficients


def _products(factors: Sequence[Tensor]) -> Tensor:
    """Multiply the weights along the axes of a grid, for all pairs of a query block and a key block in row-major order.

    Args:
        factors: for each axis, weights ``[..., queries, keys]`` between the positions of query blocks and key blocks.

    Returns:
        Products ``[..., Mq, Mk]`` for Mq query blocks and Mk key blocks in total.
    """
    product, *others = factors
    for factor in others:
        # [..., Q, 1, K, 1] times [..., 1, q, 1, k], so that the later axis changes fastest
        product = (product[..., :, None, :, None] * factor[..., None, :, None, :]).flatten(-4, -3).flatten(-2, -1)
    return product
