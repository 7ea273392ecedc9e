"""State of generation: the tensors that replace earlier keys and values, and how blocks begin and end in it.

The open block of a row is the block that contains its last token. The state of a row consists of three parts: the summaries of
its finished blocks, or R running sums of them (depending on the kind of mixing); the summary of the open block so far; and the
mixture of the finished blocks as the open block reads it. A block is closed when the first token after it arrives.

:class:`BlockState` implements ownership of memory, donation, selection of rows, checks, pytrees and files. A subclass adds its
tensors and defines how a block is opened.

Shape letters: B batch, H heads, K and V widths of a key and a value, M blocks, R exponential terms, ``W = K V + K`` numbers of
a summary (the K V sums of key-value products, row by row, then the K sums of keys).
"""

# Longer than other modules because the rules of memory ownership concern every method of a state.

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from mhla_kernels.blocks import on_device
from mhla_kernels.checks import as_indices
from mhla_kernels.mixing import Mixing, Rows
from mhla_kernels.pytrees import register
from mhla_kernels.torch_private import is_traced, is_wrapped

Value = TypeVar("Value")


@dataclass(frozen=True)
class StateKind:
    """Properties that must be the same in a generation state and in every call that continues it.

    Attributes:
        mixing: description of the kind of mixing, such as ``"dense mixing"``.
        running_sums: number of running sums that replace all finished blocks; None if every block summary is stored.
        block_size: tokens in a block.
        key_width: width of the keys in block summaries, K.
        value_width: width of the values, V.
        near: number of heads and width of the keys that the state stores for softmax attention between near tokens; None if
            there is no softmax attention.
        sinks: number of first tokens that every token attends to by softmax.
        block_causal: whether tokens attend to all tokens of their own block, so that a row can be continued only after a
            complete block.
    """

    mixing: str
    running_sums: int | None
    block_size: int
    key_width: int
    value_width: int
    near: tuple[int, int] | None = None
    sinks: int = 0
    block_causal: bool = False

    def __str__(self) -> str:
        keys = f"Dk={self.key_width}" if self.near is None else "K={}, Hkv={}, Dk={}".format(self.key_width, *self.near)
        sinks = f", sinks={self.sinks}" if self.sinks else ""
        blocks = ", causal='block'" if self.block_causal else ""
        return f"{self.mixing}, block_size={self.block_size}, {keys}, Dv={self.value_width}{sinks}{blocks}"


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
    """Base class of generation states, which hold block summaries in place of the keys and values of earlier tokens.

    A state is a pytree of its tensors. ``torch.load`` reads it with ``weights_only=True``.

    The class attribute ``tensor_names`` lists the fields that are tensors.

    States share memory where that is safe. The class attribute ``own_names`` names the tensors that may be written to in place.
    Each of these tensors is owned by at most one state. It is written to only if a caller donates this state, that is, passes
    the state to a function for a single token with ``donate_state=True``. ``finished`` may be shared, but blocks are only
    appended after those that the other states read. The remaining tensors are never written to. A state that is built from the
    leaves of another state owns nothing: its tensors are copied even if it is donated.

    Attributes:
        lengths: number of tokens so far in each row, as Python integers, so that no step waits for the device.
        finished: summaries of the finished blocks ``[B, H, capacity, W]`` with W numbers each, or R running sums of them
            ``[B, H, R, W]``, depending on the kind of mixing. Float32 (float64 for float64 inputs), like ``open`` and
            ``mixture``.
        open: summary of the open block, which contains the last token of a row, ``[B, H, W]``.
        mixture: mixed summaries of the finished blocks, as the open block reads them, ``[B, H, W]``.
        kind: properties that every call with the state must share.
        spent: whether the state was donated, so that it can no longer be used.
        owned: names of the tensors that the state owns.
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
        """All tensors of the state, by name."""
        return {name: getattr(self, name) for name in self.tensor_names}

    @property
    def bytes(self) -> int:
        """Memory of all tensors of the state, in bytes."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    def __copy__(self) -> Self:
        """Return a state that shares the memory of this one. From now on, neither state writes to this memory."""
        object.__setattr__(self, "owned", ())  # both states share the memory now, so neither owns it
        return replace(self)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return a state that holds only the given rows of the batch, for example the surviving beams of a beam search.

        Args:
            rows: integer indices of rows; an index may be repeated.

        Raises:
            ValueError: if an index is not an integer or is out of range, or if this state was passed to a function with
                ``donate_state=True``, which may have overwritten it.
        """
        self.check_unspent()
        chosen = _indices(rows, len(self.lengths))
        index = on_device(chosen, self.open.device)
        tensors = {name: x.index_select(0, index) for name, x in self.tensors.items()}
        lengths = tuple(self.lengths[row] for row in chosen)
        return self.with_tensors(tensors, lengths, self.own_names)

    def with_tensors(self, tensors: dict[str, Tensor], lengths: tuple[int, ...], owned: tuple[str, ...]) -> Self:
        """Return a copy of the state in which some tensors are replaced.

        Args:
            tensors: new tensors by name.
            lengths: number of tokens so far in each row.
            owned: names of the tensors that the new state owns: they may be written to in place later.
        """
        changes: dict[str, Any] = {**tensors, "lengths": lengths}
        state = replace(self, **changes)
        object.__setattr__(state, "owned", owned)
        return state

    def spend(self) -> None:
        """Mark the state as unusable, because a function called with ``donate_state=True`` may have overwritten its tensors."""
        object.__setattr__(self, "spent", True)

    def check_unspent(self) -> None:
        """Check that the state was not passed to a function with ``donate_state=True``, which may have overwritten its tensors.

        Raises:
            ValueError: if the state was passed to such a function; the message says how to continue.
        """
        if self.spent:
            raise ValueError(
                "the state was donated to an earlier step, which has changed it; continue with the state that this step "
                "returned, or call the step with donate_state=False"
            )

    def check(self, kind: StateKind, batch: int, heads: int, accumulate: torch.dtype) -> None:
        """Check that an attention call for further tokens may continue the state.

        Args:
            kind: properties of the call, such as its block size.
            batch: batch size of the call.
            heads: number of heads of the call.
            accumulate: dtype in which the call computes sums.

        Raises:
            ValueError: if a property, size or dtype differs between the state and the call; the message names the difference.
                Also if the state was already passed to a function with ``donate_state=True``.
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
        """Return the names of the tensors that a new state, created for one more token, owns and may later overwrite in place.

        These are all tensors in ``own_names``, except that ``finished`` is left out unless ``owned`` contains it.

        Args:
            owned: names of the tensors that the previous state owned.
        """
        return self.own_names if "finished" in owned else self.own_names[1:]

    def may_write(self, *others: Tensor) -> bool:
        """Return whether results that are computed from this state and from other tensors may be written into existing memory.

        The result is False while torch records a graph, if a backward pass may need the values in this memory, under
        ``torch.func`` (whose tensors cannot be written into ordinary ones), and outside inference mode if a tensor of the state
        was created in inference mode.
        """
        if is_traced():
            return False
        recording, inferring = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for x in others:  # loops build no lists; this runs at every step
            if is_wrapped(x) or (recording and x.requires_grad):
                return False
        for name in self.tensor_names:
            x = getattr(self, name)
            # outside inference mode, torch forbids writing to tensors that were made in it
            if x.requires_grad or is_wrapped(x) or (x.is_inference() and not inferring):
                return False
        return True

    def advance(self, mixing: Mixing, moves: Sequence[bool], writes: bool, donated: bool = False) -> Self:
        """Start a new block in every row that gets a token and whose last block is full.

        The full block becomes one of the finished blocks.

        Args:
            mixing: mixing coefficients between blocks.
            moves: flag for each row, True if the row gets a token.
            writes: whether tensors may be written to in place at all (see :meth:`may_write`).
            donated: whether the caller gives up this state, so that the tensors that it owns may be written to as well.

        Returns:
            The new state, or this state if no row starts a block.
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
        """Return the number of blocks in ``finished`` for a row whose last block has the index ``block``.

        Subclasses implement this method.
        """
        raise NotImplementedError

    def _open_block(self, draft: Draft, rows: Rows, block: int) -> None:
        """Start an empty block in some rows of a generation state under construction. Subclasses implement this method.

        Args:
            draft: the state under construction.
            rows: rows in which the block starts: a slice of all rows, or a tensor of row indices.
            block: index of the block.
        """
        raise NotImplementedError


class Draft:
    """Generation state under construction, which copies the tensors of another state before it writes to them.

    Two kinds of tensors may be written to without a copy: new ones and, if ``donated``, those that the other state owns.

    Args:
        state: generation state to start from.
        mixing: mixing coefficients between blocks.
        finished: number of finished blocks to make room for.
        writes: whether any tensor may be written to in place.
        donated: whether tensors that ``state`` owns may be written to in place, because ``state`` is not used afterwards.
    """

    def __init__(self, state: BlockState, mixing: Mixing, finished: int, writes: bool, donated: bool = False) -> None:
        self.begun, self.mixing, self.writes = state, mixing, writes
        self.tensors = state.tensors
        self.mine = set(state.owned) if writes and donated else set()
        room = mixing.make_room(state.finished, finished, "finished" in self.mine)
        if room is not state.finished:
            self.put_all("finished", room)

    def put_all(self, name: str, x: Tensor) -> None:
        """Replace a tensor of the state under construction with a new one, which this state then owns.

        Args:
            name: name of the tensor.
            x: the new tensor.
        """
        self.tensors[name] = x
        self.mine.add(name)

    def put(self, name: str, rows: Rows, values: Tensor) -> None:
        """Replace the values that a tensor of the state under construction holds for some rows of the batch.

        Args:
            name: name of the tensor.
            rows: rows to replace: a slice of all rows, or a tensor of row indices.
            values: new values of these rows, which must not share memory with another tensor.
        """
        x = self.tensors[name]
        if self.writes and name in self.mine:
            x[rows] = values
        else:
            self.put_all(name, values if isinstance(rows, slice) else x.index_copy(0, rows, values))

    def finish(self, rows: Rows, first: int, summaries: Tensor, reader: int) -> None:
        """Append finished blocks to some rows, and update the mixture (weighted sum) of all finished blocks in these rows.

        Args:
            rows: rows of the batch that the blocks belong to: a slice of all rows, or a tensor of row indices.
            first: index of the first appended block.
            summaries: summaries of n appended blocks in these rows, ``[rows, H, n, W]``.
            reader: index of the block that reads the mixture.
        """
        in_place = self.writes and "finished" in self.mine
        self.put_all("finished", self.mixing.append(self.tensors["finished"], rows, first, summaries, in_place))
        self.put("mixture", rows, self.mixing.read(self.tensors["finished"][rows], reader))

    def state(self, lengths: tuple[int, ...]) -> Any:
        """Return the generation state that has been constructed, of the same class as the state that it started from.

        Args:
            lengths: number of tokens so far in each row.
        """
        owned = tuple(name for name in self.begun.own_names if name in self.mine)
        return self.begun.with_tensors(self.tensors, lengths, owned)


def check_state(state: Any, kind: type[BlockState], prefill: str) -> None:
    """Raise ValueError unless ``state`` is an instance of ``kind``.

    The message names ``prefill``, the function that makes such states.
    """
    if not isinstance(state, kind):
        raise ValueError(
            f"state is {type(state).__name__}, not {kind.__name__}; {prefill} makes that of the first tokens"
        )


@dataclass(frozen=True, eq=False)
class MHLAState(BlockState):
    """Generation state that :func:`mhla_prefill` and :func:`mhla_step` take and return.

    It holds block summaries in place of the keys and values of earlier tokens. :class:`BlockState` documents its attributes.
    """

    @override
    def _finished_at(self, block: int) -> int:
        return block

    @override
    def _open_block(self, draft: Draft, rows: Rows, block: int) -> None:
        summary = draft.tensors["open"][rows]
        # The finished block is read by the block that opens now.
        draft.finish(rows, block - 1, summary[:, :, None], block)
        draft.put("open", rows, torch.zeros_like(summary))


torch.serialization.add_safe_globals([StateKind])


def kind_of(
    q: Tensor,
    v: Tensor,
    mixing: Mixing,
    block_size: int,
    near: tuple[int, int] | None = None,
    sinks: int = 0,
    block_causal: bool = False,
) -> StateKind:
    """Return the properties that a generation state must have so that a call can continue it.

    Args:
        q: queries, ``[..., K]``.
        v: values, ``[..., V]``.
        mixing: mixing coefficients between blocks.
        block_size: tokens in a block.
        near: number of heads and width of the keys that the state stores for softmax attention between near tokens; None if
            there is no softmax attention.
        sinks: number of first tokens that every token attends to by softmax.
        block_causal: whether tokens attend to all tokens of their own block.
    """
    sizes = block_size, q.shape[-1], v.shape[-1]
    return StateKind(str(mixing), mixing.running_sums, *sizes, near, sinks, block_causal)


def empty_tensors(q: Tensor, v: Tensor, mixing: Mixing, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors of a generation state before the first token, by name.

    Args:
        q: queries, ``[B, N, H, K]``, of which only shape and device are used.
        v: values, ``[..., V]``, of which only the width is used.
        mixing: mixing coefficients between blocks.
        dtype: dtype of the tensors.

    Returns:
        Tensors of zeros by field name, with W = K (V + 1) entries of a block summary: ``open`` and ``mixture``, ``[B, H, W]``
        each, and ``finished``, ``[B, H, R, W]`` for R running sums, or ``[B, H, 0, W]`` for mixing without running sums.
    """
    batch, _, heads, width = q.shape
    # The shape is [B, H, W].
    zeros = torch.zeros(batch, heads, width * (v.shape[-1] + 1), dtype=dtype, device=q.device)
    finished = zeros.new_zeros(batch, heads, mixing.running_sums or 0, zeros.shape[-1])
    return {"finished": finished, "open": zeros, "mixture": zeros.clone()}


