"""Generation: the causal operator a few tokens at a time, with a state instead of the earlier keys and values.

Shape letters: B batch, N tokens, H heads, K and V widths of a key and a value, M blocks, C slots of a block, R exponential
terms, W = K V + K numbers of a summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.attention import mhla_attention, nothing, without_autocast
from mhla_kernels.backend import Backend, Form, check_form_and_backend
from mhla_kernels.blocks import BlockPartition, at_most, divide_up, on_device
from mhla_kernels.checks import (
    Problem,
    check_block_size,
    check_devices,
    check_problem,
    read_numbers,
    repeat,
    repeat_heads,
)
from mhla_kernels.features import FeatureMap, map_features
from mhla_kernels.forms.chunked import Mixer, chunked
from mhla_kernels.mixing import Mixing, MixingLike, Rows, as_mixing
from mhla_kernels.state import (
    BlockState,
    MHLAState,
    by_groups,
    close,
    empty_tensors,
    groups_of_rows,
    kind_of,
    own_coefficients,
)


def mhla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: MixingLike,
    *,
    block_size: int,
    lengths: Tensor | Sequence[int] | None = None,
    state: MHLAState | None = None,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_map: FeatureMap = "identity",
    form: Form = "auto",
    backend: Backend = "auto",
) -> tuple[Tensor, MHLAState]:
    """The causal operator on the next tokens of every row, and the state after them.

    Any number of tokens, any number of times: cutting a sequence anywhere gives the outputs of one causal pass.

    Args:
        q: ``[B, N, H, K]``, as for :func:`mhla_attention`, like k and v.
        k: ``[B, N, Hkv, K]``.
        v: ``[B, N, Hkv, V]``.
        mixing: as for causal attention; dense coefficients must be large enough for all tokens so far.
        block_size: tokens in a block.
        lengths: ``[B]``, how many of the N tokens of each row are real (the rows are padded at their right); None for all.
            A tensor on an accelerator is read back.
        state: state from the last call; None at the start. It is not changed.
        normalize: as for :func:`mhla_attention`, like the arguments after it. ``form`` and ``backend`` choose how a first
            call (``state`` None) is computed.
        scale: see there.
        eps: see there.
        feature_map: see there.
        form: see there.
        backend: see there.

    Returns:
        Outputs ``[B, N, H, V]``, zero for tokens that are not real, and the new state.

    Raises:
        ValueError: as :func:`mhla_attention`, and for lengths or a state that do not fit.
    """
    check_tokens(q)
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    batch, tokens = q.shape[:2]
    counts = count_tokens(lengths, batch, tokens)
    check_form_and_backend(form, backend)
    before = state.lengths if state is not None else (0,) * batch
    mask = mask_of_counts(counts, q)
    problem = _check(q, k, v, mixing, block_size, normalize, scale, eps, feature_map, before, counts, mask)
    kind = kind_of(q, v, mixing, block_size)
    if state is not None:
        state.check(kind, batch, q.shape[2], problem.accumulate)
    k, v = repeat_heads(q, k, v)

    with without_autocast(q.device.type):
        mixing = mixing.to(problem.accumulate)
        mapped = _mapped(q, k, v, problem, feature_map, mask)
        if state is None:
            out = mhla_attention(
                q, k, v, mixing, block_size=block_size, causal=True, normalize=normalize, scale=scale, eps=eps,
                feature_map=feature_map, key_mask=mask, form=form, backend=backend,
            )  # fmt: skip
            start = MHLAState((0,) * batch, **empty_tensors(q, v, mixing, problem), kind=kind)
            blocks = summaries(*(in_blocks(x, (0,) * batch, block_size) for x in mapped[1:]))
            return out, close(start, blocks, counts, mixing, start.may_write(*mapped, *mixing.tensors.values()))
        if not any(counts):
            return nothing(v.shape, problem.dtype, q, k, v, *mixing.tensors.values()), state.select(range(batch))
        writes = state.may_write(*mapped, *mixing.tensors.values())
        piece = begin(state, counts, mixing, writes)
        start = piece.start
        q_blocks, k_blocks, v_blocks = (in_blocks(x, piece.offsets, block_size) for x in mapped)
        mixer = _ContinuedMixer(mixing, start, piece.firsts, v_blocks.shape[2], q.shape[-1] * v.shape[-1])
        out = chunked(q_blocks, k_blocks, v_blocks, mixer, causal=True, scale=problem.scale, eps=eps)
        blocks = add_to_first(summaries(k_blocks, v_blocks), start.open)
        after = close(start, blocks, counts, mixing, writes)
        return take_back(out, piece.offsets, tokens, mask).to(problem.dtype), after


def mhla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: MixingLike,
    state: MHLAState,
    *,
    block_size: int,
    donate_state: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_map: FeatureMap = "identity",
) -> tuple[Tensor, MHLAState]:
    """The causal operator on one more token of every row.

    Time: O(K V), and where a block begins O(M K V) for dense or O(R K V) for exponential mixing.

    Args:
        q: ``[B, H, K]``.
        k: ``[B, Hkv, K]``.
        v: ``[B, Hkv, V]``.
        mixing: as for :func:`mhla_prefill`.
        state: state from the last call. It stays as it was, unless donated.
        block_size: tokens in a block.
        donate_state: let the new state take over the memory of ``state``, which must not be used afterwards. Saves a copy of
            the open block at every token, and of the finished ones at every block.
        normalize: as for :func:`mhla_attention`, like the arguments after it.
        scale: see there.
        eps: see there.
        feature_map: see there.

    Returns:
        Outputs ``[B, H, V]`` in the dtype of v, and the new state.

    Raises:
        ValueError: as :func:`mhla_prefill`.
    """
    check_one_token(q, k, v)
    batch, mixing, block_size = q.shape[0], as_mixing(mixing), check_block_size(block_size)
    token = q[:, None], k[:, None], v[:, None]
    problem = _check(*token, mixing, block_size, normalize, scale, eps, feature_map, state.lengths, (1,) * batch)
    state.check(kind_of(q, v, mixing, block_size), batch, q.shape[1], problem.accumulate)
    heads = q.shape[1] // max(1, k.shape[1])
    k, v = repeat(k, heads, 1), repeat(v, heads, 1)
    with without_autocast(q.device.type):
        mixing = mixing.to(problem.accumulate)
        q, k, v = _mapped(q, k, v, problem, feature_map, None)
        writes = state.may_write(q, k, v, *mixing.tensors.values())
        opened = state.advance(mixing, (True,) * batch, writes, donate_state)
        summary = torch.cat([(k[..., None] * v[..., None, :]).flatten(2), k], -1)
        is_new = donate_state or opened is not state  # else the state that was handed in keeps what it owns
        owned = opened.owned if is_new else ()
        total = opened.open.add_(summary) if writes and "open" in owned else opened.open + summary
        own = own_coefficients(mixing, [length // block_size for length in state.lengths])
        seen = torch.addcmul(opened.mixture, own, total)
        width = q.shape[-1] * v.shape[-1]
        out = (q[..., None, :] @ seen[..., :width].unflatten(-1, (q.shape[-1], -1))).squeeze(-2)
        total_weight = (q * seen[..., width:]).sum(-1, keepdim=True)
        out = out * problem.scale if problem.scale is not None else out / (total_weight + eps)
        lengths = tuple(length + 1 for length in state.lengths)
        after = opened.with_tensors({"open": total}, lengths, opened.written(owned))
        if donate_state:
            state.spend()
        return out.to(problem.dtype), after


def check_tokens(q: Tensor) -> None:
    """Check that a prefill has an axis of tokens.

    Raises:
        ValueError: naming the shape and where one token goes.
    """
    if q.dim() != 4:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [B, N, H, K]; one token goes to mhla_step")


def check_one_token(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that a step has no axis of tokens.

    Raises:
        ValueError: naming the shapes and where several tokens go.
    """
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v have shapes {shapes}; a step takes one token, [B, H, D]; more go to mhla_prefill")


