"""Interface of mixing coefficients, the weights with which a query block reads the summaries of key blocks.

A new kind of coefficients needs only its tensors and a method that returns its matrix.

Shape letters: B batch, H heads, M blocks (Mq of queries and Mk of keys in cross-attention), W numbers in a block summary, R
running sums.
"""

# Longer than other modules because it documents every method of the interface.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.blocks import is_dynamic, on_device
from mhla_kernels.mixing.pairs import BlockPairs
from mhla_kernels.mixing.span import Span
from mhla_kernels.pytrees import register

Rows = slice | Tensor
"""Rows of a batch: a slice for all of them, or a tensor of their indices."""


class BlockShares(Protocol):
    """Protocol for an assignment of a sequence's blocks to several processes, each of which holds a range of blocks."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Index of the first block of each process, followed by the total number of blocks."""

    @property
    def rank(self) -> int:
        """Rank of this process in the process group."""

    @property
    def own(self) -> tuple[int, int]:
        """Index of the first block that this process holds, and the index after its last one."""

    @property
    def blocks(self) -> list[int]:
        """Number of blocks that each process holds, in the order of ranks."""

    def gather(self, share: Tensor, lengths: Sequence[int]) -> Tensor:
        """Gather a tensor from every process, and concatenate the tensors along axis 2 in the order of ranks.

        Args:
            share: tensor of this process, ``[B, H, length, ...]``.
            lengths: length of axis 2 in the tensor of each process.
        """


