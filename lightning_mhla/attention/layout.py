"""Partition of a token grid into blocks: sequences, images and clips alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class BlockLayout:
    """Blocks of a 1-D, 2-D or 3-D token grid, and the order that lays each block's tokens side by side.

    Tokens count in raster order (last axis fastest), prefix tokens first. Axes that the blocks do not divide get blocks
    of uneven size, never padded tokens.

    Args:
        grid: tokens along each axis: ``(length,)``, ``(height, width)`` or ``(frames, height, width)``.
        blocks: blocks along each axis. Exactly one of this and ``block_size``.
        block_size: tokens in a block of a 1-D grid; the last block may be short.
        prefix_tokens: tokens before the grid (class, register): a block of their own.

    Raises:
        ValueError: when an axis has more blocks than tokens, or the arguments do not fit together.
    """

    grid: tuple[int, ...]
    blocks: tuple[int, ...] | None = None
    block_size: int | None = None
    prefix_tokens: int = 0
    edges: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        grid = tuple(self.grid)
        object.__setattr__(self, "grid", grid)
        if not 1 <= len(grid) <= 3 or min(grid) < 1:
            raise ValueError(f"grid {grid} must have one, two or three axes of at least one token")
        if self.prefix_tokens < 0:
            raise ValueError(f"prefix_tokens={self.prefix_tokens} must not be negative")
        if (self.blocks is None) == (self.block_size is None):
            raise ValueError("give exactly one of blocks (number along each axis) and block_size (tokens, 1-D only)")
        if self.block_size is not None:
            edges: tuple[tuple[int, ...], ...] = (self._equal_edges(self.block_size),)
        else:
            edges = tuple(self._balanced_edges())
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "blocks", tuple(len(axis) - 1 for axis in edges))

    def _equal_edges(self, block_size: int) -> tuple[int, ...]:
        if len(self.grid) != 1 or block_size < 1:
            raise ValueError(f"block_size={block_size} needs a 1-D grid and at least one token; grid is {self.grid}")
        return (*range(0, self.grid[0], block_size), self.grid[0])

    def _balanced_edges(self) -> list[tuple[int, ...]]:
        assert self.blocks is not None
        blocks = tuple(self.blocks)
        if len(blocks) != len(self.grid):
            raise ValueError(
                f"block_grid {blocks} has {len(blocks)} axes, but the token grid {self.grid} {len(self.grid)}"
            )
        if any(not 1 <= count <= length for count, length in zip(blocks, self.grid, strict=True)):
            raise ValueError(
                f"block_grid {blocks} does not fit the token grid {self.grid}: each axis needs at least one token a "
                f"block; use at most {self.grid}, or smaller patches"
            )
        return [
            tuple(i * length // count for i in range(count + 1))
            for length, count in zip(self.grid, blocks, strict=True)
        ]

    @property
    def block_grid(self) -> tuple[int, ...]:
        """Blocks along each axis of the grid (prefix tokens not counted)."""
        assert self.blocks is not None
        return self.blocks

    @property
    def num_tokens(self) -> int:
        """All tokens, prefix included."""
        return prod(self.grid) + self.prefix_tokens

    @property
    def num_blocks(self) -> int:
        """All blocks, the prefix's included."""
        return prod(self.block_grid) + (self.prefix_tokens > 0)

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of each block, in block order."""
        sizes = [1]
        for axis in self.edges:
            sizes = [size * (end - start) for size in sizes for start, end in pairwise(axis)]
        return (*([self.prefix_tokens] if self.prefix_tokens else []), *sizes)

    @cached_property
    def block_offsets(self) -> Tensor:
        """``[M + 1]`` int64 on the CPU: first token of each block, in block order, and the number of tokens."""
        return torch.tensor([0, *accumulate(self.block_sizes)], device="cpu")

    @cached_property
    def order(self) -> Tensor:
        """``[N]`` int64 on the CPU: raster index of the token at each position of the block order."""
        block = torch.zeros(1, dtype=torch.int64, device="cpu")
        for axis in self.edges:
            along = torch.bucketize(
                torch.arange(axis[-1], device="cpu"), torch.tensor(axis[1:], device="cpu"), right=True
            )
            block = (block[:, None] * (len(axis) - 1) + along).flatten()
        order = block.argsort(stable=True) + self.prefix_tokens
        return torch.cat([torch.arange(self.prefix_tokens, device="cpu"), order])

    @cached_property
    def inverse(self) -> Tensor:
        """``[N]`` int64 on the CPU: position in the block order of each raster token."""
        return self.order.argsort()

    @cached_property
    def is_raster(self) -> bool:
        """Whether the block order is the raster order, so that nothing needs to be moved.

        So it is where blocks lie in one piece: where an axis is cut, those before it are cut into single tokens.
        """
        last_cut = max((axis for axis, count in enumerate(self.block_grid) if count > 1), default=0)
        return self.block_grid[:last_cut] == self.grid[:last_cut]

    @cached_property
    def centers(self) -> Tensor:
        """``[M, axes]`` float64: centres of the blocks on the block grid, prefix not counted, in units of one block."""
        axes = [torch.arange(count, dtype=torch.float64, device="cpu") for count in self.block_grid]
        return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=-1)

    @cached_property
    def operator_blocks(self) -> dict[str, Any]:
        """``block_size`` where all blocks but a short last one are equal, else ``block_offsets``, for the operator."""
        sizes = self.block_sizes
        if set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0]:
            return {"block_size": sizes[0]}
        return {"block_offsets": (0, *accumulate(sizes))}


class LayoutTables(nn.Module):
    """A module whose buffers follow from its layout: rebuilt wherever they would be left without values.

    ``to_empty`` and FSDP2 give memory without content to what was on the meta device, and no checkpoint holds tables.
    """

    def tables(self) -> dict[str, Tensor]:
        """Buffers by name, with their values on the CPU."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayoutTables:
        super()._apply(fn, recurse)
        for name, values in self.tables().items():
            buffer = self._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                self._buffers[name] = values.to(buffer.device)
        return self
