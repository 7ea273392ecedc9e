"""Generation with a softmax window: :mod:`mhla_kernels.windowed` a few tokens at a time, with a state of two blocks of keys and
values and the summaries of all before.

Shape letters: B batch, N tokens, H heads, M blocks, C slots of a block, K width of a key's features, V width of a value,
W = K V + K numbers of a summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.attention import without_autocast
from mhla_kernels.blocks import on_device
from mhla_kernels.checks import Problem, check_block_size
from mhla_kernels.finite import finite_
from mhla_kernels.generation import check_reach, count_tokens, first_block, in_blocks, summaries, take_back
from mhla_kernels.mixing import Mixing, MixingLike, as_it_is, as_mixing
from mhla_kernels.state import groups_of_rows
from mhla_kernels.windowed import check_window, combine, heads_last, joined


@dataclass(frozen=True)
class MHLAWindowState:
    """The state of :func:`mhla_window_prefill` and :func:`mhla_window_step` from call to call.

    Attributes:
        lengths: tokens so far in each row, numbers of the CPU.
        keys: ``[B, 2 C, Hkv, Dk]``: slots of the block before the open one, then those of the open one; zero if empty.
        values: ``[B, 2 C, Hkv, V]``.
        finished: summaries of the blocks before those two, as the mixing keeps them, ``[B, H, capacity or R, W]``.
        previous: ``[B, H, W]`` summary of the block before the open one.
        open: ``[B, H, W]`` summary of the open block.
        mixture: ``[B, H, W]`` mixed summaries of the finished blocks, for the open block.
    """

    lengths: tuple[int, ...]
    keys: Tensor
    values: Tensor
    finished: Tensor
    previous: Tensor
    open: Tensor
    mixture: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        names = ("keys", "values", "finished", "previous", "open", "mixture")
        return {name: getattr(self, name) for name in names}

    @property
    def bytes(self) -> int:
        """Memory of the tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    def select(self, rows: Tensor | Sequence[int]) -> MHLAWindowState:
        """The state of other rows, ``rows`` being indices, repeats allowed."""
        chosen = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        index = on_device(chosen, self.open.device)
        lengths = tuple(self.lengths[row] for row in chosen)
        return MHLAWindowState(lengths, **{name: x.index_select(0, index) for name, x in self.tensors.items()})


def mhla_window_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    mixing: MixingLike,
    *,
    block_size: int,
    far: Tensor | None = None,
    scale: float | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    state: MHLAWindowState | None = None,
) -> tuple[Tensor, MHLAWindowState]:
    """:func:`mhla_kernels.mhla_window_attention` on the next tokens of every row, and the state after them.

    Args:
        q: as for :func:`mhla_kernels.mhla_window_attention`, like the arguments up to ``scale``.
        k: see there.
        v: see there.
        q_features: see there.
        k_features: see there.
        mixing: see there.
        block_size: see there.
        far: see there.
        scale: see there.
        lengths: ``[B]``, how many of the N tokens of each row are real (the rows are padded at their right); None for all.
        state: state from the last call; None at the start. It is not changed.

    Returns:
        Outputs ``[B, N, H, V]``, zero for tokens that are not real, and the new state.

    Raises:
        ValueError: as there, and for lengths or a state that do not fit.
    """
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    problem = check_window(q, k, v, q_features, k_features, mixing, block_size)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, tokens = q.shape[:2]
    counts = count_tokens(lengths, batch, tokens)
    with without_autocast(q.device.type):
        mixing = mixing.to(problem.accumulate)
        start = state or _empty(k, v, q_features, mixing, block_size, problem)
        _check_state(start, q, k, v, q_features, block_size)
        check_reach(mixing, block_size, start.lengths, counts)
        moves = [count > 0 for count in counts]
        if not any(moves):
            return v.new_zeros(*q.shape[:3], v.shape[-1]), start.select(range(batch))
        start = _advance(start, mixing, block_size, moves)
        firsts = [first_block(n, block_size, moving) for n, moving in zip(start.lengths, moves, strict=True)]
        offsets = tuple(n - first * block_size for n, first in zip(start.lengths, firsts, strict=True))
        mask = torch.arange(tokens, device=q.device) < on_device(counts, q.device)[:, None]
        q, f = (x.to(problem.accumulate) for x in (q, q_features))
        k, v, g = (x.to(problem.accumulate).masked_fill(~mask[..., None, None], 0) for x in (k, v, k_features))
        own = [in_blocks(x, offsets, block_size) for x in (k, v)]
        for held, blocks in zip((start.keys, start.values), own, strict=True):
            if any(offsets):
                blocks[:, :, 0] += held[:, block_size:].transpose(1, 2)
        slots = own[0].shape[-2]
        seen = in_blocks(mask.to(q.dtype)[..., None, None], offsets, block_size)[:, 0, ..., 0] > 0
        seen[:, 0] |= torch.arange(slots, device=q.device) < on_device(offsets, q.device)[:, None]
        begun = on_device(firsts, q.device) > 0
        held_before = [x[:, :block_size].transpose(1, 2)[:, :, None] for x in (start.keys, start.values)]
        window, seen_before = held_before, begun[:, None, None].expand(-1, 1, block_size)
        if own[0].shape[2] > 1:  # else the one block may be short
            window = [torch.cat([a, b[:, :, :-1]], 2) for a, b in zip(held_before, own, strict=True)]
            seen_before = torch.cat([seen_before, seen[:, :-1]], 1)
        g_blocks = in_blocks(g, offsets, block_size)
        heads = q.shape[2] // k.shape[2]
        spread = [x.repeat_interleave(heads, 1) for x in (*own, *window)]
        sums = summaries(g_blocks, in_blocks(v.repeat_interleave(heads, 2), offsets, block_size))
        sums[:, :, 0] += start.open
        mixed = _mixed_after(start, finite_(sums), firsts, mixing)
        width = f.shape[-1] * v.shape[-1]
        mixed = torch.cat([mixed[..., :width].unflatten(-1, (f.shape[-1], -1)), mixed[..., width:, None]], -1)
        q_blocks, f_blocks, far_blocks = (in_blocks(x, offsets, block_size) for x in (q, f, heads_last(far, q)))
        out = joined(
            q_blocks, spread[0], spread[1], f_blocks, far_blocks, spread[2], spread[3], mixed, seen, seen_before, scale
        )
        after = _close(start, own, sums, counts, firsts, mixing, block_size)
        return take_back(out, offsets, tokens, mask).to(problem.dtype), after


