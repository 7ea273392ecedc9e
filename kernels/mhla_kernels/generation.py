"""Causal attention on a few tokens at a time, for generation, with a state that replaces the earlier keys and values.

Shape letters: B batch, N tokens, H heads, K and V widths of a key and a value, M blocks, C slots of a block, R exponential
terms, ``W = K V + K`` numbers of a summary.
"""

# Longer than other modules because both of its public functions document all arguments of the attention operator.

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.attention import mhla_attention, without_autocast
from mhla_kernels.backend import Backend, Form, check_form_and_backend
from mhla_kernels.blocks import BlockPartition, at_most, divide_up, on_device
from mhla_kernels.checks import (
    as_indices,
    check_are_tensors,
    check_block_size,
    check_devices,
    check_is_tensor,
    check_problem,
    check_tensors,
)
from mhla_kernels.features import FeatureMap, map_features
from mhla_kernels.forms.chunked import Mixer, chunked
from mhla_kernels.mixing import Mixing, MixingLike, Rows, as_mixing
from mhla_kernels.problem import Causal, nothing, prepare, repeat, repeat_heads
from mhla_kernels.state import (
    BlockState,
    MHLAState,
    by_groups,
    check_state,
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
    causal: Literal[True, "block"] = True,
    lengths: Tensor | Sequence[int] | None = None,
    state: MHLAState | None = None,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_map: FeatureMap = "identity",
    form: Form = "auto",
    backend: Backend = "auto",
) -> tuple[Tensor, MHLAState]:
    """Apply causal :func:`mhla_attention` to the next tokens of every row, and return outputs and a new generation state.

    The state replaces the keys and values of earlier tokens. A sequence may be split into several calls at any token, or, with
    ``causal="block"``, at the end of any block. The outputs equal those of one causal call for the complete sequence.

    Args:
        q: queries, ``[B, N, H, K]``, for B batch rows, N tokens and H heads of width K. With ``normalize``, nonnegative after
            the feature map.
        k: keys, ``[B, N, Hkv, K]``; Hkv divides H. With ``normalize``, nonnegative after the feature map.
        v: values, ``[B, N, Hkv, V]``.
        mixing: mixing coefficients, as for causal :func:`mhla_attention`. A matrix of coefficients must cover all blocks up to
            the block of the last new token.
        block_size: tokens in a block.
        causal: True, or ``"block"`` if a token attends to all tokens of its own block and of all blocks before it. The new
            tokens of a row must then be complete blocks. The last block may be shorter, but no call can continue the row after
            it.
        lengths: number of tokens in each row, ``[B]`` integers; the rest of the row is padding, on the right. None if there is
            no padding. Reading a tensor on an accelerator waits for the device.
        state: state that the last call of this function or of :func:`mhla_step` returned; None at the start. It is not changed.
        normalize: whether each row of attention weights is divided by its sum.
        scale: factor on the output, only without ``normalize``; None means ``K ** -0.5``.
        eps: positive number that is added to the sum of a row of weights before the division.
        feature_map: ``"identity"`` (q and k are already mapped) or ``"relu"``: ``relu(x) + 1e-6``.
        form: algorithm of the first call, in which ``state`` is None, as for :func:`mhla_attention`; later calls ignore it.
        backend: ``"torch"``, ``"triton"`` or ``"auto"`` for the first call, in which ``state`` is None; later calls run in
            PyTorch.

    Returns:
        Outputs ``[B, N, H, V]`` in the dtype of v, zero for padding, and the new state.

    Raises:
        ValueError: for arguments that :func:`mhla_attention` rejects, or if ``lengths`` or ``state`` does not fit the call.
        TypeError: if q, k or v is not a tensor, or has a dtype other than float32, bfloat16 and float64, or if ``mixing`` is
            not of a type that :func:`mhla_attention` accepts.
    """
    check_tokens(q)
    check_tensors(q, k, v)
    check_causal(causal)
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    batch, tokens = q.shape[:2]
    counts = count_tokens(lengths, batch, tokens)
    q, k, v = without_padding(counts, q, k, v)
    check_form_and_backend(form, backend)
    if state is not None:
        check_state(state, MHLAState, "mhla_prefill")
    previous_lengths = state.lengths if state is not None else (0,) * batch
    mask = mask_of_counts(counts, q)
    problem = check_problem(
        q, k, v, mixing, block_size=block_size, causal=causal, normalize=normalize, scale=scale, eps=eps,
        feature_map=feature_map, key_mask=mask,
    )  # fmt: skip
    check_devices(problem)
    check_reach(mixing, block_size, previous_lengths, counts)
    kind = kind_of(q, v, mixing, block_size, block_causal=causal == "block")
    if state is not None:
        state.check(kind, batch, q.shape[2], problem.accumulate)
        check_complete(state, counts)
    k, v = repeat_heads(q, k, v)

    with without_autocast(q.device.type):
        prepared = prepare(problem._replace(k=k, v=v))
        mapped, mixing = prepared[:3], prepared.mixing
        if state is None:  # an ordinary attention call, which the fused kernels can run
            out = mhla_attention(
                q, k, v, mixing, block_size=block_size, causal=causal, normalize=normalize, scale=scale, eps=eps,
                feature_map=feature_map, key_mask=mask, form=form, backend=backend,
            )  # fmt: skip
            start = MHLAState((0,) * batch, **empty_tensors(q, v, mixing, problem.accumulate), kind=kind)
            blocks = summaries(*(in_blocks(x, (0,) * batch, block_size) for x in mapped[1:]))
            after = close(start, blocks, counts, mixing, start.may_write(*mapped, *mixing.tensors.values()))
            return with_padding(out, tokens), after
        # A copy, so that donating the result later leaves `state` as it is.
        if not any(counts):
            return with_padding(nothing(problem), tokens), state.select(range(batch))
        writes = state.may_write(*mapped, *mixing.tensors.values())
        start, firsts, offsets = begin(state, counts, mixing, writes)
        q_blocks, k_blocks, v_blocks = (in_blocks(x, offsets, block_size) for x in mapped)
        # In PyTorch only: the kernels cannot start from sums of earlier tokens.
        mixer = _ContinuedMixer(mixing, start, firsts, v_blocks.shape[2], q.shape[-1] * v.shape[-1])
        out = chunked(q_blocks, k_blocks, v_blocks, mixer, problem.weighting)
        blocks = add_to_first(summaries(k_blocks, v_blocks), start.open)
        after = close(start, blocks, counts, mixing, writes)
        return with_padding(take_back(out, offsets, q.shape[1], mask).to(v.dtype), tokens), after


