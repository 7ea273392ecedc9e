"""The state of generation: what takes the place of earlier keys and values, and how blocks are opened and closed in it.

The open block is the one that the last token lies in. A row's state is its finished summaries or R running sums of them,
as the mixing keeps them, the summary of the open block so far, and the mixture of the finished ones as the open
block sees it. A block is closed when the first token after it arrives.

:class:`BlockState` is the one implementation of every kind of state: ownership of memory, donation, selection of rows, checks,
pytrees and files. A kind adds its tensors and says what happens where a block is opened.

Shape letters: B batch, H heads, K and V widths of a key and a value, M blocks, R exponential terms, W = K V + K numbers of a
summary, S row by row and then z.
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
from mhla_kernels.checks import Problem, as_index, read_numbers
from mhla_kernels.mixing import Mixing, Rows
from mhla_kernels.pytrees import register
from mhla_kernels.torch_private import is_traced, is_wrapped

Value = TypeVar("Value")


@dataclass(frozen=True)
class StateKind:
    """Properties that a state depends on.

    Attributes:
        mixing: kind of mixing.
        running_sums: number of running sums that stand for the finished blocks; None where every summary is kept.
        block_size: tokens in a block.
        key_width: width of the keys that are summed, K.
        value_width: width of the values, V.
        near: heads and width of the keys of a softmax window; None without one.
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
    """A state of generation; a pytree of its tensors, which ``torch.load`` reads with ``weights_only=True``.

    States share memory where that is safe. The tensors named in ``own_names`` are written to by the one state that owns them:
    ``finished`` is only appended to, past the blocks of states that share it; the others are not shared. The rest is never
    written to.
    A state that is made from the leaves of another one owns nothing: donated, it is copied.

    Attributes:
        lengths: tokens so far in each row, numbers of the CPU, so that no step waits for the device.
        finished: summaries of the finished blocks ``[B, H, capacity, W]``, or running sums of them ``[B, H, R, W]``, as the
            mixing keeps them. Like the other sums in float32 (float64 for float64 inputs).
        open: ``[B, H, W]`` summary of the open block.
        mixture: ``[B, H, W]`` mixed summaries of the finished blocks, for the open block.
        kind: kind of state, and what it has to keep.
        spent: whether a step has taken its memory over, after which it is of no use.
        owned: tensors that a step may write to if the state is donated.
    """

    tensor_names: ClassVar[tuple[str, ...]] = ("finished", "open", "mixture")
    own_names: ClassVar[tuple[str, ...]] = ("finished", "open")  # finished first

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
        """Memory of the tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    def __copy__(self) -> Self:
        """The same state over the same memory, which neither of the two may write to."""
        object.__setattr__(self, "owned", ())
        return replace(self)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """The state of other rows, for example the beams that survive.

        Args:
            rows: indices of rows, integers; repeats are allowed.

        Raises:
            ValueError: for anything but indices of rows, and for a state that was donated.
        """
        self.check_unspent()
        chosen = _indices(rows, len(self.lengths))
        index = on_device(chosen, self.open.device)
        tensors = {name: x.index_select(0, index) for name, x in self.tensors.items()}
        lengths = tuple(self.lengths[row] for row in chosen)
        return self.with_tensors(tensors, lengths, self.own_names)

    def with_tensors(self, tensors: dict[str, Tensor], lengths: tuple[int, ...], owned: tuple[str, ...]) -> Self:
        """The state with other tensors, of which it owns some."""
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
            ValueError: saying what to do instead.
        """
        if self.spent:
            raise ValueError(
                "the state was donated to an earlier step, which has changed it; continue with the state that this step "
                "returned, or step with donate_state=False"
            )

    def check(self, kind: StateKind, batch: int, heads: int, accumulate: torch.dtype) -> None:
        """Check that a call may continue the state.

        Raises:
            ValueError: naming what does not fit.
        """
        self.check_unspent()
        if len(self.lengths) != batch:
            raise ValueError(f"the state is of {len(self.lengths)} rows, but q has B={batch}")
        if self.kind != kind:
            raise ValueError(
                f"the state is of {self.kind}, but the call is with {kind}: they do not fit; a state keeps the kind that it "
                "began with"
            )
        if self.open.shape[1] != heads:
            raise ValueError(f"the state is of {self.open.shape[1]} heads, but q has H={heads}")
        if self.open.dtype != accumulate:
            raise ValueError(
                f"the state is in {self.open.dtype}, but these tensors are summed in {accumulate}; resume in the "
                "precision that the state began with"
            )

    def written(self, owned: tuple[str, ...]) -> tuple[str, ...]:
        """Return the tensors that a state owns once all but ``finished`` are new: ``finished`` too, if ``owned`` has it."""
        return self.own_names if "finished" in owned else self.own_names[1:]

    def may_write(self, *others: Tensor) -> bool:
        """Whether results of these tensors can be written into memory that is there.

        Not where a backward pass may want it as it is, not while torch traces, and not under ``torch.func``, whose tensors do
        not fit into ordinary ones.
        """
        if is_traced():
            return False
        recording = torch.is_grad_enabled()
        for name in self.tensor_names:  # loops, since every step asks
            x: Tensor = getattr(self, name)
            if x.requires_grad or is_wrapped(x):
                return False
        for x in others:
            if is_wrapped(x) or (recording and x.requires_grad):
                return False
        return not self.open.is_inference() or torch.is_inference_mode_enabled()

    def advance(self, mixing: Mixing, moves: Sequence[bool], writes: bool, donated: bool = False) -> Self:
        """Close the open block of every row that is full and about to get a token; a block of zeros is open then.

        Args:
            mixing: the coefficients.
            moves: whether each row gets a token.
            writes: whether memory may be written to, see :meth:`may_write`.
            donated: whether that of this state may.
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
        """Number of finished blocks while ``block`` is open."""
        raise NotImplementedError

    def _open_block(self, draft: Draft, rows: Rows, block: int) -> None:
        """Open block ``block`` of some rows, empty."""
        raise NotImplementedError


class Draft:
    """A state in the making. What is written to is copied first, unless it is new or was donated.

    Args:
        state: state to begin with; it changes only if ``donated``.
        mixing: the coefficients.
        finished: number of finished blocks to make room for.
        writes: whether anything may be written in place.
        donated: whether tensors that ``state`` owns may be.
    """

    def __init__(self, state: BlockState, mixing: Mixing, finished: int, writes: bool, donated: bool = False) -> None:
        self.begun, self.mixing, self.writes = state, mixing, writes
        self.tensors = state.tensors
        self.mine = set(state.owned) if writes and donated else set()
        room = mixing.make_room(state.finished, finished, "finished" in self.mine)
        if room is not state.finished:
            self.put_all("finished", room)

    def put_all(self, name: str, x: Tensor) -> None:
        """Replace a tensor by a new one."""
        self.tensors[name] = x
        self.mine.add(name)

    def put(self, name: str, rows: Rows, values: Tensor) -> None:
        """Replace rows of a tensor by new values, which nobody else holds."""
        x = self.tensors[name]
        if self.writes and name in self.mine:
            x[rows] = values
        else:
            self.put_all(name, values if isinstance(rows, slice) else x.index_copy(0, rows, values))

    def finish(self, rows: Rows, first: int, summaries: Tensor, reader: int) -> None:
        """Add finished blocks ``[B, H, n, W]``, ``first`` and those after it, and mix all for block ``reader``."""
        in_place = self.writes and "finished" in self.mine
        self.put_all("finished", self.mixing.append(self.tensors["finished"], rows, first, summaries, in_place))
        self.put("mixture", rows, self.mixing.read(self.tensors["finished"][rows], reader))

    def state(self, lengths: tuple[int, ...]) -> Any:
        """The state that has come about."""
        owned = tuple(name for name in self.begun.own_names if name in self.mine)
        return self.begun.with_tensors(self.tensors, lengths, owned)


@dataclass(frozen=True, eq=False)
class MHLAState(BlockState):
    """The state of :func:`mhla_prefill` and :func:`mhla_step` from call to call; see :class:`BlockState`."""

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
    """The kind of a state for these tensors, ``[..., K]`` and ``[..., V]``."""
    return StateKind(str(mixing), mixing.running_sums, block_size, q.shape[-1], v.shape[-1], near)


def empty_tensors(q: Tensor, v: Tensor, mixing: Mixing, problem: Problem) -> dict[str, Any]:
    """Tensors of a state before any token; ``q`` is ``[B, N, H, K]`` and ``v`` ``[..., V]``."""
    batch, _, heads, width = q.shape
    zeros = torch.zeros(batch, heads, width * (v.shape[-1] + 1), dtype=problem.accumulate, device=q.device)
    finished = zeros.new_zeros(batch, heads, mixing.running_sums or 0, zeros.shape[-1])
    return {"finished": finished, "open": zeros, "mixture": zeros.clone()}


def groups_of_rows(values: Sequence[Value], chosen: Sequence[bool], device: torch.device) -> list[tuple[Value, Rows]]:
    """Each distinct value among the chosen rows, with the rows that have it."""
    distinct: list[Value] = sorted({value for value, kept in zip(values, chosen, strict=True) if kept})  # type: ignore[type-var]
    if len(distinct) == 1 and all(chosen):
        return [(distinct[0], slice(None))]
    return [
        (wanted, on_device([row for row, v in enumerate(values) if v == wanted and chosen[row]], device))
        for wanted in distinct
    ]


def by_groups(groups: Sequence[tuple[Value, Rows]], make: Callable[[Value, Rows], Tensor]) -> Tensor:
    """Results for groups of rows, which are all rows together, in the order of the rows."""
    parts = [make(value, rows) for value, rows in groups]
    if len(parts) == 1:
        return parts[0]
    order = torch.cat([rows for _, rows in groups if isinstance(rows, Tensor)])
    return torch.cat(parts).index_select(0, order.argsort())


def own_coefficients(mixing: Mixing, blocks: Sequence[int]) -> Tensor:
    """m[i, i] for block i of each row: ``[B, H, 1]``, or 1 where B or H do not matter."""
    last = max(blocks, default=0)
    own = mixing.own(slice(last, last + 1) if len(set(blocks)) < 2 else blocks, last + 1)
    return own.reshape(-1, own.shape[-1]).T[..., None]


def close(start: MHLAState, summaries_BHMW: Tensor, counts: Sequence[int], mixing: Mixing, writes: bool) -> MHLAState:
    """The state after ``counts`` more tokens, whose blocks' summaries (the open one's with what it held) are given."""
    size = start.kind.block_size
    lengths = tuple(before + count for before, count in zip(start.lengths, counts, strict=True))
    moved = [count > 0 for count in counts]
    blocks = [(before // size, max(after - 1, 0) // size) for before, after in zip(start.lengths, lengths, strict=True)]
    draft = Draft(start, mixing, max((block for _, block in blocks), default=0), writes)
    for (first, block), rows in groups_of_rows(blocks, moved, start.open.device):
        done, summaries = block - first, summaries_BHMW[rows]
        if done:
            draft.finish(rows, first, summaries[:, :, :done], block)
        draft.put("open", rows, summaries[:, :, done].clone())  # a view would keep all of them
    state: MHLAState = draft.state(lengths)
    return state


def _indices(rows: Tensor | Sequence[int], batch: int) -> list[int]:
    """Indices of rows as numbers of the CPU."""
    if isinstance(rows, Tensor):
        if rows.dtype == torch.bool or rows.is_floating_point() or rows.dim() != 1:
            raise ValueError(f"rows must be indices, integers; got {rows.dtype} {list(rows.shape)}")
        rows = read_numbers(rows, "rows")
    chosen = [as_index(row) for row in rows]
    if any(row is None or not 0 <= row < batch for row in chosen):
        raise ValueError(f"rows must be indices, integers from 0 to {batch - 1}; got {list(rows)[:8]}")
    return [row for row in chosen if row is not None]
