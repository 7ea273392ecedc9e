"""Interface of mixing coefficients: a new kind is one class with its tensors and its matrix.

Shape letters: B batch, H heads, M blocks, W numbers of a summary, R running sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.blocks import is_dynamic, on_device
from mhla_kernels.mixing.span import Span
from mhla_kernels.pytrees import register

Rows = slice | Tensor
"""Rows of a batch: a slice for all of them, or a tensor of their indices."""


class BlockShares(Protocol):
    """Protocol of objects that assign the blocks of a sequence to processes; see :mod:`mhla_kernels.sequence_parallel`."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Index of the first block of each process, followed by the total number of blocks."""

    @property
    def rank(self) -> int:
        """Rank of this process in the process group."""

    @property
    def own(self) -> tuple[int, int]:
        """Index of the first block of this process, and index after its last one."""

    @property
    def blocks(self) -> list[int]:
        """Number of blocks that each process holds."""

    def gather(self, share: Tensor, lengths: Sequence[int]) -> Tensor:
        """Concatenate the tensors ``[B, H, length, ...]`` of all processes along axis 2.

        Args:
            share: tensor of this process.
            lengths: length of axis 2 in the tensor of each process.
        """


class Mixing(ABC):
    """Mixing coefficients ``m[i, j]``: the weight that query block i gives to the summary of block j.

    A kind of mixing is a frozen dataclass that derives from this class. It lists its tensor fields by name in the class
    attribute ``learned``, and defines :meth:`matrix`. All other methods have defaults that apply the matrix. A kind overrides
    the ones that it can compute at lower cost. Kinds are pytrees of their tensors. ``torch.load(weights_only=True)`` and
    ``torch.export.load`` can load them.
    """

    learned: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register(cls, cls.learned, _context, lambda tensors, context: cls(**tensors, **dict(context)), list, _from_json)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Dict from names to the learned tensors that determine the coefficients."""
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
        """Number of blocks of the largest grid or longest sequence that the coefficients cover; None for any length."""
        return None

    def of_heads(self, heads: slice) -> Self | None:
        """Return the coefficients of a range of heads; None if this kind of mixing cannot be split by head."""
        return self if self.heads is None else None

    def _of_first_axis(self, heads: slice) -> Self:
        """Implement :meth:`of_heads` for kinds whose learned tensors have heads as axis 0, or share them between heads."""
        if self.heads is None:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return type(self)(**values | {name: x[heads] for name, x in self.tensors.items()})

    def check(self, heads: int, causal: bool) -> None:
        """Check that the coefficients fit attention with the given number of heads.

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

        M may be larger than ``blocks``. It is smaller only if the coefficients cover fewer blocks.
        """

    def own(self, index: slice | Tensor | Sequence[int], blocks: int) -> Tensor:
        """Return the coefficients m[i, i] with which blocks weigh their own summaries.

        Args:
            index: indices i of the blocks; a list is copied to the device.
            blocks: upper bound of the indices, exclusive.

        Returns:
            ``[n]`` or ``[H, n]`` for n indices; n may be 1 if all blocks have the same coefficient.
        """
        diagonal = self.matrix(blocks).diagonal(dim1=-2, dim2=-1)
        return diagonal[..., index if isinstance(index, slice | Tensor) else on_device(index, diagonal.device)]

    def mix(self, summary: Tensor, causal: bool) -> Tensor:
        """Mix block summaries: entry i of the result is the sum of ``m[i, j] * summary[j]`` over blocks j.

        The default implementation is one batched matrix product over batch rows and heads.

        Args:
            summary: summaries of the M blocks, ``[B, H, M, W]`` with W numbers each.
            causal: whether the sum is over earlier blocks ``j < i`` only.

        Returns:
            Mixed summaries, ``[B, H, M, W]``.
        """
        batch, heads, blocks, _ = summary.shape
        weights = self.matrix(blocks)
        if not is_dynamic(blocks):
            weights = weights[..., :blocks, :blocks]
        if causal:
            # without the block itself, which is added token by token, up to the query
            weights = weights.tril(-1)
        weights = weights.expand(batch, heads, blocks, blocks).reshape(batch * heads, blocks, blocks)
        return torch.bmm(weights, summary.flatten(0, 1)).view_as(summary)

    # Chunks of several blocks, for coefficients that are sums of products: the spanning form.

    def span_terms(self, causal: bool) -> int | None:
        """Return the number T of running sums that the spanning form carries between chunks of several blocks.

        None means that this kind of mixing has no such sums, so that the spanning form does not support it.
        """
        return None

    def span(self, blocks: int, causal: bool) -> Span:
        """Return the coefficients within and between chunks of ``blocks`` blocks.

        Only kinds of mixing whose :meth:`span_terms` is not None implement this method.
        """
        raise NotImplementedError

    # Generation: a state stores the summaries of all finished blocks, or running sums of them.

    @property
    def running_sums(self) -> int | None:
        """Number R of running sums that replace all finished blocks in a generation state; None if every summary is stored."""
        return None

    def make_room(self, finished: Tensor, blocks: int, owned: bool) -> Tensor:
        """Enlarge the tensor of finished block summaries if it has no room for new blocks.

        Args:
            finished: summaries of finished blocks, ``[B, H, capacity, W]``.
            blocks: required capacity in blocks.
            owned: whether blocks are appended one by one. If so, the capacity at least doubles when it grows.

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
            rows: rows of the batch that ``summary`` belongs to.
            first: index of the first new block.
            summary: summaries of the new blocks in these rows, ``[rows, H, new blocks, W]``.
            in_place: whether ``finished`` may be written to. Other generation states that share the tensor have fewer blocks,
                and do not read the new ones.

        Returns:
            ``finished`` with the new blocks, the same tensor or a copy.
        """
        end = first + summary.shape[2]
        if in_place:
            finished[rows, :, first:end] = summary
            return finished
        selected = finished[rows]
        grown = torch.cat([selected[:, :, :first], summary, selected[:, :, end:]], 2)
        return grown if isinstance(rows, slice) else finished.index_copy(0, rows, grown)

    def read(self, finished: Tensor, block: int) -> Tensor:
        """Mix the summaries of all finished blocks for the open block, to which tokens are still added.

        Args:
            finished: summaries of finished blocks ``[B, H, capacity, W]``, or running sums of them ``[B, H, R, W]``.
            block: index of the open block.

        Returns:
            Mixed summary, ``[B, H, W]``.
        """
        weights = self.matrix(block + 1)[..., block, :block].reshape(1, -1, 1, block)
        return (weights @ finished[:, :, :block]).squeeze(2)

    def mix_after(self, finished: Tensor, summary: Tensor, first: int) -> Tensor:
        """Compute causal mixtures for new blocks, from finished blocks and from earlier new blocks.

        Args:
            finished: summaries of finished blocks ``[B, H, capacity, W]``, or running sums of them ``[B, H, R, W]``.
            summary: summaries of the M new blocks, ``[B, H, M, W]``.
            first: index of the first new block.

        Returns:
            Mixed summaries for the new blocks, ``[B, H, M, W]``.
        """
        blocks = summary.shape[2]
        rows = self.matrix(first + blocks)[..., first : first + blocks, :]
        inside = rows[..., first : first + blocks].tril(-1)
        covered = inside.shape[-1]
        mixed = inside @ summary[:, :, :covered] + rows[..., :first] @ finished[:, :, :first]
        return F.pad(mixed, (0, 0, 0, blocks - covered))

    # Sequence parallelism: processes hold ranges of blocks.

    @property
    def boundary_sums(self) -> int | None:
        """Number R of running sums that processes exchange in each direction; None if they exchange all summaries."""
        return None

    def mix_share(self, summary: Tensor, causal: bool, shares: BlockShares, every: Tensor | None) -> Tensor:
        """Mix block summaries of a sequence that is distributed over processes, for the blocks of this process.

        Args:
            summary: summaries of the m blocks of this process, ``[B, H, m, ...]``.
            causal: whether a block's mixture is over earlier blocks only, without itself.
            shares: assignment of blocks to processes.
            every: summaries of the M blocks of all processes, ``[B, H, M, ...]``; None to gather them.

        Returns:
            Mixed summaries for the blocks of this process, ``[B, H, m, ...]``.
        """
        if every is None:
            every = shares.gather(summary, shares.blocks)
        batch, heads, blocks = every.shape[:3]
        first, last = shares.own
        rows = self.matrix(blocks)[..., first:last, :blocks]
        if causal:
            rows = rows.tril(first - 1)
        rows = rows.expand(batch, heads, *rows.shape[-2:]).reshape(batch * heads, *rows.shape[-2:])
        mixed = torch.bmm(rows, every.reshape(batch * heads, blocks, -1))
        return mixed.view(summary.shape)

    # The choice between forms, and the fused kernels.

    def fused(self, blocks: int, causal: bool, form: str) -> tuple[str, list[Tensor]]:
        """Return the coefficients as the tensors that the Triton kernels read; by default, one matrix.

        Args:
            blocks: number of blocks.
            causal: whether the attention is causal.
            form: form of the operator, such as ``"chunked"``.

        Returns:
            Key of ``triton_backend.mixers.MIXERS``, and tensors ``[H or 1, ...]``. Attention weights are linear in the first
            tensor.
        """
        matrix = self.matrix(blocks)
        return "dense", [matrix if matrix.dim() == 3 else matrix[None]]

    def work(self, blocks: int, causal: bool, fused: bool) -> int:
        """Estimate the cost of mixing, so that the cheapest form of the operator can be chosen.

        Args:
            blocks: number of blocks.
            causal: whether the attention is causal.
            fused: whether the fused kernels do the mixing.

        Returns:
            Number of summaries that are added up to mix one block.
        """
        return blocks


def _context(mixing: Mixing) -> tuple[tuple[str, Any], ...]:
    """Return names and values of a mixing's dataclass fields, except for its learned tensors."""
    names = (field.name for field in fields(mixing) if field.name not in mixing.learned)  # type: ignore[arg-type]
    return tuple((name, getattr(mixing, name)) for name in names)


def _from_json(value: Any) -> Any:
    return tuple(map(_from_json, value)) if isinstance(value, list) else value
