"""The state of generation: what takes the place of earlier keys and values, and how blocks are opened and closed in it.

The open block is the one that the last token lies in. A row's state is its finished summaries or R running sums of them,
as the mixing keeps them, the summary of the open block so far, and the mixture of the finished ones as the open
block sees it. A block is closed when the first token after it arrives.

Shape letters: B batch, H heads, K and V widths of a key and a value, M blocks, R exponential terms, W = K V + K numbers of a
summary, S row by row and then z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mhla_kernels.blocks import on_device
from mhla_kernels.checks import Problem
from mhla_kernels.mixing import Mixing, Rows, as_it_is
from mhla_kernels.torch_private import pytree


@dataclass(frozen=True)
class StateKind:
    """Properties that a state depends on: the kind of mixing, tokens in a block, widths of key and value."""

    mixing: str
    running_sums: int | None
    block_size: int
    key_width: int
    value_width: int

    def __str__(self) -> str:
        return f"{self.mixing}, block_size={self.block_size}, Dk={self.key_width}, Dv={self.value_width}"


@dataclass(frozen=True)
class MHLAState:
    """The state of :func:`mhla_prefill` and :func:`mhla_step` from call to call; a pytree.

    Attributes:
        lengths: tokens so far in each row, numbers of the CPU, so that no step waits for the device.
        finished: summaries of the finished blocks ``[B, H, capacity, W]``, or running sums of them ``[B, H, R, W]``, as the
            mixing keeps them. Like the other two in float32 (float64 for float64 inputs).
        open: ``[B, H, W]`` summary of the open block.
        mixture: ``[B, H, W]`` mixed summaries of the finished blocks, for the open block.
        kind: kind of state, and what it has to keep.
        owns_finished: whether no other state may append to ``finished``; not part of the pytree.
        spent: whether a step has taken its memory over, after which it is of no use; not part of the pytree either.
    """

    lengths: tuple[int, ...]
    finished: Tensor
    open: Tensor
    mixture: Tensor
    kind: StateKind
    owns_finished: bool = False
    spent: bool = False

    def select(self, rows: Tensor | Sequence[int]) -> MHLAState:
        """The state of other rows, for example the beams that survive: ``rows`` are indices, repeats allowed."""
        if isinstance(rows, Tensor) and (rows.dtype == torch.bool or rows.is_floating_point()):
            raise ValueError(f"rows must be indices, integers; got {rows.dtype}")
        chosen = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        index = on_device(chosen, self.open.device)
        return MHLAState(
            tuple(self.lengths[row] for row in chosen),
            self.finished.index_select(0, index),
            self.open.index_select(0, index),
            self.mixture.index_select(0, index),
            self.kind,
            owns_finished=True,
        )

    @property
    def bytes(self) -> int:
        """Memory of the three tensors."""
        return sum(x.numel() * x.element_size() for x in (self.finished, self.open, self.mixture))


def _from_leaves(kind: StateKind, *leaves: Any) -> MHLAState:
    *lengths, finished, opened, mixture = leaves
    return MHLAState(tuple(lengths), finished, opened, mixture, kind)


pytree.register_pytree_node(
    MHLAState,
    lambda state: ([*state.lengths, state.finished, state.open, state.mixture], state.kind),
    lambda leaves, kind: _from_leaves(kind, *leaves),
    serialized_type_name="mhla_kernels.MHLAState",
)
torch.serialization.add_safe_globals([MHLAState, StateKind])


def kind_of(q: Tensor, v: Tensor, mixing: Mixing, block_size: int) -> StateKind:
    """The kind of a state for these tensors, ``[..., K]`` and ``[..., V]``."""
    return StateKind(str(mixing), mixing.running_sums, block_size, q.shape[-1], v.shape[-1])


def empty_state(q: Tensor, v: Tensor, mixing: Mixing, block_size: int, problem: Problem) -> MHLAState:
    """The state before any token."""
    batch, _, heads, _ = q.shape
    kind = kind_of(q, v, mixing, block_size)
    width = kind.key_width * (kind.value_width + 1)
    zeros = torch.zeros(batch, heads, width, dtype=problem.accumulate, device=q.device)
    finished = zeros.new_zeros(batch, heads, mixing.running_sums or 0, width)
    return MHLAState((0,) * batch, finished, zeros, zeros.clone(), kind)


def groups_of_rows(values: Sequence[int], chosen: Sequence[bool], device: torch.device) -> list[tuple[int, Rows]]:
    """Each distinct value among the chosen rows, with the rows that have it."""
    distinct = sorted({value for value, kept in zip(values, chosen, strict=True) if kept})
    if len(distinct) == 1 and all(chosen):
        return [(distinct[0], slice(None))]
    return [
        (wanted, on_device([row for row, v in enumerate(values) if v == wanted and chosen[row]], device))
        for wanted in distinct
    ]


def own_coefficients(mixing: Mixing, blocks: Sequence[int]) -> Tensor:
    """m[i, i] for block i of each row: ``[B, H, 1]``, or 1 where B or H do not matter."""
    last = max(blocks, default=0)
    own = mixing.own(slice(last, last + 1) if len(set(blocks)) < 2 else blocks, last + 1)
    return own.reshape(-1, own.shape[-1]).T[..., None]


def advance(
    state: MHLAState, mixing: Mixing, block_size: int, moves: Sequence[bool], donated: bool = False
) -> MHLAState:
    """Close the open block of every row that is full and about to get a token; a block of zeros is open then."""
    full = [move and length > 0 and length % block_size == 0 for move, length in zip(moves, state.lengths, strict=True)]
    if not any(full):
        return state
    needed = max(length // block_size for length, closing in zip(state.lengths, full, strict=True) if closing)
    finished = mixing.make_room(state.finished, needed, donated and state.owns_finished)
    opened, mixture = state.open if donated else state.open.clone(), state.mixture.clone()
    for length, rows in groups_of_rows(state.lengths, full, opened.device):
        block = length // block_size
        mixing.append(finished, rows, block - 1, as_it_is(opened[rows])[:, :, None])
        mixture[rows] = mixing.read(as_it_is(finished[rows]), block)
        opened[rows] = 0
    return MHLAState(state.lengths, finished, opened, mixture, state.kind, owns_finished=True)


def close(
    start: MHLAState, summaries_BHMW: Tensor, counts: Sequence[int], mixing: Mixing, block_size: int
) -> MHLAState:
    """The state after ``counts`` more tokens, whose blocks' summaries (the open one's with what it held) are given."""
    lengths = tuple(before + count for before, count in zip(start.lengths, counts, strict=True))
    moved = [count > 0 for count in counts]
    if not any(moved):
        return replace(start, owns_finished=True)
    open_block = [max(length - 1, 0) // block_size for length in lengths]
    finished = mixing.make_room(start.finished, max(open_block), owned=False)
    opened, mixture = start.open.clone(), start.mixture.clone()
    for before in sorted({length for length, moving in zip(start.lengths, moved, strict=True) if moving}):
        first = before // block_size
        inside = [each and length == before for each, length in zip(moved, start.lengths, strict=True)]
        for block, rows in groups_of_rows(open_block, inside, opened.device):
            done = block - first
            if done:
                mixing.append(finished, rows, first, summaries_BHMW[rows][:, :, :done])
                mixture[rows] = mixing.read(as_it_is(finished[rows]), block)
            opened[rows] = summaries_BHMW[rows][:, :, done]
    return MHLAState(lengths, finished, opened, mixture, start.kind, owns_finished=True)