def mhla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: MixingLike,
    state: MHLAState,
    *,
    block_size: int,
    causal: Literal[True, "block"] = True,
    donate_state: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_map: FeatureMap = "identity",
) -> tuple[Tensor, MHLAState]:
    """Apply causal :func:`mhla_attention` to the next token or block of every row, and return outputs and a new state.

    The state replaces the keys and values of earlier tokens. For each row and head, a step takes time ``O(K V)``. When a block
    begins, it takes ``O(M K V)`` for mixing by a matrix of M blocks, and ``O(R K V)`` for exponential mixing with R terms.

    With ``causal="block"``, a step takes one more block of every row instead of one token.

    Args:
        q: query, ``[B, H, K]``, for B batch rows and H heads of width K. With ``normalize``, nonnegative after the feature map.
            With ``causal="block"``, the queries of the C tokens of a block, ``[B, C, H, K]``.
        k: key, ``[B, Hkv, K]`` or ``[B, C, Hkv, K]``; Hkv divides H. With ``normalize``, nonnegative after the feature map.
        v: value, ``[B, Hkv, V]`` or ``[B, C, Hkv, V]``.
        mixing: mixing coefficients, as for causal :func:`mhla_attention`. A matrix of coefficients must cover the block of the
            new token.
        state: state that the last call of this function or of :func:`mhla_prefill` returned. It is not changed unless
            ``donate_state`` is on.
        block_size: tokens in a block.
        causal: True, or ``"block"`` if a token attends to all tokens of its own block and of all blocks before it. The block of
            a step may have fewer than ``block_size`` tokens, but no call can continue the state after it.
        donate_state: whether the new state may reuse the memory of ``state``, which the caller must then no longer use. By
            default, the sums of the current block are copied at every token, and those of all finished blocks whenever a block
            begins.
        normalize: whether each row of attention weights is divided by its sum.
        scale: factor on the output, only without ``normalize``; None means ``K ** -0.5``.
        eps: positive number that is added to the sum of a row of weights before the division.
        feature_map: ``"identity"`` (q and k are already mapped) or ``"relu"``: ``relu(x) + 1e-6``.

    Returns:
        Outputs, ``[B, H, V]`` or ``[B, C, H, V]`` in the dtype of v, and the new state.

    Raises:
        ValueError: for arguments that :func:`mhla_attention` rejects, or if ``state`` does not fit the call, or was passed to
            an earlier call with ``donate_state=True``.
        TypeError: if q, k or v is not a tensor, or has a dtype other than float32, bfloat16 and float64, or if ``mixing`` is
            not of a type that :func:`mhla_attention` accepts.
    """
    check_causal(causal)
    check_state(state, MHLAState, "mhla_prefill")
    block_size = check_block_size(block_size)
    if causal == "block":
        check_one_block(q, k, v, block_size)
        tokens = q, k, v
    else:
        check_one_token(q, k, v)
        tokens = q[:, None], k[:, None], v[:, None]
    (batch, count, heads, key_width), mixing = tokens[0].shape, as_mixing(mixing)
    problem = check_problem(
        *tokens, mixing, block_size=block_size, causal=causal, normalize=normalize, scale=scale, eps=eps,
        feature_map=feature_map,
    )  # fmt: skip
    check_devices(problem)
    check_reach(mixing, block_size, state.lengths, (count,) * batch)
    kind = kind_of(q, v, mixing, block_size, block_causal=causal == "block")
    state.check(kind, batch, heads, problem.accumulate)
    check_complete(state, (count,) * batch)
    repeats = heads // max(1, problem.k.shape[2])
    if causal == "block":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = repeat(k, repeats, 1), repeat(v, repeats, 1)
    with without_autocast(q.device.type):
        dtype = problem.accumulate
        mixing = mixing.to(dtype)
        q, k, v = map_features(q.to(dtype), k.to(dtype), v.to(dtype), feature_map, None, None)
        writes = state.may_write(q, k, v, *mixing.tensors.values())
        opened = state.advance(mixing, (True,) * batch, writes, donate_state)
        if causal == "block":
            summary = torch.cat([(k.transpose(-1, -2) @ v).flatten(2), k.sum(-2)], -1)
        else:
            summary = torch.cat([(k[..., None] * v[..., None, :]).flatten(2), k], -1)
            q = q[..., None, :]
        # if no block was opened, `opened` is the caller's state, which keeps its tensors unless it is donated
        is_new = donate_state or opened is not state
        owned = opened.owned if is_new else ()
        total = opened.open.add_(summary) if writes and "open" in owned else opened.open + summary
        coefficients = own_coefficients(mixing, [length // block_size for length in state.lengths])
        # [B, H, W]: finished blocks, and the open block including the new tokens with its own coefficient m[i, i]
        mixture = torch.addcmul(opened.mixture, coefficients, total)
        width = key_width * v.shape[-1]
        out = q @ mixture[..., :width].unflatten(-1, (key_width, v.shape[-1]))
        # The last K numbers are the mixed sums of the keys. [B, H, C, 1], with C = 1 for a single token.
        total_weight = (q * mixture[..., None, width:]).sum(-1, keepdim=True)
        out = out / (total_weight + eps) if problem.weighting.scale is None else out * problem.weighting.scale
        lengths = tuple(length + count for length in state.lengths)
        after = opened.with_tensors({"open": total}, lengths, opened.written(owned))
        if donate_state:
            state.spend()
        out = out.transpose(1, 2) if causal == "block" else out.squeeze(-2)
        return out.to(problem.v.dtype), after


def check_causal(causal: Causal) -> None:
    """Check that attention is causal, as generation requires.

    Raises:
        ValueError: if ``causal`` is neither True nor ``"block"``.
    """
    if causal not in (True, "block"):
        raise ValueError(
            f"causal={causal!r} is not one of True, 'block': generation attends to no later token or block"
        )


def check_tokens(q: Tensor, step: str = "mhla_step") -> None:
    """Check that ``q`` has four axes, ``[B, N, H, K]``, which functions for several tokens at a time require.

    Args:
        q: queries to check.
        step: name of the function for a single token, for the message.

    Raises:
        ValueError: if ``q`` does not have four axes; the message names the function for a single token.
        TypeError: if ``q`` is not a tensor.
    """
    check_is_tensor("q", q)
    if q.dim() != 4:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [B, N, H, K]; one token goes to {step}")


def check_one_token(q: Tensor, k: Tensor, v: Tensor, prefill: str = "mhla_prefill") -> None:
    """Check that ``q``, ``k`` and ``v`` have three axes, ``[B, H, D]``, which functions for one token at a time require.

    Args:
        q: query to check.
        k: key to check.
        v: value to check.
        prefill: name of the function for several tokens, for the message.

    Raises:
        ValueError: if one of them does not have three axes; the message names the function for several tokens.
        TypeError: if one of them is not a tensor.
    """
    check_are_tensors(q, k, v)
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v have shapes {shapes}; a step takes one token, [B, H, D]; several go to {prefill}")


def check_one_block(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> None:
    """Check that ``q``, ``k`` and ``v`` have four axes and the tokens of one block, as a block-causal step requires.

    Raises:
        ValueError: if one of them does not have four axes, or if there are no tokens or more than ``block_size``.
        TypeError: if one of them is not a tensor.
    """
    check_are_tensors(q, k, v)
    shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or not 1 <= q.shape[1] <= block_size:
        raise ValueError(
            f"q, k, v have shapes {shapes}; a step with causal='block' takes one block, [B, C, H, D] with C from 1 to "
            f"block_size={block_size}; several blocks go to mhla_prefill"
        )


def check_complete(state: BlockState, counts: Sequence[int]) -> None:
    """Check that every row that gets new tokens ends with a complete block, if the state is block-causal.

    In block-causal attention, a token attends to all tokens of its own block and of the blocks before it.

    Args:
        state: generation state before the new tokens.
        counts: number of new tokens in each row.

    Raises:
        ValueError: if such a row ends with a shorter block, whose tokens can no longer attend to the new ones.
    """
    size = state.kind.block_size
    if not state.kind.block_causal:
        return
    for row, (length, count) in enumerate(zip(state.lengths, counts, strict=True)):
        if count and length % size:
            raise ValueError(
                f"row {row} has {length} tokens, so that its last block has {length % size} of block_size={size} tokens and "
                "is final with causal='block'; pass complete blocks to the calls before"
            )


def count_tokens(lengths: Tensor | Sequence[int] | None, batch: int, tokens: int) -> tuple[int, ...]:
    """Return the number of tokens in each row, without its padding, as Python integers.

    Args:
        lengths: number of tokens in each row without padding, ``[B]``; None if there is no padding.
        batch: number of rows, B.
        tokens: number of tokens in a row with its padding, N.

    Raises:
        ValueError: unless ``lengths`` holds an integer from 0 to ``tokens`` for each row.
    """
    if lengths is None:
        return (tokens,) * batch
    counts = as_indices(lengths, "lengths")
    if counts is None or len(counts) != batch or not all(0 <= count <= tokens for count in counts):
        shown = reprlib.repr(lengths.tolist() if isinstance(lengths, Tensor) else lengths)
        raise ValueError(f"lengths must be {batch} integers from 0 to N={tokens}, one for each row, got {shown}")
    return tuple(counts)


def without_padding(counts: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    """Return views of tensors ``[B, N, ...]`` that end with the last token of the longest row.

    Args:
        counts: number of tokens in each row, without padding.
        tensors: tensors with padding on the right of each row.
    """
    longest = max(counts, default=0)
    return [x[:, :longest] for x in tensors]


def with_padding(out: Tensor, tokens: int) -> Tensor:
    """Append zeros to outputs ``[B, N', H, V]`` so that each row has ``tokens`` entries."""
    return F.pad(out, (0, 0, 0, 0, 0, tokens - out.shape[1])) if out.shape[1] < tokens else out


def mask_of_counts(counts: Sequence[int], q: Tensor) -> Tensor | None:
    """Return a mask that is True for tokens and False for the padding to their right.

    Args:
        counts: number of tokens in each row, without padding.
        q: tensor ``[B, N, ...]`` that gives N and the device.

    Returns:
        ``[B, N]`` bool; None if no row has padding.
    """
    tokens = q.shape[1]
    if all(count == tokens for count in counts):
        return None
    return torch.arange(tokens, device=q.device) < on_device(counts, q.device)[:, None]


def check_reach(mixing: Mixing, block_size: int, previous_lengths: Sequence[int], counts: Sequence[int]) -> None:
    """Check that the mixing coefficients cover the block of the last token in each row.

    Args:
        mixing: mixing coefficients between blocks.
        block_size: tokens in a block.
        previous_lengths: number of tokens that the generation state already holds, in each row.
        counts: number of new tokens in each row.

    Raises:
        ValueError: if a row has more blocks than the coefficients cover, or if ``previous_lengths`` and ``counts`` differ in
            length.
    """
    if len(previous_lengths) != len(counts):
        raise ValueError(f"the state has {len(previous_lengths)} rows, but q has B={len(counts)}")
    size = mixing.blocks
    longest = max((b + c for b, c in zip(previous_lengths, counts, strict=True) if c), default=0)
    if size is not None and longest > size * block_size:
        raise ValueError(
            f"{longest} tokens with block_size={block_size} make {-(-longest // block_size)} blocks, but mixing is for "
            f"{size} at most: use at most {size * block_size} tokens, or extend mixing (mhla_kernels.extend_mixing)"
        )


def begin(
    state: BlockState, counts: Sequence[int], mixing: Mixing, writes: bool
) -> tuple[Any, list[int], tuple[int, ...]]:
    """Prepare a generation state for new tokens, and find where each row's new tokens begin.

    If the last block of a row is full and the row gets new tokens, that block becomes one of the finished blocks of the
    prepared state, which has a new block for these tokens.

    Args:
        state: generation state after the earlier tokens. It is not changed.
        counts: number of new tokens of each row.
        mixing: mixing coefficients between blocks.
        writes: whether tensors that are created for the prepared state may be written to in place.

    Returns:
        The prepared state, of the class of ``state``, or ``state`` itself if no row starts a block; the index of the block that
        receives the first new token, in each row (for a row without new tokens, the index of its last block); and the number of
        tokens that this block already holds, in each row.
    """
    size, moves = state.kind.block_size, [count > 0 for count in counts]
    # a row without new tokens keeps its block open even if it is full; its outputs are masked later
    firsts = [
        length // size if moving else max(length - 1, 0) // size
        for length, moving in zip(state.lengths, moves, strict=True)
    ]
    offsets = tuple(length - first * size for length, first in zip(state.lengths, firsts, strict=True))
    return state.advance(mixing, moves, writes), firsts, offsets


def add_to_first(blocks: Tensor, x: Tensor) -> Tensor:
    """Add ``x`` ``[B, H, ...]`` to the first of M blocks, ``[B, H, M, ...]``, and return all blocks as a new tensor."""
    first = blocks[:, :, :1] + x[:, :, None]
    return torch.cat([first, blocks[:, :, 1:]], 2) if blocks.shape[2] > 1 else first


def summaries(k_BHMCK: Tensor, v_BHMCV: Tensor) -> Tensor:
    """Compute the summary of each block: ``k^T v``, flattened, followed by the sum of the keys.

    Args:
        k_BHMCK: keys in M blocks of C token positions, ``[B, H, M, C, K]``.
        v_BHMCV: values in blocks, ``[B, H, M, C, V]``.

    Returns:
        Summaries, ``[B, H, M, K * V + K]``.
    """
    return torch.cat([(k_BHMCK.transpose(-1, -2) @ v_BHMCV).flatten(3), k_BHMCK.sum(-2)], -1)


def in_blocks(x: Tensor, offsets: tuple[int, ...], block_size: int) -> Tensor:
    """Arrange tokens in M blocks of C slots (token positions). A row's first token may be in any slot of the first block.

    Args:
        x: tokens, ``[B, N, H, D]``.
        offsets: slot of the first token in the first block, for each row; the slots before it hold zeros.
        block_size: tokens in a block.

    Returns:
        Blocks, ``[B, H, M, C, D]``. C is ``block_size``, or less for a single block that begins at slot 0.
    """
    batch, tokens, heads, width = x.shape
    largest_offset = max(offsets, default=0)
    slots = largest_offset + tokens
    if len(set(offsets)) < 2:
        x = F.pad(x, (0, 0, 0, 0, largest_offset, 0))  # all rows begin at the same slot
    else:
        slot = on_device(offsets, x.device)[:, None] + torch.arange(tokens, device=x.device)
        # scatter, because the first slot differs from row to row
        index = slot[..., None, None].expand(batch, tokens, heads, width)
        x = x.new_zeros(batch, slots, heads, width).scatter(1, index, x)
    blocks = divide_up(slots, block_size) if slots > block_size else 1
    # a single block from slot 0 on is not padded, so that a short prompt does not pay for block_size slots
    size = block_size if blocks > 1 or largest_offset else at_most(max(slots, 1), block_size)
    return BlockPartition(slots, blocks, size).split(x)


def take_back(out: Tensor, offsets: tuple[int, ...], tokens: int, mask: Tensor | None) -> Tensor:
    """Take tokens ``[B, N, H, D]`` out of blocks, which reverses :func:`in_blocks`.

    Args:
        out: tokens in M blocks of C slots (token positions), ``[B, H, M, C, D]``.
        offsets: slot of the first token in the first block, for each row.
        tokens: number of tokens N.
        mask: ``[B, N]`` bool, False for tokens to set to zero; None to keep the values of all tokens.
    """
    out = out.flatten(2, 3).transpose(1, 2)
    if len(set(offsets)) == 1:
        out = out[:, offsets[0] : offsets[0] + tokens]
    else:
        slot = on_device(offsets, out.device)[:, None] + torch.arange(tokens, device=out.device)
        out = out.gather(1, slot[..., None, None].expand(-1, -1, *out.shape[2:]))
    return out if mask is None else torch.where(mask[..., None, None], out, 0)


class _ContinuedMixer(Mixer):
    """Callable that mixes the summaries of new blocks with those of the blocks that a generation state already holds.

    A summary is a sum over the keys and values of a block. The mixtures include the finished blocks of the state, and the
    earlier tokens of the block in which the new tokens begin.

    Args:
        mixing: mixing coefficients between blocks.
        start: generation state, in which the first new token of each row belongs to the open block.
        firsts: index of the block that receives the first new token, in each row.
        blocks: number of blocks that the new tokens occupy, M.
        key_value: number of key-value products in a summary, K * V.
    """

    def __init__(self, mixing: Mixing, start: MHLAState, firsts: Sequence[int], blocks: int, key_value: int) -> None:
        groups = groups_of_rows(firsts, [True] * len(firsts), start.open.device)
        heads = start.open.shape[1]

        def own_of(first: int, rows: Rows) -> Tensor:
            weights = mixing.own(slice(first, first + blocks), first + blocks)
            coefficients = weights.shape[-1]  # 1 if all blocks share it; too few if the last blocks hold no token
            weights = F.pad(weights, (0, blocks - coefficients)) if 1 < coefficients < blocks else weights
            count = len(start.lengths) if isinstance(rows, slice) else len(rows)
            return weights.reshape(1, -1, weights.shape[-1]).expand(count, heads, blocks)

        super().__init__(mixing, by_groups(groups, own_of))
        self.start, self.groups, self.key_value = start, groups, key_value

    def __call__(self, summary: Tensor, causal: bool) -> Tensor:
        """Compute a causal mixture of block summaries for each of the M blocks of new tokens.

        Args:
            summary: sums of ``k^T v`` for each block, ``[B, H, M, K, V]``, or sums of the keys, ``[B, H, M, K]``.
            causal: ignored; the mixtures are always causal.

        Returns:
            Mixtures, in the shape of ``summary``.
        """
        part = slice(0, self.key_value) if summary.dim() == 5 else slice(self.key_value, None)
        # The earlier tokens of the block in which the new tokens begin are read by later blocks as part of its summary, and by
        # the new tokens of this block with the coefficient m[i, i].
        begun = self.start.open[..., part]
        flat = add_to_first(summary.flatten(3), begun)
        mixed = by_groups(
            self.groups,
            lambda first, rows: self.mixing.mix_after(self.start.finished[rows][..., part], flat[rows], first),
        )
        return add_to_first(mixed, self.own[:, :, :1] * begun).view(summary.shape)