def mhla_window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    mixing: MixingLike,
    state: MHLAWindowState,
    *,
    block_size: int,
    far: Tensor | None = None,
    scale: float | None = None,
    donate_state: bool = False,
) -> tuple[Tensor, MHLAWindowState]:
    """One more token of every row. Time: O(C Dk + K V), and where a block begins as for :func:`mhla_kernels.mhla_step`.

    Args:
        q: ``[B, H, Dk]``.
        k: ``[B, Hkv, Dk]``.
        v: ``[B, Hkv, V]``.
        q_features: ``[B, H, K]``.
        k_features: ``[B, H, K]``.
        mixing: as for :func:`mhla_kernels.mhla_window_attention`.
        state: state from the last call. It stays as it was, unless donated.
        block_size: tokens in a block.
        far: ``[B, H]`` or broadcast to it.
        scale: as there.
        donate_state: let the new state take over the memory of ``state``, which must not be used afterwards.

    Returns:
        Outputs ``[B, H, V]`` in the dtype of v, and the new state.

    Raises:
        ValueError: as for :func:`mhla_window_prefill`.
    """
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    q, k, v, f, g = (x[:, None] for x in (q, k, v, q_features, k_features))
    problem = check_window(q, k, v, f, g, mixing, block_size)
    _check_state(state, q, k, v, f, block_size)
    check_reach(mixing, block_size, state.lengths, (1,) * len(q))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q.device.type):
        mixing = mixing.to(problem.accumulate)
        q, k, v, f, g = (x[:, 0].to(problem.accumulate) for x in (q, k, v, f, g))
        state = _advance(state, mixing, block_size, [True] * len(q), donate_state)
        if not donate_state:
            state = replace(state, keys=state.keys.clone(), values=state.values.clone(), open=state.open.clone())
        slots = on_device([block_size + n % block_size for n in state.lengths], q.device)
        rows = torch.arange(len(q), device=q.device)
        state.keys[rows, slots], state.values[rows, slots] = k, v
        heads = q.shape[1] // k.shape[1]
        values = v.repeat_interleave(heads, 1)
        state.open.add_(torch.cat([(g[..., None] * values[..., None, :]).flatten(2), g], -1))
        index = torch.arange(2 * block_size, device=q.device)
        first = on_device([0 if n >= block_size else block_size for n in state.lengths], q.device)
        visible = ((index >= first[:, None]) & (index <= slots[:, None]))[:, None, None]
        keys, held = (x.repeat_interleave(heads, 2).transpose(1, 2) for x in (state.keys, state.values))
        scores = (q * scale)[:, :, None] @ keys.transpose(-1, -2)
        width = f.shape[-1] * v.shape[-1]
        mixture = state.mixture[..., :width].unflatten(-1, (f.shape[-1], -1))
        sums = f[:, :, None] @ torch.cat([mixture, state.mixture[..., width:, None]], -1)
        weight = q.new_zeros(q.shape[:2]) if far is None else far.to(q.dtype).expand(q.shape[:2])
        out = combine(scores, visible, held, sums, weight[..., None, None])[:, :, 0]
        return out.to(problem.dtype), replace(state, lengths=tuple(n + 1 for n in state.lengths))


def _check_state(state: MHLAWindowState, q: Tensor, k: Tensor, v: Tensor, f: Tensor, block_size: int) -> None:
    wanted = [len(q), 2 * block_size, k.shape[2], k.shape[3], q.shape[2], f.shape[-1] * (v.shape[-1] + 1)]
    if [*state.keys.shape, *state.open.shape[1:]] != wanted:
        raise ValueError(
            f"the state has keys {list(state.keys.shape)} and summaries {list(state.open.shape)}, which do not fit q "
            f"{list(q.shape)}, k {list(k.shape)}, features {list(f.shape)} and block_size={block_size}"
        )