def count_tokens(lengths: Tensor | Sequence[int] | None, batch: int, tokens: int) -> tuple[int, ...]:
    """How many tokens of each row are real, as numbers of the CPU.

    Raises:
        ValueError: when they do not fit.
    """
    if lengths is None:
        return (tokens,) * batch
    counts = tuple(read_numbers(lengths, "lengths") if isinstance(lengths, Tensor) else lengths)
    if len(counts) != batch or any(not isinstance(c, int) or not 0 <= c <= tokens for c in counts):
        raise ValueError(
            f"lengths must be {batch} integers of 0 to N={tokens}, one for each row, got {list(counts)[:8]}"
        )
    return counts


def mask_of_counts(counts: Sequence[int], q: Tensor) -> Tensor | None:
    """Mask ``[B, N]`` of the first ``counts`` tokens of each row of ``q`` ``[B, N, ...]``; None where those are all."""
    tokens = q.shape[1]
    if all(count == tokens for count in counts):
        return None
    return torch.arange(tokens, device=q.device) < on_device(counts, q.device)[:, None]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Mixing,
    block_size: int,
    normalize: bool,
    scale: float | None,
    eps: float,
    feature_map: str,
    before: tuple[int, ...],
    counts: tuple[int, ...],
    mask: Tensor | None = None,
) -> Problem:
    """Check the call as if it were one pass, and that the mixing reaches to the last token."""
    problem = check_problem(q, k, v, mixing, block_size, None, True, normalize, scale, eps, feature_map, mask, None)
    check_devices(q, k, v, mixing)
    check_reach(mixing, block_size, before, counts)
    return problem


