"""Generation with a softmax window: :mod:`mhla_kernels.windowed` a few tokens at a time, with a state of two blocks of keys and
values and the summaries of all before.

Shape letters: B batch, N tokens, H heads, M blocks, C slots of a block, K width of a key's features, V width of a value,
W = K V + K numbers of a summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from mhla_kernels.attention import without_autocast
from mhla_kernels.blocks import on_device
from mhla_kernels.checks import Problem, check_block_size, repeat
from mhla_kernels.finite import finite_
from mhla_kernels.generation import (
    add_to_first,
    begin,
    check_one_token,
    check_reach,
    check_tokens,
    count_tokens,
    in_blocks,
    mask_of_counts,
    summaries,
    take_back,
)
from mhla_kernels.mixing import Mixing, MixingLike, Rows, as_mixing
from mhla_kernels.state import BlockState, Draft, StateKind, by_groups, empty_tensors, groups_of_rows, kind_of
from mhla_kernels.windowed import check_window, combine, heads_last, joined, nothing_far


@dataclass(frozen=True, eq=False)
class MHLAWindowState(BlockState):
    """The state of :func:`mhla_window_prefill` and :func:`mhla_window_step` from call to call; see :class:`BlockState`.

    Its finished blocks are those before the block before the open one.

    Attributes:
        previous: ``[B, H, W]`` summary of the block before the open one.
        keys: ``[B, 2 C, Hkv, Dk]``: slots of the block before the open one, then those of the open one; zero if empty.
        values: ``[B, 2 C, Hkv, V]``.
    """

    tensor_names: ClassVar[tuple[str, ...]] = (*BlockState.tensor_names, "previous", "keys", "values")
    own_names: ClassVar[tuple[str, ...]] = (*BlockState.own_names, "keys", "values")

    previous: Tensor
    keys: Tensor
    values: Tensor

    @override
    def _finished_at(self, block: int) -> int:
        return max(block - 1, 0)

    @override
    def _open_block(self, draft: Draft, rows: Rows, block: int) -> None:
        if block > 1:
            draft.finish(rows, block - 2, draft.tensors["previous"][rows][:, :, None], block - 1)
        summary = draft.tensors["open"][rows].clone()
        draft.put("previous", rows, summary)
        draft.put("open", rows, torch.zeros_like(summary))
        size = self.kind.block_size
        for name in ("keys", "values"):
            draft.put(name, rows, F.pad(draft.tensors[name][rows][:, size:], (0, 0, 0, 0, 0, size)))


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
    check_tokens(q)
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    batch, tokens = q.shape[:2]
    counts = count_tokens(lengths, batch, tokens)
    problem = check_window(q, k, v, q_features, k_features, mixing, block_size, mask_of_counts(counts, q))
    kind = _kind_of(q_features, k, v, mixing, block_size)
    if state is None:
        state = _empty(k, v, q_features, mixing, kind, problem)
    state.check(kind, batch, q.shape[2], problem.accumulate)
    check_reach(mixing, block_size, state.lengths, counts)
    if not any(counts):
        shape = (*q.shape[:3], v.shape[-1])
        return nothing_far(shape, problem, q, k, v, q_features, k_features, far, mixing), state.select(range(batch))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q.device.type):
        mixing = mixing.to(problem.accumulate)
        writes = state.may_write(q, k, v, q_features, k_features, *mixing.tensors.values())
        piece = begin(state, counts, mixing, writes)
        start, firsts, offsets = piece.start, piece.firsts, piece.offsets
        mask = torch.arange(tokens, device=q.device) < on_device(counts, q.device)[:, None]
        q, f = (x.to(problem.accumulate) for x in (q, q_features))
        k, v, g = (x.to(problem.accumulate).masked_fill(~mask[..., None, None], 0) for x in (k, v, k_features))
        own = [in_blocks(x, offsets, block_size) for x in (k, v)]
        held = [
            x.transpose(1, 2).split(block_size, 2) for x in (start.keys, start.values)
        ]  # of the block before, and the open
        if any(offsets):
            own = [add_to_first(blocks, opened) for blocks, (_, opened) in zip(own, held, strict=True)]
        number, slots = own[0].shape[2:4]
        ends = on_device([offset + count for offset, count in zip(offsets, counts, strict=True)], q.device)
        seen = (torch.arange(number * slots, device=q.device) < ends[:, None]).unflatten(1, (number, slots))
        begun = on_device(firsts, q.device) > 0
        window, seen_before = [x[:, :, None] for x, _ in held], begun[:, None, None].expand(-1, 1, block_size)
        if number > 1:  # else the one block may be short
            window = [torch.cat([a, b[:, :, :-1]], 2) for a, b in zip(window, own, strict=True)]
            seen_before = torch.cat([seen_before, seen[:, :-1]], 1)
        g_blocks = in_blocks(g, offsets, block_size)
        heads = q.shape[2] // k.shape[2]
        spread = [repeat(x, heads, 1) for x in (*own, *window)]
        sums = summaries(g_blocks, in_blocks(repeat(v, heads, 2), offsets, block_size))
        sums = finite_(add_to_first(sums, start.open))
        mixed = _mixed_after(start, sums, firsts, mixing)
        q_blocks, f_blocks, far_blocks = (in_blocks(x, offsets, block_size) for x in (q, f, heads_last(far, q)))
        out = joined(
            q_blocks, spread[0], spread[1], f_blocks, far_blocks, spread[2], spread[3],
            _with_totals(mixed, f.shape[-1]), seen, seen_before, scale,
        )  # fmt: skip
        after = _close(start, own, sums, counts, firsts, mixing, writes)
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
    check_one_token(q, k, v)
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    q, k, v, f, g = (x[:, None] for x in (q, k, v, q_features, k_features))
    problem = check_window(q, k, v, f, g, mixing, block_size)
    state.check(_kind_of(f, k, v, mixing, block_size), len(q), q.shape[2], problem.accumulate)
    check_reach(mixing, block_size, state.lengths, (1,) * len(q))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q.device.type):
        mixing = mixing.to(problem.accumulate)
        writes = state.may_write(q, k, v, f, g, *mixing.tensors.values())
        q, k, v, f, g = (x[:, 0].to(problem.accumulate) for x in (q, k, v, f, g))
        opened = state.advance(mixing, (True,) * len(q), writes, donate_state)
        is_new = donate_state or opened is not state  # else the state that was handed in keeps what it owns
        owned = opened.owned if is_new else ()
        lengths = on_device(state.lengths, q.device)
        slots = block_size + lengths % block_size
        rows = torch.arange(len(q), device=q.device)
        tensors = {}
        for name, x in (("keys", k), ("values", v)):
            held = opened.tensors[name]
            if writes and name in owned:
                tensors[name] = held.index_put_((rows, slots), x)
            else:
                tensors[name] = held.index_put((rows, slots), x)
        heads = q.shape[1] // k.shape[1]
        spread = repeat(v, heads, 1)
        token = torch.cat([(g[..., None] * spread[..., None, :]).flatten(2), g], -1)
        tensors["open"] = opened.open.add_(token) if writes and "open" in owned else opened.open + token
        index = torch.arange(2 * block_size, device=q.device)
        first = (
            block_size - lengths.clamp(max=block_size) // block_size * block_size
        )  # nothing is before the first block
        visible = ((index >= first[:, None]) & (index <= slots[:, None]))[:, None, None]
        keys, values = (repeat(tensors[name], heads, 2).transpose(1, 2) for name in ("keys", "values"))
        scores = (q * scale)[:, :, None] @ keys.transpose(-1, -2)
        weight = q.new_zeros(q.shape[:2]) if far is None else far.to(q.dtype).expand(q.shape[:2])
        mixture = _with_totals(opened.mixture, f.shape[-1])
        out = combine(scores, visible, values, f[:, :, None], mixture, weight[..., None, None])[:, :, 0]
        after = opened.with_tensors(tensors, tuple(n + 1 for n in state.lengths), opened.written(owned))
        if donate_state:
            state.spend()
        return out.to(problem.dtype), after


def _kind_of(f: Tensor, k: Tensor, v: Tensor, mixing: Mixing, block_size: int) -> StateKind:
    return kind_of(f, v, mixing, block_size, (k.shape[2], k.shape[3]))


def _empty(k: Tensor, v: Tensor, f: Tensor, mixing: Mixing, kind: StateKind, problem: Problem) -> MHLAWindowState:
    """The state before any token."""
    tensors = empty_tensors(f, v, mixing, problem)
    zeros = tensors["open"]
    keys, values = (zeros.new_zeros(len(k), 2 * kind.block_size, x.shape[2], x.shape[3]) for x in (k, v))
    return MHLAWindowState((0,) * len(k), **tensors, kind=kind, previous=zeros.clone(), keys=keys, values=values)


def _with_totals(mixed: Tensor, width: int) -> Tensor:
    """Mixed summaries ``[..., W]`` of features of ``width`` as ``[..., K, V + 1]``, their weights as the last column."""
    values = mixed.shape[-1] - width
    return torch.cat([mixed[..., :values].unflatten(-1, (width, -1)), mixed[..., values:, None]], -1)


def _mixed_after(start: MHLAWindowState, sums: Tensor, firsts: Sequence[int], mixing: Mixing) -> Tensor:
    """Mixed summaries of the far blocks, for each of the blocks ``[B, H, M, W]``: the mixture of the block before it."""

    def mixed(first: int, rows: Rows) -> Tensor:
        chain, finished = sums[rows][:, :, :-1], start.finished[rows]
        if first:
            chain = torch.cat([start.previous[rows][:, :, None], chain], 2)
            return mixing.mix_after(finished, chain, first - 1)
        # nothing is before the first block
        return F.pad(mixing.mix_after(finished, chain, 0) if chain.shape[2] else chain, (0, 0, 1, 0))

    return by_groups(groups_of_rows(firsts, [True] * len(firsts), sums.device), mixed)


def _close(
    start: MHLAWindowState,
    own: Sequence[Tensor],
    sums: Tensor,
    counts: Sequence[int],
    firsts: Sequence[int],
    mixing: Mixing,
    writes: bool,
) -> MHLAWindowState:
    """The state after ``counts`` more tokens; ``own`` are keys and values ``[B, Hkv, M, C, D]`` from each row's first block."""
    size = start.kind.block_size
    lengths = tuple(before + count for before, count in zip(start.lengths, counts, strict=True))
    blocks = [(first, max(n - 1, 0) // size) for first, n in zip(firsts, lengths, strict=True)]
    draft = Draft(start, mixing, max(max(block for _, block in blocks) - 1, 0), writes)
    for (first, block), rows in groups_of_rows(blocks, [count > 0 for count in counts], sums.device):
        done = block - first
        for name, x in zip(("keys", "values"), own, strict=True):
            two = F.pad(x[rows], (0, 0, 0, size - x.shape[-2])).transpose(1, 2).transpose(2, 3)
            before = start.tensors[name][rows][:, :size] if done == 0 else two[:, done - 1]
            draft.put(name, rows, torch.cat([before, two[:, done]], 1))
        draft.put("open", rows, sums[rows][:, :, done].clone())  # a view would keep all of them
        if done == 0:
            continue
        chain = sums[rows] if first == 0 else torch.cat([start.previous[rows][:, :, None], sums[rows]], 2)
        draft.put("previous", rows, sums[rows][:, :, done - 1].clone())
        ended = block - 1 - max(first - 1, 0)
        if ended:
            draft.finish(rows, max(first - 1, 0), chain[:, :, :ended], block - 1)
    state: MHLAWindowState = draft.state(lengths)
    return state