def _empty(k: Tensor, v: Tensor, f: Tensor, mixing: Mixing, block_size: int, problem: Problem) -> MHLAWindowState:
    batch, _, heads, width = f.shape
    zeros = torch.zeros(batch, heads, width * (v.shape[-1] + 1), dtype=problem.accumulate, device=k.device)
    keys, values = (zeros.new_zeros(batch, 2 * block_size, x.shape[2], x.shape[3]) for x in (k, v))
    finished = zeros.new_zeros(batch, heads, mixing.running_sums or 0, zeros.shape[-1])
    return MHLAWindowState((0,) * batch, keys, values, finished, zeros, zeros.clone(), zeros.clone())


def _advance(
    state: MHLAWindowState, mixing: Mixing, block_size: int, moves: Sequence[bool], donated: bool = False
) -> MHLAWindowState:
    """Close the open block of every row that is full and about to get a token; a block of zeros is open then."""
    full = [move and n > 0 and n % block_size == 0 for move, n in zip(moves, state.lengths, strict=True)]
    if not any(full):
        return state
    new = {name: x if donated else x.clone() for name, x in state.tensors.items() if name != "finished"}
    needed = max(n // block_size - 1 for n, closing in zip(state.lengths, full, strict=True) if closing)
    new["finished"] = mixing.make_room(state.finished, needed, donated)
    for length, rows in groups_of_rows(state.lengths, full, state.open.device):
        block = length // block_size
        if block > 1:
            mixing.append(new["finished"], rows, block - 2, as_it_is(new["previous"][rows])[:, :, None])
            new["mixture"][rows] = mixing.read(as_it_is(new["finished"][rows]), block - 1)
        new["previous"][rows] = as_it_is(new["open"][rows])
        new["open"][rows] = 0
        for name in ("keys", "values"):
            new[name][rows] = F.pad(new[name][rows][:, block_size:], (0, 0, 0, 0, 0, block_size))
    return MHLAWindowState(state.lengths, **new)


def _mixed_after(start: MHLAWindowState, sums: Tensor, firsts: Sequence[int], mixing: Mixing) -> Tensor:
    """Mixed summaries of the far blocks, for each of the blocks ``[B, H, M, W]``: the mixture of the block before it."""
    mixed = torch.zeros_like(sums)
    for first, rows in groups_of_rows(firsts, [True] * len(firsts), sums.device):
        if first:
            chain = torch.cat([start.previous[rows][:, :, None], sums[rows][:, :, :-1]], 2)
            mixed[rows] = mixing.mix_after(start.finished[rows], chain, first - 1)
        elif sums.shape[2] > 1:
            mixed[rows] = F.pad(
                mixing.mix_after(start.finished[rows], sums[rows][:, :, :-1], 0), (0, 0, 1, 0)
            )  # nothing is before the first
    return mixed


def _close(
    start: MHLAWindowState,
    own: Sequence[Tensor],
    sums: Tensor,
    counts: Sequence[int],
    firsts: Sequence[int],
    mixing: Mixing,
    block_size: int,
) -> MHLAWindowState:
    """The state after ``counts`` more tokens; ``own`` are keys and values ``[B, Hkv, M, C, D]`` from each row's first block."""
    lengths = tuple(before + count for before, count in zip(start.lengths, counts, strict=True))
    moved = [count > 0 for count in counts]
    opened = [max(n - 1, 0) // block_size for n in lengths]
    new = {name: x.clone() for name, x in start.tensors.items() if name != "finished"}
    new["finished"] = mixing.make_room(start.finished, max(max(opened) - 1, 0), owned=False)
    for first in sorted({first for first, moving in zip(firsts, moved, strict=True) if moving}):
        inside = [moving and each == first for each, moving in zip(firsts, moved, strict=True)]
        for block, rows in groups_of_rows(opened, inside, sums.device):
            done = block - first
            for name, blocks in zip(("keys", "values"), own, strict=True):
                two = F.pad(blocks[rows], (0, 0, 0, block_size - blocks.shape[-2])).transpose(1, 2).transpose(2, 3)
                before = start.tensors[name][rows][:, :block_size] if done == 0 else two[:, done - 1]
                new[name][rows] = torch.cat([before, two[:, done]], 1)
            new["open"][rows] = sums[rows][:, :, done]
            if done == 0:
                continue
            chain = sums[rows] if first == 0 else torch.cat([start.previous[rows][:, :, None], sums[rows]], 2)
            new["previous"][rows] = sums[rows][:, :, done - 1]
            ended = block - 1 - max(first - 1, 0)
            if ended:
                mixing.append(new["finished"], rows, max(first - 1, 0), chain[:, :, :ended])
                new["mixture"][rows] = mixing.read(as_it_is(new["finished"][rows]), block - 1)
    return MHLAWindowState(lengths, **new)