def groups_of_rows(values: Sequence[Value], chosen: Sequence[bool], device: torch.device) -> list[tuple[Value, Rows]]:
    """Group chosen rows of a batch by a value, so that each group can be computed at once.

    Args:
        values: value of each row.
        chosen: flag for each row, True if the row belongs to a group.
        device: device of the returned row indices.

    Returns:
        A list with each distinct value and the rows that have it. The rows are a tensor of indices, or a full slice if all rows
        are chosen and have the same value.
    """
    distinct: list[Value] = sorted({value for value, is_chosen in zip(values, chosen, strict=True) if is_chosen})  # type: ignore[type-var]
    if len(distinct) == 1 and all(chosen):  # the common case: a slice needs no index on the device, and no copy
        return [(distinct[0], slice(None))]
    return [
        (value, on_device([row for row, v in enumerate(values) if v == value and chosen[row]], device))
        for value in distinct
    ]


def by_groups(groups: Sequence[tuple[Value, Rows]], make: Callable[[Value, Rows], Tensor]) -> Tensor:
    """Compute a result for each group of rows, and combine the results in the order of the rows.

    Args:
        groups: values with their rows, as :func:`groups_of_rows` returns them; every row belongs to exactly one group.
        make: function that takes a value and its rows, and returns a tensor for these rows.

    Returns:
        Tensor for all rows of the batch.
    """
    parts = [make(value, rows) for value, rows in groups]
    if len(parts) == 1:
        return parts[0]
    # Several groups always have index tensors: a slice means that all rows are in one group.
    order = torch.cat([rows for _, rows in groups if isinstance(rows, Tensor)])
    return torch.cat(parts).index_select(0, order.argsort())


