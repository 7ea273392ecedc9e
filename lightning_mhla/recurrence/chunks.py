"""Chunks of tokens, and the scan over them that all recurrences share.

Shape letters: B batch, N tokens, H heads, K and V widths of a key and a value, M chunks, C tokens of a chunk, S sequences
that are packed in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from mhla_kernels.blocks import BlockPartition, make_partition
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunk_tokens(width: int) -> int:
    """Tokens of a chunk for keys and values of up to ``width`` features.

    A chunk's matrix of weights costs as much as its width, a state as much as the square of that; 32 and 64 tokens measured
    fastest on a CPU below and above 32 features, forward and backward.
    """
    return 32 if width <= 32 else 64


class ChunkedInputs(NamedTuple):
    """Checked inputs of a recurrence, in chunks.

    Attributes:
        q: ``[B, H, M, C, K]``, scaled, in float32 (float64 for float64 inputs). Slots without a token hold zeros.
        k: ``[B, H, M, C, K]``.
        v: ``[B, H, M, C, V]``.
        initial: ``[B, H, K, V]``, or ``[S, H, K, V]`` for packed sequences.
        bounds: first chunk of each sequence, and M.
        partition: partition of the tokens into chunks.
        dtype: dtype of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    initial: Tensor
    bounds: tuple[int, ...]
    partition: BlockPartition
    dtype: torch.dtype

    def split(self, x: Tensor) -> Tensor:
        """``[B, N, H, ...]`` to ``[B, H, M, C, ...]``, as q, k and v."""
        wide = x.to(self.q.dtype)
        return self.partition.split(wide) if x.dim() == 4 else self.partition.split(wide[..., None])[..., 0]

    def merge(self, out: Tensor) -> Tensor:
        """``[B, H, M, C, V]`` to ``[B, N, H, V]`` in the dtype of the output."""
        return self.partition.merge(out).to(self.dtype)


def check(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | Sequence[int] | None
) -> list[int] | None:
    """Bounds of packed sequences as numbers; None for one sequence in each row.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"q and k must be [B, N, H, Dk] and v [B, N, H, Dv]; got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    bounds = None
    if cu_seqlens is not None:
        bounds = [int(bound) for bound in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
        if len(q) != 1:
            raise ValueError(f"cu_seqlens packs sequences in one row, but the batch has {len(q)}")
        rising = len(bounds) > 1 and all(start <= end for start, end in pairwise(bounds))
        if not rising or bounds[0] != 0 or bounds[-1] != q.shape[1]:
            raise ValueError(f"cu_seqlens={bounds} must rise from 0 to the number of tokens, {q.shape[1]}")
    rows = len(q) if bounds is None else len(bounds) - 1
    wanted = (rows, q.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != wanted:
        raise ValueError(f"initial_state must be {list(wanted)}; got {list(initial_state.shape)}")
    return bounds


def check_gate(name: str, gate: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError when a tensor of gates has another shape than ``shape``."""
    if tuple(gate.shape) != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)}; got {list(gate.shape)}")


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> ChunkedInputs:
    """Checked inputs in chunks; every packed sequence has chunks of its own."""
    wide = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cpu")
    tokens = q.shape[1]
    chunk = chunk_tokens(max(q.shape[-1], v.shape[-1]))
    partition = make_partition(tokens, q.device, chunk, None, cu_seqlens) if tokens else BlockPartition(0, 0, 1)
    chunks: tuple[int, ...] = (0, partition.blocks)
    if bounds is not None:
        counts = [-(-(end - start) // partition.slots) if end > start else 0 for start, end in pairwise(bounds)]
        chunks = tuple(sum(counts[:index]) for index in range(len(counts) + 1))
    rows = len(q) if bounds is None else len(bounds) - 1
    initial = (
        torch.zeros(rows, q.shape[2], q.shape[3], v.shape[3], dtype=wide, device=q.device)
        if initial_state is None
        else initial_state.to(wide)
    )
    q = q.to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v_split = (partition.split(x.to(wide)) for x in (q, k, v))
    return ChunkedInputs(q, k, v_split, initial, chunks, partition, v.dtype)


def scan_chunks(decay: Tensor, update: Tensor, initial: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """States before every chunk, and after the last one of each sequence, of ``state = decay * state + update``.

    Args:
        decay: ``[B, H, M, K, 1]`` or ``[B, H, M, 1, 1]``.
        update: ``[B, H, M, K, V]``.
        initial: ``[B, H, K, V]``, or ``[S, H, K, V]`` for packed sequences.
        bounds: first chunk of each sequence, and M.

    Returns:
        ``[B, H, M, K, V]``, and a tensor like ``initial``.
    """
    return _Scan.apply(decay, update, initial, tuple(bounds))


def rows_of(initial: Tensor, bounds: Sequence[int], sequence: int) -> Tensor:
    """The state that a sequence starts from: all rows, or one of packed sequences."""
    return initial if len(bounds) == 2 else initial[sequence : sequence + 1]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, decay: Tensor, update: Tensor, initial: Tensor, bounds: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        before, final = torch.empty_like(update), []
        for sequence, (first, last) in enumerate(pairwise(bounds)):
            state = rows_of(initial, bounds, sequence)
            for chunk in range(first, last):
                before[:, :, chunk] = state
                state = torch.addcmul(update[:, :, chunk], decay[:, :, chunk], state)
            final.append(state)
        ctx.save_for_backward(decay, before)
        ctx.bounds = bounds
        return before, torch.cat(final)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        to_before, to_final = grads
        decay, before = ctx.saved_tensors
        to_update, to_initial = torch.empty_like(before), []
        for sequence, (first, last) in enumerate(pairwise(ctx.bounds)):
            slope = rows_of(to_final, ctx.bounds, sequence)
            for chunk in reversed(range(first, last)):
                to_update[:, :, chunk] = slope
                slope = torch.addcmul(to_before[:, :, chunk], decay[:, :, chunk], slope)
            to_initial.append(slope)
        to_decay = (to_update * before).sum_to_size(decay.shape)
        return to_decay, to_update, torch.cat(to_initial), None
