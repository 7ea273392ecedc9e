"""Partition of a token grid into blocks, for sequences, images and video clips."""

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
    """Permutation of a layer's input tokens into the order in which attention processes them.

    The N tokens are put into S slots. S is larger than N if blocks are padded to equal length. Slots without a token are
    masked.

    Attributes:
        layout: token grid and its partition into blocks; sizes may be symbolic in a compiled graph.
        order: ``[S]`` int64, index of the input token in each slot; None if the order does not change.
        inverse: ``[N]`` int64, slot of each input token; None if the order does not change.
        blocks: dict with the keyword argument that describes the blocks to the attention function, ``block_size`` or
            ``block_offsets``; empty if the layer knows its blocks or uses none.
        filled: ``[S]`` bool, True for slots that hold a token; None if all slots do.
    """

    layout: BlockLayout
    order: Tensor | None
    inverse: Tensor | None
    blocks: dict[str, Any]
    filled: Tensor | None = None

    def enter(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Put input tokens and their mask into the order in which attention processes them.

        Args:
            x: tokens ``[B, N, dim]``.
            key_mask: ``[B, N]`` bool, False for hidden tokens; None if no token is hidden.

        Returns:
            Tokens ``[B, S, dim]``, where S is larger than N if blocks are padded, and their mask ``[B, S]``, which is also
            False for the padding. The mask is None if there is no padding and ``key_mask`` is None.
        """
        if self.order is None:
            return x, key_mask
        x = x.index_select(1, self.order)
        key_mask = None if key_mask is None else key_mask.index_select(1, self.order)
        if self.filled is None:
            return x, key_mask
        # index_select put some token into every empty slot
        filled = self.filled.expand(x.shape[:2])
        return x, filled if key_mask is None else key_mask & filled

    def leave(self, out: Tensor) -> Tensor:
        """Put attention outputs ``[B, S, dim]`` back into the order of the input tokens, ``[B, N, dim]``, without padding."""
        return out if self.inverse is None else out.index_select(1, self.inverse)


@dataclass(frozen=True)
class BlockLayout:
    """Partition of a 1-D, 2-D or 3-D token grid into blocks.

    In raster order, the prefix tokens come first, then the tokens of the grid with the last axis varying fastest. In block
    order, the tokens of each block are contiguous. If the number of blocks does not divide the length of an axis, blocks differ
    in size.

    Args:
        grid: number of tokens along each axis: ``(length,)``, ``(height, width)`` or ``(frames, height, width)``.
        blocks: number of blocks along each axis. Give exactly one of ``blocks`` and ``block_size``.
        block_size: number of tokens in a block of a 1-D grid; the last block may be shorter.
        prefix_tokens: number of tokens before the grid, such as class and register tokens. They form one additional block.

    Raises:
        ValueError: if the grid does not have one to three axes of at least one token, an axis has more blocks than tokens, or
            the arguments contradict each other.
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
                f"block_grid {blocks} does not fit the token grid {self.grid}: each axis needs at least one token per "
                f"block; use at most {self.grid}, or smaller patches"
            )
        return blocks

    @cached_property
    def edges(self) -> tuple[tuple[int, ...], ...]:
        """Block boundaries along each axis: the index of the first token of each block, followed by the length of the axis."""
        if self.block_size is not None:
            return ((*range(0, self.grid[0], self.block_size), self.grid[0]),)
        return tuple(
            tuple(i * length // count for i in range(count + 1))
            for length, count in zip(self.grid, self.block_grid, strict=True)
        )

    @property
    def block_grid(self) -> tuple[int, ...]:
        """Number of blocks along each axis of the grid, without the block of prefix tokens."""
        assert self.blocks is not None
        return self.blocks

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the prefix tokens."""
        return prod(self.grid) + self.prefix_tokens

    @property
    def num_blocks(self) -> int:
        """Number of blocks, including the block of prefix tokens."""
        return prod(self.block_grid) + (self.prefix_tokens > 0)

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Number of tokens in each block, in block order. The block of prefix tokens, if any, comes first."""
        # The sizes of the axes are multiplied, the last axis fastest.
        sizes = [1]
        for axis in self.edges:
            sizes = [size * (end - start) for size in sizes for start, end in pairwise(axis)]
        return (*([self.prefix_tokens] if self.prefix_tokens else []), *sizes)

    @cached_property
    def block_offsets(self) -> Tensor:
        """Index in block order of the first token of each of the M blocks, followed by the number of tokens.

        The tensor is ``[M + 1]`` int64 on the CPU.
        """
        # Named device, here and below: models are also built on the meta device, where these values would not exist.
        return torch.tensor([0, *accumulate(self.block_sizes)], device="cpu")

    @cached_property
    def order(self) -> Tensor:
        """Index in raster order of the token at each position in block order: ``[N]`` int64 on the CPU."""
        block = torch.zeros(1, dtype=torch.int64, device="cpu")
        for axis in self.edges:
            # Block of each token along this axis; `block` becomes the raster index of the block of each token.
            along = torch.bucketize(
                torch.arange(axis[-1], device="cpu"), torch.tensor(axis[1:], device="cpu"), right=True
            )
            block = (block[:, None] * (len(axis) - 1) + along).flatten()
        # Stable, so that tokens keep their raster order inside a block.
        order = block.argsort(stable=True) + self.prefix_tokens
        return torch.cat([torch.arange(self.prefix_tokens, device="cpu"), order])

    @cached_property
    def inverse(self) -> Tensor:
        """Position in block order of each token, with tokens listed in raster order: ``[N]`` int64 on the CPU."""
        return self.order.argsort()

    @cached_property
    def is_raster(self) -> bool:
        """Whether the block order equals the raster order.

        The orders are equal if each block is contiguous in raster order, for example if an image is divided into bands of
        complete rows.
        """
        # Axes before the last divided one must be divided into single tokens; otherwise tokens of other blocks lie in between.
        last_cut = max((axis for axis, count in enumerate(self.block_grid) if count > 1), default=0)
        return self.block_grid[:last_cut] == self.grid[:last_cut]

    @cached_property
    def centers(self) -> Tensor:
        """Position of each of the M blocks on the block grid, in units of one block: ``[M, axes]`` float64 on the CPU.

        The block of prefix tokens has no position and is left out.
        """
        axes = [torch.arange(count, dtype=torch.float64, device="cpu") for count in self.block_grid]
        return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=-1)

    @cached_property
    def operator_blocks(self) -> dict[str, Any]:
        """Keyword argument that describes the blocks to the functions of ``mhla_kernels``, as a dict with one entry.

        The key is ``"block_size"`` if all blocks have the same size, except for a shorter last one. Otherwise, the key is
        ``"block_offsets"``, and the value is the index of the first token of each block, followed by the number of tokens.
        """
        if self.block_size is not None and not self.prefix_tokens:
            return {"block_size": self.block_size}  # also if there are fewer tokens, since later calls may have more
        sizes = self.block_sizes
        if set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0]:
            return {"block_size": sizes[0]}
        return {"block_offsets": (0, *accumulate(sizes))}

    def place(self, device: torch.device, gaps: bool = True) -> Placement:
        """Compute the permutation of the tokens from raster order to block order, for use in a compiled graph.

        If the layout has ``block_size``, the two orders are equal, and there is no permutation.

        Args:
            device: device of the tokens.
            gaps: whether blocks of unequal size are padded to equal length. If True, a mask hides the padding, and sizes stay
                symbolic. If False, sizes become constants of the graph.
        """
        if self.block_size is not None:
            return Placement(self, None, None, {"block_size": self.block_size})
        if not gaps:
            order, inverse = (None, None) if self.is_raster else (self.order.to(device), self.inverse.to(device))
            return Placement(self, order, inverse, self.operator_blocks)
        sizes = [(length + count - 1) // count for length, count in zip(self.grid, self.block_grid, strict=True)]
        size = prod(sizes)
        # The block of prefix tokens has as many slots as the others, since the operator gets a single `block_size`.
        slots = size if size >= self.prefix_tokens else self.prefix_tokens
        order, filled = self._tokens_of_places(sizes, device)
        inverse = self._places_of_tokens(sizes, slots, device)
        if self.prefix_tokens:
            order, filled = (nn.functional.pad(table, (0, slots - size)) for table in (order, filled))
            prefix = torch.arange(slots, device=device)
            order = torch.cat([prefix.clamp(max=self.prefix_tokens - 1)[None], order + self.prefix_tokens])
            filled = torch.cat([(prefix < self.prefix_tokens)[None], filled])
            inverse = torch.cat([prefix[: self.prefix_tokens], inverse + slots])
        # Without gaps no mask is needed. A symbolic size that is not surely divisible counts as uneven.
        even = all(surely_equal(length % count, 0) for length, count in zip(self.grid, self.block_grid, strict=True))
        full = even and not self.prefix_tokens
        return Placement(self, order.flatten(), inverse, {"block_size": slots}, None if full else filled.flatten())

    def _tokens_of_places(self, sizes: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Compute the raster index of the token in each slot of the padded blocks, without the prefix tokens.

        Args:
            sizes: number of slots of a padded block along each axis.
            device: device of the results.

        Returns:
            Raster indices, int64, and a mask that is True for slots that hold a token; both ``[M, C]`` for M blocks of C slots.
        """
        axes = len(self.grid)
        token = torch.zeros((1,) * (2 * axes), dtype=torch.int64, device=device)
        filled = torch.ones_like(token, dtype=torch.bool)
        for axis, (length, count, size) in enumerate(zip(self.grid, self.block_grid, sizes, strict=True)):
            block = torch.arange(count, device=device)
            start, end = (edge * length // count for edge in (block, block + 1))
            # Axes: count_0, count_1, ..., size_0, size_1, .... Empty slots get some valid token, which `filled` masks.
            along = start[:, None] + torch.arange(size, device=device)
            shape = [1] * (2 * axes)
            shape[axis], shape[axes + axis] = count, size
            token = token * length + along.clamp(max=length - 1).reshape(shape)
            filled = filled & (along < end[:, None]).reshape(shape)
        return token.reshape(prod(self.block_grid), -1), filled.reshape(prod(self.block_grid), -1)

    def _places_of_tokens(self, sizes: list[int], slots: int, device: torch.device) -> Tensor:
        """Compute the slot of each of the N tokens of the grid in the padded blocks, ``[N]`` int64, in raster order.

        Prefix tokens and their block are left out.

        Args:
            sizes: number of slots of a padded block along each axis.
            slots: total number of slots of a padded block.
            device: device of the result.
        """
        block = within = torch.zeros(1, dtype=torch.int64, device=device)
        for length, count, size in zip(self.grid, self.block_grid, sizes, strict=True):
            position = torch.arange(length, device=device)
            # the last block whose first token, index * length // count, is not after the position
            along = ((position + 1) * count - 1) // length
            block = (block[:, None] * count + along).flatten()
            within = (within[:, None] * size + position - along * length // count).flatten()
        return block * slots + within


class LayoutTables(nn.Module):
    """Base class of modules whose buffers depend only on the token layout and are not stored in checkpoints.

    The buffers are computed again whenever the module moves to a different device or dtype. This is necessary because
    ``to_empty`` and FSDP2 do not initialize buffers that were on the meta device.
    """

    def tables(self) -> dict[str, Tensor]:
        """Compute this module's buffers from the token layout, on the CPU, and return them by name.

        Derived classes implement this method.
        """
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayoutTables:
        super()._apply(fn, recurse)
        for name, values in self.tables().items():
            buffer = self._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                # Without the dtype of the model: rotary tables stay float32 in a bfloat16 model.
                self._buffers[name] = values.to(buffer.device)
        return self