def own_coefficients(mixing: Mixing, blocks: Sequence[int]) -> Tensor:
    """Return, for one block i in each batch row, the coefficient m[i, i] with which the block weighs its own summary.

    Args:
        mixing: mixing coefficients between blocks.
        blocks: index i of the block in each row of the batch.

    Returns:
        ``[B, H, 1]``, where B or H is 1 if the coefficient does not depend on it.
    """
    last = max(blocks, default=0)
    # A slice where all rows are at the same block, because a list of indices has to be copied to the device.
    coefficients = mixing.own(slice(last, last + 1) if len(set(blocks)) < 2 else blocks, last + 1)
    return coefficients.reshape(-1, coefficients.shape[-1]).T[..., None]


def close(start: MHLAState, summaries_BHMW: Tensor, counts: Sequence[int], mixing: Mixing, writes: bool) -> MHLAState:
    """Create the generation state after the new tokens of an attention call.

    Args:
        start: state before the call. If the last block of a row is full and the row gets new tokens, ``start`` already has
            an empty block for them.
        summaries_BHMW: summaries of the M blocks of the call, with W numbers each, ``[B, H, M, W]``. The first summary includes
            the tokens that the block held before.
        counts: number of new tokens in each row.
        mixing: mixing coefficients between blocks.
        writes: whether tensors that are created for the new state may be written to in place.
    """
    size = start.kind.block_size
    lengths = tuple(old_length + count for old_length, count in zip(start.lengths, counts, strict=True))
    moved = [count > 0 for count in counts]
    blocks = [
        (old_length // size, max(new_length - 1, 0) // size)
        for old_length, new_length in zip(start.lengths, lengths, strict=True)
    ]
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
    """Convert row indices to Python integers, and check that they are integers from 0 to ``batch - 1``.

    Args:
        rows: integer indices of rows.
        batch: number of rows.

    Raises:
        ValueError: if an index is not an integer or is out of range.
    """
    chosen = as_indices(rows, "rows")
    if chosen is None or not all(0 <= row < batch for row in chosen):
        shown = reprlib.repr(rows.tolist() if isinstance(rows, Tensor) else rows)
        raise ValueError(f"rows must be integer indices from 0 to {batch - 1}, got {shown}")
    return chosen