def check_reach(mixing: Mixing, block_size: int, before: Sequence[int], counts: Sequence[int]) -> None:
    """Check that the coefficients reach to the last token of each row.

    Raises:
        ValueError: when they do not.
    """
    if len(before) != len(counts):
        raise ValueError(f"the state is of {len(before)} rows, but q has B={len(counts)}")
    size = mixing.blocks
    longest = max((b + c for b, c in zip(before, counts, strict=True) if c), default=0)
    if size is not None and longest > size * block_size:
        raise ValueError(
            f"{longest} tokens with block_size={block_size} make {-(-longest // block_size)} blocks, but mixing is for "
            f"{size} at most: use at most {size * block_size} tokens, or a longer mixing (mhla_kernels.extend_mixing)"
        )


def _mapped(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, feature_map: FeatureMap, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.to(problem.accumulate) for x in (q, k, v))
    return map_features(q, k, v, feature_map, mask)


class Piece(NamedTuple):
    """Tokens that continue a state.

    Attributes:
        start: the state, in which their first blocks are open.
        firsts: first block of each row.
        offsets: slot of its first token in it.
    """

    start: Any
    firsts: list[int]
    offsets: tuple[int, ...]


def begin(state: BlockState, counts: Sequence[int], mixing: Mixing, writes: bool) -> Piece:
    """Continue a state with so many tokens for each row. It is not changed; ``writes`` as for :meth:`BlockState.advance`."""
    size, moves = state.kind.block_size, [count > 0 for count in counts]
    # a full row that gets no token keeps its block open, and its outputs are not real
    firsts = [
        length // size if moving else max(length - 1, 0) // size
        for length, moving in zip(state.lengths, moves, strict=True)
    ]
    offsets = tuple(length - first * size for length, first in zip(state.lengths, firsts, strict=True))
    return Piece(state.advance(mixing, moves, writes), firsts, offsets)


