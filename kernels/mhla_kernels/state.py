"""State of generation: the tensors that replace earlier keys and values, and how blocks are opened and closed in it.

The open block holds the last token. The state of a row is the summaries of its finished blocks or R running sums of them (the
mixing decides which), the summary of the open block so far, and the mixture of the finished blocks as the open block sees it.
A block is closed when the first token after it arrives.

:class:`BlockState` implements every kind of state: ownership of memory, donation, selection of rows, checks, pytrees and
files. A kind adds its tensors and defines how a block is opened.

Shape letters: B batch, H heads, K and V widths of a key and a value, M blocks, R exponential terms, W = K V + K numbers of a
summary, the rows of S followed by z.

Longer than other modules: the rules of ownership concern every method of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from mhla_kernels.blocks import on_device
from mhla_kernels.checks import as_index, read_numbers
from mhla_kernels.mixing import Mixing, Rows
from mhla_kernels.pytrees import register
from mhla_kernels.torch_private import is_traced, is_wrapped

Value = TypeVar("Value")


@dataclass(frozen=True)
class StateKind:
    """Properties in which a state and the calls that continue it must agree.

    Attributes:
        mixing: kind of mixing.
        running_sums: number of running sums that stand for the finished blocks; None if every summary is stored.
        block_size: tokens in a block.
        key_width: width of the keys that are summed, K.
        value_width: width of the values, V.
        near: heads and width of the keys of a softmax window; None without a window.
    """

    mixing: str
    running_sums: int | None
    block_size: int
    key_width: int
    value_width: int
    near: tuple[int, int] | None = None

    def __str__(self) -> str:
        keys = f"Dk={self.key_width}" if self.near is None else "K={}, Hkv={}, Dk={}".format(self.key_width, *self.near)
        return f"{self.mixing}, block_size={self.block_size}, {keys}, Dv={self.value_width}"


Context = tuple[StateKind, tuple[int, ...], bool]


def _context(state: BlockState) -> Context:
    return state.kind, state.lengths, state.spent


def _build(cls: type[BlockState], tensors: dict[str, Any], context: Context) -> BlockState:
    kind, lengths, spent = context
    return cls(lengths=lengths, kind=kind, spent=spent, **tensors)


def _to_json(context: Context) -> list[Any]:
    kind, lengths, spent = context
    return [asdict(kind), list(lengths), spent]


def _from_json(values: list[Any]) -> Context:
    kind, lengths, spent = values
    near = kind.pop("near")
    return StateKind(**kind, near=None if near is None else tuple(near)), tuple(lengths), spent


@dataclass(frozen=True, eq=False)
class BlockState:
    """Base class of the states of generation.

    A state is a pytree of its tensors. ``torch.load`` reads it with ``weights_only=True``.

    States share memory where that is safe. A tensor named in ``own_names`` is written to only by the one state that owns it.
    ``finished`` is only appended to, after the blocks of the states that share it. The other tensors in ``own_names`` are not
    shared, and the remaining tensors are never written to. A state that is built from the leaves of another state owns
    nothing: its tensors are copied even if it is donated.

    Attributes:
        lengths: tokens so far in each row, as Python integers, so that no step waits for the device.
        finished: summaries of the finished blocks ``[B, H, capacity, W]``, or running sums of them ``[B, H, R, W]``,
            depending on the mixing. Float32 (float64 for float64 inputs), like the other sums.
        open: summary of the open block, ``[B, H, W]``.
        mixture: mixed summaries of the finished blocks for the open block, ``[B, H, W]``.
        kind: properties that every call with the state must share.
        spent: whether a step has taken over the memory of the state, which can no longer be used then.
        owned: names of the tensors that a step may write to if the state is donated.
    """

    tensor_names: ClassVar[tuple[str, ...]] = ("finished", "open", "mixture")
    own_names: ClassVar[tuple[str, ...]] = ("finished", "open")  # finished is first, see written()

    lengths: tuple[int, ...]
    finished: Tensor
    open: Tensor
    mixture: Tensor
    kind: StateKind
    spent: bool = field(default=False, kw_only=True)
    owned: tuple[str, ...] = field(default=(), init=False, repr=False)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register(cls, cls.tensor_names, _context, partial(_build, cls), _to_json, _from_json)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: getattr(self, name) for name in self.tensor_names}

    @property
    def bytes(self) -> int:
        """Memory of the tensors in bytes."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    def __copy__(self) -> Self:
        """Return a state over the same memory; neither of the two may write to it from now on."""
        object.__setattr__(self, "owned", ())  # both states share the memory now, so neither owns it
        return replace(self)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return the state of the given rows, for example of the beams that survive.

        Args:
            rows: integer indices of rows; an index may be repeated.

        Raises:
            ValueError: for values that are not indices of rows, and for a state that was donated.
        """
        self.check_unspent()
        chosen = _indices(rows, len(self.lengths))
        index = on_device(chosen, self.open.device)
        tensors = {name: x.index_select(0, index) for name, x in self.tensors.items()}
        lengths = tuple(self.lengths[row] for row in chosen)
        return self.with_tensors(tensors, lengths, self.own_names)

    def with_tensors(self, tensors: dict[str, Tensor], lengths: tuple[int, ...], owned: tuple[str, ...]) -> Self:
        """Return a copy of the state with different tensors.

        Args:
            tensors: new tensors by name.
            lengths: tokens so far in each row.
            owned: names of the tensors that the new state owns.
        """
        changes: dict[str, Any] = {**tensors, "lengths": lengths}
        state = replace(self, **changes)
        object.__setattr__(state, "owned", owned)
        return state

    def spend(self) -> None:
        """Mark the state as donated."""
        object.__setattr__(self, "spent", True)

    def check_unspent(self) -> None:
        """Reject a state that was donated.

        Raises:
            ValueError: naming the alternatives.
        """
        if self.spent:
            raise ValueError(
                "the state was donated to an earlier step, which has changed it; continue with the state that this step "
                "returned, or call the step with donate_state=False"
            )

    def check(self, kind: StateKind, batch: int, heads: int, accumulate: torch.dtype) -> None:
        """Check that a call may continue the state.

        Raises:
            ValueError: naming the mismatch, or for a state that was donated.
        """
        self.check_unspent()
        if len(self.lengths) != batch:
            raise ValueError(f"the state has {len(self.lengths)} rows, but q has B={batch}")
        if self.kind != kind:
            raise ValueError(
                f"the state was made with {self.kind}, but the call is with {kind}; continue with the options that the state "
                "was made with"
            )
        if self.open.shape[1] != heads:
            raise ValueError(f"the state has {self.open.shape[1]} heads, but q has H={heads}")
        if self.open.dtype != accumulate:
            raise ValueError(
                f"the state is in {self.open.dtype}, but these tensors are summed in {accumulate}; resume in the "
                "precision that the state was made in"
            )

    def written(self, owned: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the tensors that a state owns if all of them but ``finished`` are new.

        Args:
            owned: names of the tensors owned before; the state owns ``finished`` only if it is among them.
        """
        return self.own_names if "finished" in owned else self.own_names[1:]

    def may_write(self, *others: Tensor) -> bool:
        """Whether results of this state and other tensors may be written into existing memory.

        Memory is not overwritten where a backward pass may need its present values, while torch traces, and under
        ``torch.func``, whose tensors do not fit into ordinary ones.
        """
        if is_traced():
            return False
        recording = torch.is_grad_enabled()
        for name in self.tensor_names:  # loops build no lists; this runs at every step
            x: Tensor = getattr(self, name)
            if x.requires_grad or is_wrapped(x):
                return False
        for x in others:
            if is_wrapped(x) or (recording and x.requires_grad):
                return False
        # outside inference mode, torch forbids writing to tensors that were made in it
        return not self.open.is_inference() or torch.is_inference_mode_enabled()

    def advance(self, mixing: Mixing, moves: Sequence[bool], writes: bool, donated: bool = False) -> Self:
        """Close the full open block of every row that is about to get a token, and open an empty one.

        Args:
            mixing: the coefficients.
            moves: whether each row gets a token.
            writes: whether memory may be written to, see :meth:`may_write`.
            donated: whether memory of this state may be written to.

        Returns:
            The new state, or this state if no block is closed.
        """
        size = self.kind.block_size
        full = [move and length > 0 and length % size == 0 for move, length in zip(moves, self.lengths, strict=True)]
        if not any(full):
            return self
        opened = [length // size for length in self.lengths]
        draft = Draft(self, mixing, self._finished_at(max(opened)), writes, donated)
        for block, rows in groups_of_rows(opened, full, self.open.device):
            self._open_block(draft, rows, block)
        return draft.state(self.lengths)

    def _finished_at(self, block: int) -> int:
        """Return the number of finished blocks while ``block`` is open."""
        raise NotImplementedError

    def _open_block(self, draft: Draft, rows: Rows, block: int) -> None:
        """Open ``block``, which is empty, in some rows of a draft."""
        raise NotImplementedError


class Draft:
    """New state under construction; tensors are copied before they are written to, unless they are new or donated.

    Args:
        state: state to start from; it changes only if ``donated``.
        mixing: the coefficients.
        finished: number of finished blocks to make room for.
        writes: whether anything may be written in place.
        donated: whether tensors that ``state`` owns may be written in place.
    """

    def __init__(self, state: BlockState, mixing: Mixing, finished: int, writes: bool, donated: bool = False) -> None:
        self.begun, self.mixing, self.writes = state, mixing, writes
        self.tensors = state.tensors
        self.mine = set(state.owned) if writes and donated else set()
        room = mixing.make_room(state.finished, finished, "finished" in self.mine)
        if room is not state.finished:
            self.put_all("finished", room)

    def put_all(self, name: str, x: Tensor) -> None:
        """Replace a tensor by a new one, which the new state owns."""
        self.tensors[name] = x
        self.mine.add(name)

    def put(self, name: str, rows: Rows, values: Tensor) -> None:
        """Replace rows of a tensor by new values, which must not share memory with another tensor."""
        x = self.tensors[name]
        if self.writes and name in self.mine:
            x[rows] = values
        else:
            self.put_all(name, values if isinstance(rows, slice) else x.index_copy(0, rows, values))

    def finish(self, rows: Rows, first: int, summaries: Tensor, reader: int) -> None:
        """Append finished blocks and update the mixture of all finished blocks.

        Args:
            rows: rows that the blocks belong to.
            first: index of the first appended block.
            summaries: summaries of the appended blocks, ``[B, H, n, W]``.
            reader: index of the block that the mixture is for.
        """
        in_place = self.writes and "finished" in self.mine
        self.put_all("finished", self.mixing.append(self.tensors["finished"], rows, first, summaries, in_place))
        self.put("mixture", rows, self.mixing.read(self.tensors["finished"][rows], reader))

    def state(self, lengths: tuple[int, ...]) -> Any:
        """Return the new state."""
        owned = tuple(name for name in self.begun.own_names if name in self.mine)
        return self.begun.with_tensors(self.tensors, lengths, owned)


@dataclass(frozen=True, eq=False)
class MHLAState(BlockState):
    """State of :func:`mhla_prefill` and :func:`mhla_step` between calls; see :class:`BlockState`."""

    @override
    def _finished_at(self, block: int) -> int:
        return block

    @override
    def _open_block(self, draft: Draft, rows: Rows, block: int) -> None:
        summary = draft.tensors["open"][rows]
        draft.finish(rows, block - 1, summary[:, :, None], block)
        draft.put("open", rows, torch.zeros_like(summary))


torch.serialization.add_safe_globals([StateKind])


def kind_of(q: Tensor, v: Tensor, mixing: Mixing, block_size: int, near: tuple[int, int] | None = None) -> StateKind:
    """Return the kind of a state for queries ``[..., K]`` and values ``[..., V]``."""
    return StateKind(str(mixing), mixing.running_sums, block_size, q.shape[-1], v.shape[-1], near)


def empty_tensors(q: Tensor, v: Tensor, mixing: Mixing, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors of a state before the first token, by name; ``q`` is ``[B, N, H, K]`` and ``v`` ``[..., V]``."""
    batch, _, heads, width = q.shape
    zeros = torch.zeros(batch, heads, width * (v.shape[-1] + 1), dtype=dtype, device=q.device)
    finished = zeros.new_zeros(batch, heads, mixing.running_sums or 0, zeros.shape[-1])
    return {"finished": finished, "open": zeros, "mixture": zeros.clone()}


def groups_of_rows(values: Sequence[Value], chosen: Sequence[bool], device: torch.device) -> list[tuple[Value, Rows]]:
    """Group the chosen rows by value.

    Args:
        values: value of each row.
        chosen: whether each row counts.
        device: device of the returned indices.

    Returns:
        Each distinct value with the rows that have it; a full slice if all rows are chosen and equal.
    """
    distinct: list[Value] = sorted({value for value, kept in zip(values, chosen, strict=True) if kept})  # type: ignore[type-var]
    if len(distinct) == 1 and all(chosen):  # the common case: a slice needs no index on the device, and no copy
        return [(distinct[0], slice(None))]
    return [
        (wanted, on_device([row for row, v in enumerate(values) if v == wanted and chosen[row]], device))
        for wanted in distinct
    ]


def by_groups(groups: Sequence[tuple[Value, Rows]], make: Callable[[Value, Rows], Tensor]) -> Tensor:
    """Compute a result for each group of rows, and return the results in the order of the rows.

    Args:
        groups: values with their rows; every row belongs to exactly one group.
        make: function from a value and its rows to a tensor with these rows.
    """
    parts = [make(value, rows) for value, rows in groups]
    if len(parts) == 1:
        return parts[0]
    order = torch.cat([rows for _, rows in groups if isinstance(rows, Tensor)])
    return torch.cat(parts).index_select(0, order.argsort())


def own_coefficients(mixing: Mixing, blocks: Sequence[int]) -> Tensor:
    """Return m[i, i] for block i of each row: ``[B, H, 1]``, where B or H is 1 if the coefficient does not depend on it."""
    last = max(blocks, default=0)
    own = mixing.own(slice(last, last + 1) if len(set(blocks)) < 2 else blocks, last + 1)
    return own.reshape(-1, own.shape[-1]).T[..., None]


def close(start: MHLAState, summaries_BHMW: Tensor, counts: Sequence[int], mixing: Mixing, writes: bool) -> MHLAState:
    """Return the state after more tokens.

    Args:
        start: state in which the first block of the call is open in every row.
        summaries_BHMW: summaries of the blocks of the call; the first one includes the earlier tokens of the block.
        counts: number of new tokens of each row.
        mixing: the coefficients.
        writes: whether memory may be written to, see :meth:`BlockState.may_write`.
    """
    size = start.kind.block_size
    lengths = tuple(before + count for before, count in zip(start.lengths, counts, strict=True))
    moved = [count > 0 for count in counts]
    blocks = [(before // size, max(after - 1, 0) // size) for before, after in zip(start.lengths, lengths, strict=True)]
    draft = Draft(start, mixing, max((block for _, block in blocks), default=0), writes)
    for (first, block), rows in groups_of_rows(blocks, moved, start.open.device):
        done, summaries = block - first, summaries_BHMW[rows]
        if done:
            draft.finish(rows, first, summaries[:, :, :done], block)
        # a clone, since a view would keep the summaries of all blocks in memory
        draft.put("open", rows, summaries[:, :, done].clone())
    state: MHLAState = draft.state(lengths)
    return state


def _indices(rows: Tensor | Sequence[int], batch: int) -> list[int]:
    """Check indices of rows and return them as Python integers."""
    if isinstance(rows, Tensor):
        if rows.dtype == torch.bool or rows.is_floating_point() or rows.dim() != 1:
            raise ValueError(f"rows must be one dimension of integer indices, got {rows.dtype} {list(rows.shape)}")
        rows = read_numbers(rows, "rows")
    chosen = [as_index(row) for row in rows]
    if any(row is None or not 0 <= row < batch for row in chosen):
        raise ValueError(f"rows must be integer indices from 0 to {batch - 1}, got {list(rows)[:8]}")
    return [row for row in chosen if row is not None]
