"""Generation with windowed attention, which has softmax weights for near tokens and MHLA weights for far tokens.

A call processes one or more new tokens of each row, and returns a state for the next call. The state holds the keys and values
of the sinks (the first tokens, which every token reads) and of two blocks, and the summaries of all earlier blocks.

Shape letters: B batch, N tokens, H heads, M blocks, C slots of a block, S sinks, K width of a key's features, V width of a
value, ``W = K V + K`` numbers of a summary.
"""

# Longer than other modules because both public functions must store tokens in the same slots of the state.

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
from mhla_kernels.checks import check_block_size, check_tensors
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
    with_padding,
    without_padding,
)
from mhla_kernels.mixing import Mixing, MixingLike, Rows, as_mixing
from mhla_kernels.near_far import NearTokens, combine, read_mixed
from mhla_kernels.problem import Problem, default_scale, nothing, repeat
from mhla_kernels.state import (
    BlockState,
    Draft,
    StateKind,
    by_groups,
    check_state,
    empty_tensors,
    groups_of_rows,
    kind_of,
)
from mhla_kernels.windowed import (
    CausalWindow,
    check_feature_shapes,
    check_sink_queries,
    check_window,
    heads_last,
)
from mhla_kernels.windowed_blocks import InBlocks


@dataclass(frozen=True, eq=False)
class MHLAWindowState(BlockState):
    """Generation state that :func:`mhla_window_prefill` and :func:`mhla_window_step` take and return.

    The window of softmax attention consists of two blocks: the open block, to which tokens are added, and the block before it.
    Earlier blocks are stored as summaries only, as :class:`BlockState` describes.

    Attributes:
        previous: summary of the block before the open one, ``[B, H, W]`` with W numbers.
        keys: keys of S sinks, and of the window in 2 C slots for blocks of C tokens, ``[B, S + 2 C, Hkv, Dk]``. After the sinks
            comes the block before the open one. Empty slots are zero.
        values: values in the same order, ``[B, S + 2 C, Hkv, V]``.
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
        # The block before the open one leaves the window, so its summary joins the finished blocks.
        if block > 1:
            draft.finish(rows, block - 2, draft.tensors["previous"][rows][:, :, None], block - 1)
        summary = draft.tensors["open"][rows].clone()  # the next lines overwrite the memory of "open"
        draft.put("previous", rows, summary)
        draft.put("open", rows, torch.zeros_like(summary))
        size, sinks = self.kind.block_size, self.kind.sinks
        for name in ("keys", "values"):
            slots = draft.tensors[name][rows]
            # Drop the older block of the window; the open block takes its place, followed by empty slots for the new one.
            shifted = torch.cat([slots[:, :sinks], slots[:, sinks + size :]], 1)
            draft.put(name, rows, F.pad(shifted, (0, 0, 0, 0, 0, size)))


def mhla_window_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    mixing: MixingLike,
    *,
    block_size: int,
    sinks: int = 0,
    far: Tensor | None = None,
    scale: float | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    state: MHLAWindowState | None = None,
    sink_q: Tensor | None = None,
) -> tuple[Tensor, MHLAWindowState]:
    """Compute windowed attention for the next tokens of every row, and return the generation state after them.

    Windowed attention has softmax weights for near tokens and MHLA weights for all other earlier tokens (far tokens), as in
    :func:`mhla_kernels.mhla_window_attention`. Near tokens are in the query's block, in the block before it, or at the start of
    the row (sinks).

    Args:
        q: queries, ``[B, N, H, Dk]``, for B batch rows, N tokens and H heads of width Dk.
        k: keys, ``[B, N, Hkv, Dk]``; Hkv divides H.
        v: values, ``[B, N, Hkv, V]``.
        q_features: nonnegative features of the queries, ``[B, N, H, K]``.
        k_features: nonnegative features of the keys, ``[B, N, H, K]``.
        mixing: nonnegative coefficients m between blocks: a matrix ``[M, M]`` or ``[H, M, M]`` for at least all blocks up to
            the last token of the call, or an object such as :class:`mhla_kernels.ExponentialMixing`.
        block_size: tokens in a block.
        sinks: number of tokens at the start of each row that are sinks; at most ``block_size``.
        far: logarithm of a factor on the weights of far tokens, ``[B, N, H]`` or broadcastable to it; None means zeros.
        scale: factor on the scores of near tokens; None means ``Dk ** -0.5``.
        lengths: number of new tokens in each row, ``[B]`` integers; the rest of the row is padding, on the right. None for no
            padding. If this is a tensor on an accelerator, the call waits for the device.
        state: state that the last call of this function or of :func:`mhla_window_step` returned; None at the start. It is not
            changed.
        sink_q: queries that read the sinks, ``[B, N, H, Dk]``; None means q.

    Returns:
        Outputs ``[B, N, H, V]`` in the dtype of v, zero for padding, and the new state.

    Raises:
        ValueError: if shapes, lengths or the state do not fit together, or if features are negative.
        TypeError: if a dtype is not float32, bfloat16 or float64, or if ``mixing`` has an unsupported type.
    """
    check_tokens(q, "mhla_window_step")
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    batch, padded = q.shape[:2]
    counts = count_tokens(lengths, batch, padded)
    check_tensors(q, k, v)
    check_feature_shapes(q, q_features, k_features)
    check_sink_queries(sink_q, q)
    if far is not None:
        far = without_padding(counts, far.expand(q.shape[:3]))[0]
    if sink_q is not None:
        sink_q = without_padding(counts, sink_q)[0]
    q, k, v, q_features, k_features = without_padding(counts, q, k, v, q_features, k_features)
    tokens = q.shape[1]
    problem = check_window(q, k, v, q_features, k_features, mixing, block_size, mask_of_counts(counts, q), sinks=sinks)
    kind = kind_of(q_features, v, mixing, block_size, (k.shape[2], k.shape[3]), sinks)
    if state is None:
        state = _empty(problem, q_features, kind)
    check_state(state, MHLAWindowState, "mhla_window_prefill")
    state.check(kind, batch, q.shape[2], problem.accumulate)
    check_reach(mixing, block_size, state.lengths, counts)
    if not any(counts):
        out = nothing(problem, q_features, k_features, far, sink_q)
        return with_padding(out, padded), state.select(range(batch))
    scale = default_scale(q.shape[-1]) if scale is None else scale
    with without_autocast(q.device.type):
        mixing = mixing.to(problem.accumulate)
        writes = state.may_write(q, k, v, q_features, k_features, *mixing.tensors.values())
        start, firsts, offsets = begin(state, counts, mixing, writes)
        mask = torch.arange(tokens, device=q.device) < on_device(counts, q.device)[:, None]
        padding = ~mask[..., None, None]
        # padding of queries too: zero times NaN would be NaN in the gradients of the keys
        q, k, v, f, g = (x.to(problem.accumulate).masked_fill(padding, 0) for x in (q, k, v, q_features, k_features))
        far = heads_last(far, q).masked_fill(padding, 0)
        new_blocks = [in_blocks(x, offsets, block_size) for x in (k, v)]
        # for keys and for values: the sinks, the block before the open one, and the open block
        stored = [x.transpose(1, 2).split((sinks, block_size, block_size), 2) for x in (start.keys, start.values)]
        if any(offsets):
            new_blocks = [
                add_to_first(blocks, opened) for blocks, (_, _, opened) in zip(new_blocks, stored, strict=True)
            ]
        number, slots = new_blocks[0].shape[2:4]
        first = on_device(firsts, q.device)
        # [B] position after the last token of each row
        ends = first * block_size + on_device(
            [offset + count for offset, count in zip(offsets, counts, strict=True)], q.device
        )
        # [B, M, C] position of each slot in its row
        position = torch.arange(number, device=q.device)[:, None] * block_size + torch.arange(slots, device=q.device)
        position = first[:, None, None] * block_size + position
        visible = position < ends[:, None, None]
        # [B, 1, C] slots of the block before; sinks among them are read separately, and negative positions do not exist.
        visible_before = (position[:, :1, :1] - block_size + torch.arange(block_size, device=q.device)) >= sinks
        window = [block_before[:, :, None] for _, block_before, _ in stored]
        sink_tokens = [x for x, _, _ in stored]
        sinks_visible = torch.arange(sinks, device=q.device) < ends[:, None]
        sinks_visible = sinks_visible[:, None, None] & (position[..., None] >= torch.arange(sinks, device=q.device))
        if sinks:  # in rows at their first block, the new blocks hold all sinks so far
            at_start = (first == 0)[:, None, None, None]
            sink_tokens = [
                torch.where(at_start, F.pad(x[:, :, 0, :sinks], (0, 0, 0, max(0, sinks - slots))), old)
                for x, old in zip(new_blocks, sink_tokens, strict=True)
            ]
            visible = visible & (position >= sinks)
            # [B, N] position of each new token in its row
            token_position = on_device(start.lengths, q.device)[:, None] + torch.arange(tokens, device=q.device)
            g = g.masked_fill((token_position < sinks)[..., None, None], 0)
        if number > 1:  # a single block may have fewer than block_size slots, and nothing after it reads it
            # The block before each new block: the stored one, then the new ones themselves.
            window = [torch.cat([a, b[:, :, :-1]], 2) for a, b in zip(window, new_blocks, strict=True)]
            visible_before = torch.cat([visible_before, visible[:, :-1]], 1)
        heads = q.shape[2] // k.shape[2]
        # keys and values of the new blocks, of the blocks before them, and of the sinks
        repeated = [repeat(x, heads, 1) for x in (*new_blocks, *window, *(x[:, :, None] for x in sink_tokens))]
        g_blocks = in_blocks(g, offsets, block_size)
        sums = summaries(g_blocks, in_blocks(repeat(v, heads, 2), offsets, block_size))
        sums = finite_(add_to_first(sums, start.open))
        mixed = _mixed_after(start, sums, firsts, mixing)
        q_blocks, f_blocks, far_blocks = (in_blocks(x, offsets, block_size) for x in (q, f, far))
        if sink_q is not None:
            sink_q = sink_q.to(problem.accumulate).masked_fill(padding, 0)
            sink_q = in_blocks(sink_q, offsets, block_size) * scale
        near = CausalWindow(repeated[2], repeated[3], visible_before, repeated[4], repeated[5], sinks_visible, sink_q)
        placed = InBlocks(q_blocks * scale, repeated[0], repeated[1], f_blocks, g_blocks, far_blocks, visible)
        out = near.attend(placed, _with_totals(mixed, f.shape[-1], v.shape[-1]))
        after = _close(start, new_blocks, sink_tokens, sums, counts, firsts, mixing, writes)
        return with_padding(take_back(out, offsets, tokens, mask).to(problem.v.dtype), padded), after


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
    sinks: int = 0,
    far: Tensor | None = None,
    scale: float | None = None,
    donate_state: bool = False,
    sink_q: Tensor | None = None,
) -> tuple[Tensor, MHLAWindowState]:
    """Compute windowed attention for one more token of every row, and return the generation state after it.

    Windowed attention has softmax weights for near tokens and MHLA weights for all other earlier tokens (far tokens), as in
    :func:`mhla_kernels.mhla_window_attention`. Near tokens are in the query's block, in the block before it, or at the start of
    the row (sinks). For each row and head, a step takes time ``O((C + S) (Dk + V) + K V)`` with blocks of C tokens and S
    sinks. The first token of a block takes longer, because finished blocks are then mixed.

    Args:
        q: query, ``[B, H, Dk]``, for B batch rows and H heads of width Dk.
        k: key, ``[B, Hkv, Dk]``; Hkv divides H.
        v: value, ``[B, Hkv, V]``.
        q_features: nonnegative features of the query, ``[B, H, K]``.
        k_features: nonnegative features of the key, ``[B, H, K]``.
        mixing: nonnegative coefficients m between blocks: a matrix ``[M, M]`` or ``[H, M, M]`` for at least all blocks up to
            that of the new token, or an object such as :class:`mhla_kernels.ExponentialMixing`.
        state: state that the last call of this function or of :func:`mhla_window_prefill` returned. It is not changed unless
            ``donate_state`` is on.
        block_size: tokens in a block.
        sinks: number of tokens at the start of each row that are sinks, as in earlier calls with this state.
        far: logarithm of a factor on the weights of far tokens, ``[B, H]`` or broadcastable to it; None means zeros.
        scale: factor on the scores of near tokens; None means ``Dk ** -0.5``.
        donate_state: whether the new state may reuse the memory of ``state``, which the caller must then no longer use.
        sink_q: query that reads the sinks, ``[B, H, Dk]``; None means q.

    Returns:
        Outputs ``[B, H, V]`` in the dtype of v, and the new state.

    Raises:
        ValueError: if shapes or the state do not fit together, or if features are negative.
        TypeError: if a dtype is not float32, bfloat16 or float64, or if ``mixing`` has an unsupported type.
    """
    check_one_token(q, k, v, "mhla_window_prefill")
    check_state(state, MHLAWindowState, "mhla_window_prefill")
    check_sink_queries(sink_q, q)
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    q, k, v, f, g = (x[:, None] for x in (q, k, v, q_features, k_features))
    # a step with fewer tokens than sinks is fine, unlike a call without a state
    problem = check_window(q, k, v, f, g, mixing, block_size)
    kind = kind_of(f, v, mixing, block_size, (k.shape[2], k.shape[3]), sinks)
    state.check(kind, len(q), q.shape[2], problem.accumulate)
    check_reach(mixing, block_size, state.lengths, (1,) * len(q))
    scale = default_scale(q.shape[-1]) if scale is None else scale
    with without_autocast(q.device.type):
        mixing = mixing.to(problem.accumulate)
        writes = state.may_write(q, k, v, f, g, *mixing.tensors.values())
        q, k, v, f, g = (x[:, 0].to(problem.accumulate) for x in (q, k, v, f, g))
        opened = state.advance(mixing, (True,) * len(q), writes, donate_state)
        # if no block was opened, `opened` is the caller's state, which keeps its tensors unless it is donated
        is_new = donate_state or opened is not state
        owned = opened.owned if is_new else ()
        position = on_device(state.lengths, q.device)
        slots = sinks + block_size + position % block_size
        rows = torch.arange(len(q), device=q.device)
        # Sinks are stored twice: in slots of their own, and in their block, where `in_window` below hides them.
        early = [row for row, length in enumerate(state.lengths) if length < sinks]
        tensors = {}
        for name, x in (("keys", k), ("values", v)):
            window = opened.tensors[name]
            put = window.index_put_ if writes and name in owned else window.index_put
            tensors[name] = put((rows, slots), x)
            if early:
                is_early = on_device(early, q.device)
                tensors[name] = tensors[name].index_put((is_early, position[is_early]), x[is_early])
        heads = q.shape[1] // k.shape[1]
        repeated_v = repeat(v, heads, 1)
        if early:
            g = g.masked_fill((position < sinks)[:, None, None], 0)
        token = torch.cat([(g[..., None] * repeated_v[..., None, :]).flatten(2), g], -1)
        tensors["open"] = opened.open.add_(token) if writes and "open" in owned else opened.open + token
        # position of the token in each slot of the window: sinks have slots of their own, so theirs do not count there
        in_slot = torch.arange(2 * block_size, device=q.device) - block_size
        in_slot = in_slot + (position // block_size * block_size)[:, None]
        in_window = (in_slot >= sinks) & (in_slot <= position[:, None])
        visible = torch.cat([torch.arange(sinks, device=q.device) <= position[:, None], in_window], 1)[:, None, None]
        keys, values = (repeat(tensors[name], heads, 2).transpose(1, 2) for name in ("keys", "values"))
        mixture = _with_totals(opened.mixture, f.shape[-1], v.shape[-1])
        near = [NearTokens(keys, values, visible)]
        if sink_q is not None and sinks:
            sink_query = (sink_q.to(problem.accumulate) * scale)[:, :, None]
            # Two groups, because each has its own queries.
            near = [
                NearTokens(keys[:, :, :sinks], values[:, :, :sinks], visible[..., :sinks], sink_query),
                NearTokens(keys[:, :, sinks:], values[:, :, sinks:], visible[..., sinks:]),
            ]
        far_tokens = read_mixed(f[:, :, None], mixture, heads_last(far, q)[..., None])
        out = combine((q * scale)[:, :, None], near, far_tokens)[:, :, 0]
        after = opened.with_tensors(tensors, tuple(n + 1 for n in state.lengths), opened.written(owned))
        if donate_state:
            state.spend()
        return out.to(problem.v.dtype), after


def _empty(problem: Problem, f: Tensor, kind: StateKind) -> MHLAWindowState:
    """Return the generation state of windowed attention before the first token.

    Args:
        problem: checked arguments of the first call.
        f: features of the queries, ``[B, N, H, K]``.
        kind: properties of the state, such as the number of sinks.
    """
    k, v = problem.k, problem.v
    tensors = empty_tensors(f, v, problem.mixing, problem.accumulate)
    zeros = tensors["open"]
    slots = kind.sinks + 2 * kind.block_size
    keys, values = (zeros.new_zeros(len(k), slots, x.shape[2], x.shape[3]) for x in (k, v))
    return MHLAWindowState((0,) * len(k), **tensors, kind=kind, previous=zeros.clone(), keys=keys, values=values)


def _with_totals(mixed: Tensor, width: int, value_width: int) -> Tensor:
    """Reshape mixed block summaries to matrices whose last column holds the sums of weights.

    Args:
        mixed: mixed summaries, ``[..., K V + K]``: K V sums of weighted values, then K sums of weights.
        width: width K of a key's features.
        value_width: width V of a value.

    Returns:
        Matrices of V sums of weighted values and one sum of weights for each of K features, ``[..., K, V + 1]``.
    """
    sums = mixed[..., : width * value_width].unflatten(-1, (width, value_width))
    return torch.cat([sums, mixed[..., width * value_width :, None]], -1)


def _mixed_after(start: MHLAWindowState, sums: Tensor, firsts: Sequence[int], mixing: Mixing) -> Tensor:
    """Compute, for each block with new tokens, the mixed summary of all blocks before its window of softmax attention.

    The window of a block consists of the block and the previous block, so for block i the blocks before i - 1 are mixed. This
    is the mixed summary that block i - 1 would read if there were no window.

    Args:
        start: state before the new tokens, in which the open block of every row has room for the first of them.
        sums: summaries of the M blocks with new tokens, with W numbers each, ``[B, H, M, W]``.
        firsts: index of the first of these blocks in each row.
        mixing: mixing coefficients between blocks.

    Returns:
        Mixed summaries, ``[B, H, M, W]``.
    """

    def mixed(first: int, rows: Rows) -> Tensor:
        # Mixtures are shifted by one block: block i reads what block i - 1 would read, so the last block is not needed.
        chain, finished = sums[rows][:, :, :-1], start.finished[rows]
        if first:
            chain = torch.cat([start.previous[rows][:, :, None], chain], 2)
            return mixing.mix_after(finished, chain, first - 1)
        # the first block has no block before it: it gets zeros
        return F.pad(mixing.mix_after(finished, chain, 0) if chain.shape[2] else chain, (0, 0, 1, 0))

    return by_groups(groups_of_rows(firsts, [True] * len(firsts), sums.device), mixed)


def _close(
    start: MHLAWindowState,
    new_blocks: Sequence[Tensor],
    sink_tokens: Sequence[Tensor],
    sums: Tensor,
    counts: Sequence[int],
    firsts: Sequence[int],
    mixing: Mixing,
    writes: bool,
) -> MHLAWindowState:
    """Create the generation state of windowed attention after new tokens.

    Args:
        start: state before the new tokens, in which the open block of every row has room for the first of them.
        new_blocks: keys and values in the M blocks with new tokens, of C slots each, ``[B, Hkv, M, C, D]``. The first block
            includes the tokens that it held before.
        sink_tokens: keys and values of the sinks, ``[B, Hkv, S, D]``.
        sums: summaries of the M blocks, with W numbers each, ``[B, H, M, W]``.
        counts: number of new tokens in each row.
        firsts: index of the first of the M blocks in each row.
        mixing: mixing coefficients between blocks.
        writes: whether tensors that are created for the new state may be written to in place.
    """
    size = start.kind.block_size
    lengths = tuple(previous + count for previous, count in zip(start.lengths, counts, strict=True))
    blocks = [(first, max(n - 1, 0) // size) for first, n in zip(firsts, lengths, strict=True)]
    draft = Draft(start, mixing, max(max(block for _, block in blocks) - 1, 0), writes)
    for (first, block), rows in groups_of_rows(blocks, [count > 0 for count in counts], sums.device):
        done = block - first
        for name, x, sunk in zip(("keys", "values"), new_blocks, sink_tokens, strict=True):
            # [rows, M, C, Hkv, D], padded because a single new block may have fewer slots
            by_slot = F.pad(x[rows], (0, 0, 0, size - x.shape[-2])).transpose(1, 2).transpose(2, 3)
            first_slot = start.kind.sinks
            previous = (
                start.tensors[name][rows][:, first_slot : first_slot + size] if done == 0 else by_slot[:, done - 1]
            )
            draft.put(name, rows, torch.cat([sunk[rows].transpose(1, 2), previous, by_slot[:, done]], 1))
        # a clone, since a view would keep the summaries of all blocks in memory
        draft.put("open", rows, sums[rows][:, :, done].clone())
        if done == 0:
            continue
        chain = sums[rows] if first == 0 else torch.cat([start.previous[rows][:, :, None], sums[rows]], 2)
        draft.put("previous", rows, sums[rows][:, :, done - 1].clone())
        # The chain begins with block first - 1 (or 0), and the window with block - 1: those in between are finished.
        newly_finished = block - 1 - max(first - 1, 0)
        if newly_finished:
            draft.finish(rows, max(first - 1, 0), chain[:, :, :newly_finished], block - 1)
    state: MHLAWindowState = draft.state(lengths)
    return state
