"""Partition of a token grid into blocks: sequences, images and clips alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from mhla_kernels.blocks import surely_equal
from torch import Tensor, nn


class Placement(NamedTuple):
    """Places of an input's tokens in the order of the operator, as a graph computes them.

    Attributes:
        layout: token grid and its blocks; sizes may be open.
        order: ``[S]`` int64, raster index of the token in each place; None where nothing moves.
        inverse: ``[N]`` int64, place of each raster token; None where nothing moves.
        blocks: ``block_size`` or ``block_offsets`` for the operator.
        filled: ``[S]`` bool, places that hold a token; None where all do.
    """

    layout: BlockLayout
    order: Tensor | None
    inverse: Tensor | None
    blocks: dict[str, Any]
    filled: Tensor | None = None


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

    def __post_init__(self) -> None:
        grid = tuple(self.grid)
        object.__setattr__(self, "grid", grid)
        if not 1 <= len(grid) <= 3 or min(grid) < 1:
            raise ValueError(f"grid {grid} must have one, two or three axes of at least one token")
        if self.prefix_tokens < 0:
            raise ValueError(f"prefix_tokens={self.prefix_tokens} must not be negative")
        if (self.blocks is None) == (self.block_size is None):
            raise ValueError("give exactly one of blocks (number along each axis) and block_size (tokens, 1-D only)")
        blocks = self._counted(self.block_size) if self.block_size is not None else self._checked(self.blocks or ())
        object.__setattr__(self, "blocks", blocks)

    def _counted(self, block_size: int) -> tuple[int, ...]:
        if len(self.grid) != 1 or block_size < 1:
            raise ValueError(f"block_size={block_size} needs a 1-D grid and at least one token; grid is {self.grid}")
        return ((self.grid[0] + block_size - 1) // block_size,)

    def _checked(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        blocks = tuple(blocks)
        if len(blocks) != len(self.grid):
            raise ValueError(
                f"block_grid {blocks} has {len(blocks)} axes, but the token grid {self.grid} {len(self.grid)}"
            )
        if any(not 1 <= count <= length for count, length in zip(blocks, self.grid, strict=True)):
            raise ValueError(
                f"block_grid {blocks} does not fit the token grid {self.grid}: each axis needs at least one token a "
                f"block; use at most {self.grid}, or smaller patches"
            )
        return blocks

    @cached_property
    def edges(self) -> tuple[tuple[int, ...], ...]:
        """First token of each block along each axis, and the axis's length."""
        if self.block_size is not None:
            return ((*range(0, self.grid[0], self.block_size), self.grid[0]),)
        return tuple(
            tuple(i * length // count for i in range(count + 1))
            for length, count in zip(self.grid, self.block_grid, strict=True)
        )

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

    def place(self, device: torch.device, gaps: bool = True) -> Placement:
        """Places of the tokens by arithmetic alone, for graphs: no loop over tokens, and no size becomes a constant.

        Blocks that may differ in size get as many places as the largest has tokens, so that all are equal; the places that
        stay empty are masked.

        Args:
            device: device of the tokens.
            gaps: whether places may stay empty. Without them, sizes become constants of the graph.
        """
        if self.block_size is not None:
            return Placement(self, None, None, {"block_size": self.block_size})
        if not gaps:
            order, inverse = (None, None) if self.is_raster else (self.order.to(device), self.inverse.to(device))
            return Placement(self, order, inverse, self.operator_blocks)
        sizes = [(length + count - 1) // count for length, count in zip(self.grid, self.block_grid, strict=True)]
        size = prod(sizes)
        slots = size if size >= self.prefix_tokens else self.prefix_tokens
        order, filled = self._tokens_of_places(sizes, device)
        inverse = self._places_of_tokens(sizes, slots, device)
        if self.prefix_tokens:
            order, filled = (nn.functional.pad(table, (0, slots - size)) for table in (order, filled))
            prefix = torch.arange(slots, device=device)
            order = torch.cat([prefix.clamp(max=self.prefix_tokens - 1)[None], order + self.prefix_tokens])
            filled = torch.cat([(prefix < self.prefix_tokens)[None], filled])
            inverse = torch.cat([prefix[: self.prefix_tokens], inverse + slots])
        even = all(surely_equal(length % count, 0) for length, count in zip(self.grid, self.block_grid, strict=True))
        full = even and not self.prefix_tokens
        return Placement(self, order.flatten(), inverse, {"block_size": slots}, None if full else filled.flatten())

    def _tokens_of_places(self, sizes: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """``[M, C]``: raster index of the token in each place of a block, prefix not counted, and whether there is one."""
        axes = len(self.grid)
        token = torch.zeros((1,) * (2 * axes), dtype=torch.int64, device=device)
        filled = torch.ones_like(token, dtype=torch.bool)
        for axis, (length, count, size) in enumerate(zip(self.grid, self.block_grid, sizes, strict=True)):
            block = torch.arange(count, device=device)
            start, end = (edge * length // count for edge in (block, block + 1))
            along = start[:, None] + torch.arange(size, device=device)
            shape = [1] * (2 * axes)
            shape[axis], shape[axes + axis] = count, size
            token = token * length + along.clamp(max=length - 1).reshape(shape)
            filled = filled & (along < end[:, None]).reshape(shape)
        filled = filled.expand(token.shape)
        return token.reshape(prod(self.block_grid), -1), filled.reshape(prod(self.block_grid), -1)

    def _places_of_tokens(self, sizes: list[int], slots: int, device: torch.device) -> Tensor:
        """``[N]``: place of each raster token, prefix not counted, in blocks of ``slots`` places."""
        block = within = torch.zeros(1, dtype=torch.int64, device=device)
        for length, count, size in zip(self.grid, self.block_grid, sizes, strict=True):
            position = torch.arange(length, device=device)
            # the last block whose first token, index * length // count, is not after the position
            along = ((position + 1) * count - 1) // length
            block = (block[:, None] * count + along).flatten()
            within = (within[:, None] * size + position - along * length // count).flatten()
        return block * slots + within


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