def add_to_first(blocks: Tensor, x: Tensor) -> Tensor:
    """Blocks ``[B, H, M, ...]`` with ``x`` ``[B, H, ...]`` added to the first of each row."""
    first = blocks[:, :, :1] + x[:, :, None]
    return torch.cat([first, blocks[:, :, 1:]], 2) if blocks.shape[2] > 1 else first


def summaries(k_BHMCK: Tensor, v_BHMCV: Tensor) -> Tensor:
    """``[B, H, M, W]``."""
    return torch.cat([(k_BHMCK.transpose(-1, -2) @ v_BHMCV).flatten(3), k_BHMCK.sum(-2)], -1)


def in_blocks(x: Tensor, offsets: tuple[int, ...], block_size: int) -> Tensor:
    """``[B, N, H, D]`` in blocks ``[B, H, M, C, D]``, row b from slot ``offsets[b]`` of its first block on."""
    batch, tokens, heads, width = x.shape
    slots = max(offsets, default=0) + tokens
    if len(set(offsets)) < 2:
        x = F.pad(x, (0, 0, 0, 0, max(offsets, default=0), 0))
    else:
        slot = on_device(offsets, x.device)[:, None] + torch.arange(tokens, device=x.device)
        index = slot[..., None, None].expand(batch, tokens, heads, width)
        x = x.new_zeros(batch, slots, heads, width).scatter(1, index, x)
    blocks = divide_up(slots, block_size) if slots > block_size else 1
    size = block_size if blocks > 1 or max(offsets, default=0) else at_most(max(slots, 1), block_size)
    return BlockPartition(slots, blocks, size).split(x)


def take_back(out: Tensor, offsets: tuple[int, ...], tokens: int, mask: Tensor | None) -> Tensor:
    """The reverse of :func:`in_blocks`, zero where ``mask`` hides."""
    out = out.flatten(2, 3).transpose(1, 2)
    if len(set(offsets)) == 1:
        out = out[:, offsets[0] : offsets[0] + tokens]
    else:
        slot = on_device(offsets, out.device)[:, None] + torch.arange(tokens, device=out.device)
        out = out.gather(1, slot[..., None, None].expand(-1, -1, *out.shape[2:]))
    return out if mask is None else torch.where(mask[..., None, None], out, 0)


class _ContinuedMixer(Mixer):
    """The mixer of blocks that continue a state: earlier blocks count too, and the first block may have begun."""

    def __init__(self, mixing: Mixing, start: MHLAState, firsts: Sequence[int], blocks: int, key_value: int) -> None:
        groups = groups_of_rows(firsts, [True] * len(firsts), start.open.device)
        heads = start.open.shape[1]

        def own_of(first: int, rows: Rows) -> Tensor:
            weights = mixing.own(slice(first, first + blocks), first + blocks)
            known = weights.shape[-1]  # one for all; or the last ones hold no token
            weights = F.pad(weights, (0, blocks - known)) if 1 < known < blocks else weights
            return weights.reshape(1, -1, weights.shape[-1]).expand(_count(rows, start), heads, blocks)

        super().__init__(mixing, by_groups(groups, own_of))
        self.start, self.groups, self.key_value = start, groups, key_value

    def __call__(self, summary: Tensor, causal: bool) -> Tensor:
        """Mixed summaries of S ``[B, H, M, K, V]`` or of z ``[B, H, M, K]``."""
        part = slice(0, self.key_value) if summary.dim() == 5 else slice(self.key_value, None)
        begun = self.start.open[..., part]
        flat = add_to_first(summary.flatten(3), begun)
        mixed = by_groups(
            self.groups,
            lambda first, rows: self.mixing.mix_after(self.start.finished[rows][..., part], flat[rows], first),
        )
        return add_to_first(mixed, self.own[:, :, :1] * begun).view(summary.shape)


def _count(rows: Rows, state: BlockState) -> int:
    """Number of rows."""
    return len(state.lengths) if isinstance(rows, slice) else len(rows)
