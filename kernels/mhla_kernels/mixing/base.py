"""The protocol of mixing coefficients: a new kind is one class with its tensors and its matrix.

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
"""Rows of a batch: all of them, or their indices."""


class BlockShares(Protocol):
    """The processes that share a sequence, for mixing across them; see :mod:`mhla_kernels.sequence_parallel`."""

    @property
    def shares(self) -> tuple[int, ...]:
        """First block of each process, and M."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def own(self) -> tuple[int, int]:
        """First block of this process, and the end of its blocks."""

    @property
    def blocks(self) -> list[int]:
        """Number of blocks of each process."""

    def gather(self, share: Tensor, lengths: Sequence[int]) -> Tensor:
        """The shares ``[B, H, length, ...]`` of all processes in a row."""


class Mixing(ABC):
    """Mixing coefficients ``m[i, j]``: how query block i weighs the summary of block j.

    A kind is a frozen dataclass that derives from this class, names the fields that hold its tensors in ``learned`` and
    defines :meth:`matrix`. Every other method has a default that applies the matrix; a kind overrides those for which it
    knows a cheaper way. Kinds are pytrees of their tensors, and ``torch.load`` reads them with ``weights_only=True``, as
    ``torch.export.load`` does.
    """

    learned: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register(cls, cls.learned, _context, lambda tensors, rest: cls(**tensors, **dict(rest)), list, _from_json)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The learned tensors by name."""
        return {name: getattr(self, name) for name in self.learned}

    def to(self, dtype: torch.dtype) -> Self:
        """The same coefficients with all tensors in ``dtype``."""
        if all(x.dtype == dtype for x in self.tensors.values()):
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return type(self)(**values | {name: x.to(dtype) for name, x in self.tensors.items()})

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def heads(self) -> int | None:
        """H, or None where all heads share the coefficients."""
        return None

    @property
    def blocks(self) -> int | None:
        """M of the largest grid or longest sequence that the coefficients are for; None for any length."""
        return None

    def of_heads(self, heads: slice) -> Self | None:
        """The coefficients of some heads, None for a kind that does not say how it keeps them."""
        return self if self.heads is None else None

    def _of_first_axis(self, heads: slice) -> Self:
        """:meth:`of_heads` for a kind whose learned tensors all have the heads, if any, as their first axis."""
        if self.heads is None:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return type(self)(**values | {name: x[heads] for name, x in self.tensors.items()})

    def check(self, heads: int, causal: bool) -> None:
        """Check values and shapes for attention of ``heads`` heads.

        Raises:
            ValueError: naming what does not fit.
            TypeError: for tensors of another dtype.
        """
        if self.heads not in (None, heads):
            raise ValueError(f"mixing is for {self.heads} heads; q has H = {heads}")

    @abstractmethod
    def matrix(self, blocks: int) -> Tensor:
        """The matrix ``[M, M]`` or ``[H, M, M]``, for at least ``blocks`` blocks, or for as many as there are coefficients."""

    def own(self, index: slice | Tensor | Sequence[int], blocks: int) -> Tensor:
        """m[i, i] of some blocks: ``[n]`` or ``[H, n]``, n being 1 where all blocks have the same.

        Args:
            index: index of the blocks; numbers of the CPU are copied to the device.
            blocks: a bound that the indices stay below.
        """
        diagonal = self.matrix(blocks).diagonal(dim1=-2, dim2=-1)
        return diagonal[..., index if isinstance(index, slice | Tensor) else on_device(index, diagonal.device)]

    def mix(self, summary: Tensor, causal: bool) -> Tensor:
        """Summaries mixed, ``[B, H, M, W]`` to the same; causal: earlier blocks only, without the block itself.

        By default one batched GEMM, since torch would fold a broadcast matrix with two copies.
        """
        batch, heads, blocks, _ = summary.shape
        weights = self.matrix(blocks)
        if not is_dynamic(blocks):
            weights = weights[..., :blocks, :blocks]
        if causal:
            weights = weights.tril(-1)
        weights = weights.expand(batch, heads, blocks, blocks).reshape(batch * heads, blocks, blocks)
        return torch.bmm(weights, summary.flatten(0, 1)).view_as(summary)

    # Chunks of several blocks, for coefficients that are sums of products: the spanning form.

    def span_terms(self, causal: bool) -> int | None:
        """T, the running sums that such chunks pass on; None for a kind that has no such sums."""
        return None

    def span(self, blocks: int, causal: bool) -> Span:
        """The coefficients by chunks of ``blocks`` blocks, where :meth:`span_terms` is a number."""
        raise NotImplementedError

    # Generation: a state keeps the summaries of all finished blocks, or running sums of them.

    @property
    def running_sums(self) -> int | None:
        """R, where a fixed number of running sums stands for the finished blocks; None keeps every summary."""
        return None

    def make_room(self, finished: Tensor, blocks: int, owned: bool) -> Tensor:
        """Finished summaries with room for ``blocks`` of them: the same tensor where it has that room, else a new one.

        Those that are ``owned`` grow by more than they need, since blocks are then appended to them one by one.
        """
        if finished.shape[2] >= blocks:
            return finished
        room = max(blocks, 2 * finished.shape[2]) if owned else blocks
        return F.pad(finished, (0, 0, 0, room - finished.shape[2]))

    def append(self, finished: Tensor, rows: Rows, first: int, summary: Tensor, in_place: bool) -> Tensor:
        """Finished summaries with blocks ``[B, H, M, W]``, ``first`` and those after it, added to the ones of ``rows``.

        Args:
            finished: finished summaries, with room for the new ones.
            rows: rows that ``summary`` is of.
            first: index of the first new block.
            summary: summaries of the new blocks.
            in_place: whether ``finished`` may be written to and returned. States that share it have fewer blocks, and do not
                see the new ones.
        """
        end = first + summary.shape[2]
        if in_place:
            finished[rows, :, first:end] = summary
            return finished
        before = finished[rows]
        grown = torch.cat([before[:, :, :first], summary, before[:, :, end:]], 2)
        return grown if isinstance(rows, slice) else finished.index_copy(0, rows, grown)

    def read(self, finished: Tensor, block: int) -> Tensor:
        """``[B, H, W]``: the mixture of the finished blocks that block ``block``, now open, sees."""
        weights = self.matrix(block + 1)[..., block, :block].reshape(1, -1, 1, block)
        return (weights @ finished[:, :, :block]).squeeze(2)

    def mix_after(self, finished: Tensor, summary: Tensor, first: int) -> Tensor:
        """Causal mixing of blocks ``[B, H, M, W]``, ``first`` and those after it, that follow finished ones."""
        blocks = summary.shape[2]
        rows = self.matrix(first + blocks)[..., first : first + blocks, :]
        inside = rows[..., first : first + blocks].tril(-1)
        known = inside.shape[-1]
        mixed = inside @ summary[:, :, :known] + rows[..., :first] @ finished[:, :, :first]
        return F.pad(mixed, (0, 0, 0, blocks - known))

    # Sequence parallelism: processes hold ranges of blocks.

    @property
    def boundary_sums(self) -> int | None:
        """R, where processes exchange that many sums for each side; None where they exchange summaries."""
        return None

    def mix_share(self, summary: Tensor, causal: bool, shares: BlockShares, every: Tensor | None) -> Tensor:
        """Mixing of this process's blocks ``[B, H, m, ...]`` with those of all processes.

        Args:
            summary: summary of this process's blocks.
            causal: whether only earlier blocks count, without the block itself.
            shares: shares of all processes.
            every: summaries of all blocks ``[B, H, M, ...]`` where they are known already; else they are gathered.
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
        """The fused kernels' name for the kind (a key of ``triton_backend.mixers.MIXERS``), and the tensors they take.

        The tensors have heads as their first axis, of length 1 where they are shared; the weights are linear in the
        first one. The default applies the matrix.
        """
        matrix = self.matrix(blocks)
        return "dense", [matrix if matrix.dim() == 3 else matrix[None]]

    def work(self, blocks: int, causal: bool, fused: bool) -> int:
        """Summaries that are added up for each of ``blocks`` blocks, for the choice of the cheaper form."""
        return blocks


def _context(mixing: Mixing) -> tuple[tuple[str, Any], ...]:
    """The fields that are not learned tensors, by name."""
    others = (field.name for field in fields(mixing) if field.name not in mixing.learned)  # type: ignore[arg-type]
    return tuple((name, getattr(mixing, name)) for name in others)


def _from_json(value: Any) -> Any:
    return tuple(map(_from_json, value)) if isinstance(value, list) else value