class Mixing(ABC):
    """Base class of mixing coefficients: ``m[i, j]`` is the weight that query block i gives to the summary of block j.

    The summary of a block consists of sums over its keys and values.

    A subclass is a frozen dataclass. It lists the names of its tensor fields in the class attribute ``learned``, and defines
    :meth:`matrix`. The default versions of all other methods apply this matrix. A subclass overrides the methods that it can
    compute at lower cost. Every subclass is a pytree of its tensors. ``torch.load(weights_only=True)`` and
    ``torch.export.load`` can load its instances.
    """

    learned: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register(cls, cls.learned, _context, lambda tensors, context: cls(**tensors, **dict(context)), list, _from_json)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Learned tensors that determine the coefficients, by name."""
        return {name: getattr(self, name) for name in self.learned}

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same coefficients with all tensors in ``dtype``."""
        if all(x.dtype == dtype for x in self.tensors.values()):
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return type(self)(**values | {name: x.to(dtype) for name, x in self.tensors.items()})

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def heads(self) -> int | None:
        """Number of heads H, or None if all heads share the coefficients."""
        return None

    @property
    def blocks(self) -> int | None:
        """Number of blocks in the grid or longest sequence that the coefficients cover; None if they cover any number."""
        return None

    def of_heads(self, heads: slice) -> Self | None:
        """Return the coefficients of a range of heads; None if this class of coefficients cannot be split by head."""
        return self if self.heads is None else None

    def _of_first_axis(self, heads: slice) -> Self:
        """Return the coefficients of a range of heads, for subclasses whose learned tensors have heads as axis 0.

        If all heads share the coefficients, they are returned unchanged.
        """
        if self.heads is None:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return type(self)(**values | {name: x[heads] for name, x in self.tensors.items()})

    def check(self, heads: int, causal: bool) -> None:
        """Check that the coefficients fit attention with the given number of heads and causality.

        Args:
            heads: number of heads of the queries.
            causal: whether the attention is causal.

        Raises:
            ValueError: if a shape or value does not fit; the message names it.
            TypeError: if a tensor has an unsupported dtype.
        """
        if self.heads not in (None, heads):
            raise ValueError(f"mixing is for {self.heads} heads; q has H = {heads}")

    @abstractmethod
    def matrix(self, blocks: int) -> Tensor:
        """Return the coefficients as a matrix ``[M, M]``, or as one matrix for each head, ``[H, M, M]``.

        Args:
            blocks: required number of blocks. M may be larger than this. M is smaller only if the coefficients cover fewer
                blocks.
        """

    def own(self, index: slice | Tensor | Sequence[int], blocks: int) -> Tensor:
        """Return the coefficients m[i, i] with which blocks weigh their own summaries.

        Args:
            index: indices i of the blocks, as a slice, a tensor or a list.
            blocks: exclusive upper bound on the indices.

        Returns:
            ``[n]`` or ``[H, n]`` for n indices. The last axis has length 1 if all blocks have the same coefficient.
        """
        diagonal = self.matrix(blocks).diagonal(dim1=-2, dim2=-1)
        return diagonal[..., index if isinstance(index, slice | Tensor) else on_device(index, diagonal.device)]

    def mix(self, summary: Tensor, causal: bool) -> Tensor:
        """Mix block summaries: entry i of the result is the sum of ``m[i, j] * summary[j]`` over blocks j.

        The default implementation is one batched matrix product over batch rows and heads.

        Args:
            summary: summaries of the M blocks, ``[B, H, M, W]`` with W numbers each.
            causal: whether the sum is over earlier blocks ``j < i`` only, without block i itself.

        Returns:
            Mixed summaries, ``[B, H, M, W]``.
        """
        blocks = summary.shape[2]
        weights = self.matrix(blocks)
        # With a symbolic number of blocks, make_mixer has already expanded the matrix to this number.
        if not is_dynamic(blocks):
            weights = weights[..., :blocks, :blocks]
        if causal:
            # without the block itself, which is added token by token, up to the query
            weights = weights.tril(-1)
        return apply_matrix(weights, summary)

    # Cross-attention: queries and keys have different blocks.

    @property
    def cross_blocks(self) -> tuple[int, int] | None:
        """Numbers of query blocks and of key blocks that the coefficients cover in cross-attention.

        None if the coefficients apply to any numbers of blocks.
        """
        return None if self.blocks is None else (self.blocks, self.blocks)

    def check_cross(self, heads: int) -> None:
        """Check that the coefficients fit cross-attention with the given number of heads.

        Args:
            heads: number of heads of the queries.

        Raises:
            ValueError: if this class does not define :meth:`cross_matrix`, or if a shape or value does not fit.
            TypeError: if a tensor has an unsupported dtype.
        """
        if type(self).cross_matrix is Mixing.cross_matrix:
            raise ValueError(
                f"{self} has no coefficients between blocks of two sequences; give a matrix [Mq, Mk] or an "
                f"ExponentialMixing, or define the method cross_matrix in {type(self).__name__}"
            )
        self.check(heads, causal=False)

    def cross_matrix(self, pairs: BlockPairs) -> Tensor:
        """Return the coefficients between query blocks and key blocks, ``[Mq, Mk]`` for all heads or ``[H, Mq, Mk]``.

        Only classes of coefficients for cross-attention implement this method.

        Args:
            pairs: blocks of both sides, with their indices within packed sequences.
        """
        raise NotImplementedError

    # Chunks of several blocks, for coefficients that are sums of products: the spanning form.

    def span_terms(self, causal: bool) -> int | None:
        """Return the number of running sums that the spanning form of attention carries from chunk to chunk.

        The spanning form is an algorithm that processes groups of consecutive blocks, called chunks.

        Args:
            causal: whether the attention is causal.

        Returns:
            Number of running sums; None if coefficients of this class have no such sums, so that the spanning form does not
            support them.
        """
        return None

    def span(self, blocks: int, causal: bool) -> Span:
        """Return the coefficients within and between chunks, for the spanning form of attention.

        The spanning form is an algorithm that processes groups of consecutive blocks, called chunks, and connects them by
        running sums. Only classes whose :meth:`span_terms` is not None implement this method.

        Args:
            blocks: number of blocks in a chunk.
            causal: whether the attention is causal.
        """
        raise NotImplementedError

    # Generation: a state stores the summaries of all finished blocks, or running sums of them.

    @property
    def running_sums(self) -> int | None:
        """Number of running sums that replace the summaries of finished blocks in generation.

        None if the summaries of all finished blocks are stored instead.
        """
        return None

    def make_room(self, finished: Tensor, blocks: int, owned: bool) -> Tensor:
        """Enlarge a tensor of finished block summaries if it has no room for new blocks.

        Args:
            finished: summaries of finished blocks, ``[B, H, capacity, W]``.
            blocks: required capacity in blocks.
            owned: whether the caller owns ``finished`` and appends blocks to it one by one. If so, the capacity at least
                doubles when it grows.

        Returns:
            The same tensor if its capacity suffices, otherwise a larger copy.
        """
        if finished.shape[2] >= blocks:
            return finished
        # doubling makes appending one by one take linear time in all
        room = max(blocks, 2 * finished.shape[2]) if owned else blocks
        return F.pad(finished, (0, 0, 0, room - finished.shape[2]))

    def append(self, finished: Tensor, rows: Rows, first: int, summary: Tensor, in_place: bool) -> Tensor:
        """Append summaries of new blocks to the finished summaries of some rows of a batch.

        Args:
            finished: summaries of finished blocks, ``[B, H, capacity, W]``, with room for the new ones.
            rows: rows of the batch that ``summary`` belongs to: a slice of all rows, or a tensor of row indices.
            first: index of the first new block.
            summary: summaries of the new blocks in these rows, ``[rows, H, new blocks, W]``.
            in_place: whether ``finished`` may be written to. Other generation states that share this tensor have fewer blocks,
                and do not read the new ones.

        Returns:
            Finished summaries that include the new blocks: ``finished`` itself if ``in_place``, otherwise a copy.
        """
        end = first + summary.shape[2]
        if in_place:
            finished[rows, :, first:end] = summary
            return finished
        selected = finished[rows]
        grown = torch.cat([selected[:, :, :first], summary, selected[:, :, end:]], 2)
        return grown if isinstance(rows, slice) else finished.index_copy(0, rows, grown)

    def read(self, finished: Tensor, block: int) -> Tensor:
        """Add up the summaries of all finished blocks, weighted for the block that is still receiving tokens.

        Args:
            finished: summaries of finished blocks, ``[B, H, capacity, W]``, or R running sums of them, ``[B, H, R, W]``, if
                :attr:`running_sums` is not None.
            block: index of the block that is still receiving tokens.

        Returns:
            Mixed summary, ``[B, H, W]``.
        """
        weights = self.matrix(block + 1)[..., block, :block].reshape(1, -1, 1, block)
        return (weights @ finished[:, :, :block]).squeeze(2)

    def mix_after(self, finished: Tensor, summary: Tensor, first: int) -> Tensor:
        """Compute for each new block the weighted sum of the summaries of finished blocks and of earlier new blocks.

        Args:
            finished: summaries of finished blocks, ``[B, H, capacity, W]``, or R running sums of them, ``[B, H, R, W]``, if
                :attr:`running_sums` is not None.
            summary: summaries of the M new blocks, ``[B, H, M, W]``.
            first: index of the first new block.

        Returns:
            Mixed summaries for the new blocks, ``[B, H, M, W]``.
        """
        blocks = summary.shape[2]
        rows = self.matrix(first + blocks)[..., first : first + blocks, :]
        # Rows of a batch begin at different blocks, so the last blocks here may hold no token of these rows. The matrix need
        # not cover such blocks, and their mixtures are zeros.
        inside = rows[..., first : first + blocks].tril(-1)
        covered = inside.shape[-1]
        mixed = inside @ summary[:, :, :covered] + rows[..., :first] @ finished[:, :, :first]
        return F.pad(mixed, (0, 0, 0, blocks - covered))

    # Sequence parallelism: processes hold ranges of blocks.

    @property
    def boundary_sums(self) -> int | None:
        """Number of running sums that processes exchange in each direction if a sequence is distributed over them.

        None if they exchange the summaries of all blocks instead.
        """
        return None

    def mix_share(self, summary: Tensor, causal: bool, shares: BlockShares, every: Tensor | None) -> Tensor:
        """Compute the mixed summaries for the blocks of this process, in a sequence that is distributed over processes.

        Args:
            summary: summaries of the m blocks of this process, ``[B, H, m, ...]``.
            causal: whether the mixture of a block contains only the summaries of earlier blocks, not its own.
            shares: assignment of blocks to processes.
            every: summaries of the M blocks of all processes, ``[B, H, M, ...]``; None to gather them.

        Returns:
            Mixed summaries for the blocks of this process, ``[B, H, m, ...]``.
        """
        if every is None:
            every = shares.gather(summary, shares.blocks)
        blocks = every.shape[2]
        first, last = shares.own
        rows = self.matrix(blocks)[..., first:last, :blocks]
        if causal:
            # Row r of this slice is block first + r, which moves the diagonal of the complete matrix to column r + first.
            rows = rows.tril(first - 1)
        return apply_matrix(rows, every.flatten(3)).view(summary.shape)

    # The choice between forms, and the fused kernels.

    def fused(self, blocks: int, causal: bool, form: str) -> tuple[str, list[Tensor]]:
        """Return the coefficients as the tensors that the Triton kernels read.

        The default implementation returns one matrix.

        Args:
            blocks: number of blocks.
            causal: whether the attention is causal.
            form: attention algorithm, such as ``"chunked"``.

        Returns:
            Name of the kernels, ``"dense"`` or ``"exponential"``, and tensors ``[H or 1, ...]``. Axis 0 has length 1 if all
            heads share the coefficients. Multiplying the first tensor by a number multiplies all attention weights by it.
        """
        matrix = self.matrix(blocks)
        return "dense", [matrix if matrix.dim() == 3 else matrix[None]]

    def work(self, blocks: int, causal: bool, fused: bool) -> int:
        """Estimate the cost of mixing, for the choice of the cheapest attention algorithm.

        Args:
            blocks: number of blocks.
            causal: whether the attention is causal.
            fused: whether the fused Triton kernels do the mixing.

        Returns:
            Number of summaries that are added up to mix one block.
        """
        return blocks


def apply_matrix(weights: Tensor, summary: Tensor) -> Tensor:
    """Mix block summaries by a matrix, as one batched matrix product over batch rows and heads.

    Args:
        weights: coefficients, ``[I, J]`` or ``[H, I, J]``.
        summary: summaries of J blocks, ``[B, H, J, W]``.

    Returns:
        Mixed summaries, ``[B, H, I, W]``.
    """
    batch, heads, _, width = summary.shape
    rows, columns = weights.shape[-2:]
    weights = weights.expand(batch, heads, rows, columns).reshape(batch * heads, rows, columns)
    return torch.bmm(weights, summary.flatten(0, 1)).view(batch, heads, rows, width)


def _context(mixing: Mixing) -> tuple[tuple[str, Any], ...]:
    """Return the names and values of the dataclass fields that are not learned tensors."""
    names = (field.name for field in fields(mixing) if field.name not in mixing.learned)  # type: ignore[arg-type]
    return tuple((name, getattr(mixing, name)) for name in names)


def _from_json(value: Any) -> Any:
    return tuple(map(_from_json, value)) if isinstance(value, list) else value
