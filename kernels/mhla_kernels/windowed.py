"""Attention with softmax weights for near tokens and MHLA weights for far tokens.

MHLA is multi-head linear attention with mixing coefficients m between blocks. For token t in block i = b(t),

    w[t, j] = exp(scale q_t . k_j)                                   j near
    w[t, j] = exp(far_t) m[i', b(j)] f_t . g_j                       j far
    o_t = sum_j w[t, j] v_j / sum_j w[t, j]

f and g are nonnegative features of queries and keys, and far_t is the logarithm of a factor on the weights of far tokens. Both
kinds of weights share one normalizer. In causal attention, j runs over tokens up to t, the near tokens are in block i or i - 1,
and i' = i - 1. Otherwise j runs over all tokens, the near tokens are in block i or in a neighbor of it (along an axis of the
block grid or diagonally), and i' = i. In addition, the first tokens of a sequence can be sinks, which are near for every query.
Without causality, every token is also near for a sink.

Softmax attention to near tokens is most of what linearized language models need (LoLCATs, arXiv 2410.10254, section 3.3,
describes the combination with plain linear attention). Pretrained models put much of their attention on the first tokens
(attention sinks, StreamingLLM, arXiv 2309.17453, section 3), which features approximate badly. Far tokens cost one summary per
block. The two sums are combined by their logarithms, so that neither overflows.

Shape letters: B batch, N tokens, H heads, M blocks, C slots of a block, S sinks, K width of a key's features, V width of a
value, ``W = K V + K`` numbers of a summary.
"""

# Longer than other modules because it documents all arguments of the public function and checks them.

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.attention import without_autocast
from mhla_kernels.blocks import BlockPartition, at_most, divide_up, is_dynamic
from mhla_kernels.checks import (
    as_index,
    check_block_size,
    check_devices,
    check_features,
    check_one_device,
    check_problem,
)
from mhla_kernels.features import hide
from mhla_kernels.forms.chunked import make_mixer
from mhla_kernels.mixing import DenseMixing, Mixing, MixingLike, as_mixing
from mhla_kernels.near_far import NearTokens, combine, read_mixed
from mhla_kernels.problem import Problem, default_scale, nothing, repeat_heads
from mhla_kernels.windowed_all import attend_all
from mhla_kernels.windowed_blocks import InBlocks


def mhla_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    mixing: MixingLike,
    *,
    block_size: int | None = None,
    block_offsets: Tensor | Sequence[int] | None = None,
    causal: bool = True,
    block_grid: Sequence[int] | None = None,
    sinks: int = 0,
    far: Tensor | None = None,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    sink_q: Tensor | None = None,
) -> Tensor:
    """Compute attention with softmax weights for near tokens and MHLA weights for far tokens.

    MHLA is multi-head linear attention with mixing coefficients m between blocks. The weight of a near token j for query t is
    ``exp(scale q_t . k_j)``. The weight of a far token j is ``exp(far_t) m[i, b(j)] f_t . g_j``, where b(j) is the block of
    token j, f and g are features of queries and keys, and far_t is the entry of ``far`` for query t. Each output is the mean of
    the values with these weights.

    With ``causal``, near tokens are in the query's block and in the block before it, all earlier tokens are far, and i is the
    block before the query's. Otherwise, near tokens are in the query's block and in the blocks next to it, along each axis and
    diagonally. All other tokens are far, and i is the query's block. In addition, the first tokens of a sequence can be sinks,
    which are near for every query. Without ``causal``, every token is also near for a sink.

    Args:
        q: queries, ``[B, N, H, Dk]``, for B batch rows, N tokens and H heads of width Dk. Tokens of a block are contiguous.
        k: keys, ``[B, N, Hkv, Dk]``; Hkv divides H.
        v: values, ``[B, N, Hkv, V]``.
        q_features: nonnegative features of the queries, ``[B, N, H, K]``.
        k_features: nonnegative features of the keys, ``[B, N, H, K]``.
        mixing: nonnegative coefficients, ``[M, M]`` or ``[H, M, M]`` for M blocks, or an object such as
            :class:`mhla_kernels.ExponentialMixing`, as for :func:`mhla_kernels.mhla_attention`. With sinks and ``block_grid``,
            they cover the blocks of the grid only, without the block of sinks.
        block_size: tokens in a block. Give exactly one of this and ``block_offsets``.
        block_offsets: index of the first token of each block, followed by N; only without ``causal``.
        causal: whether a token attends only to itself and earlier tokens.
        block_grid: number of blocks along each axis of a grid of blocks in row-major order; None for a sequence of blocks. With
            sinks, there is one more block before the grid, which holds only the sinks and masked tokens, and has no neighbors.
            Only without ``causal``.
        sinks: number of tokens at the start of each sequence that are sinks; at most the size of its first block.
        far: logarithm of a factor on the weights of far tokens, ``[B, N, H]`` or broadcastable to it; None means zeros.
        scale: factor on the scores of near tokens; None means ``Dk ** -0.5``.
        key_mask: ``[B, N]`` bool, False for masked tokens. No token attends to them, and their outputs are zero. None masks no
            token.
        cu_seqlens: ``[S + 1]`` integers for S packed sequences, with B = 1: the index of the first token of each sequence,
            followed by N. None if each row is one sequence. Only with ``causal``.
        sink_q: queries that read the sinks, ``[B, N, H, Dk]``; None means q. With rotary positions, for example, they can be
            rotated to a position nearer to the sinks. Only with ``causal``.

    Returns:
        Outputs ``[B, N, H, V]`` in the dtype of v. Sums are computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if the shapes or options do not fit together, or if features are negative.
        TypeError: if a dtype is not float32, bfloat16 or float64, or if ``mixing`` has an unsupported type.
    """
    mixing = as_mixing(mixing)
    if block_grid is not None and sinks and not causal:
        # Checked here, because later checks see the padded matrix and would report its size.
        if block_size is not None:
            _check_blocks(divide_up(q.shape[1], check_block_size(block_size)), block_grid, True)
        elif block_offsets is not None:
            _check_blocks(len(block_offsets) - 1, block_grid, True)
        mixing.check(q.shape[2], False)
        if mixing.blocks not in (None, prod(block_grid)):
            raise ValueError(
                f"mixing is for {mixing.blocks} blocks; with sinks, it must be for the {prod(block_grid)} of "
                f"block_grid={tuple(block_grid)}"
            )
        # Sinks are near for every query, so the row and the column of their block are zeros.
        mixing = DenseMixing(F.pad(mixing.matrix(prod(block_grid)), (1, 0, 1, 0)))
    problem = check_window(
        q, k, v, q_features, k_features, mixing, block_size, key_mask, cu_seqlens, block_offsets, causal, sinks
    )
    grid = _check_grid(problem, block_grid, causal, sinks)
    check_sink_queries(sink_q, q, causal)
    if v.numel() == 0 or q.shape[2] == 0:
        return nothing(problem, q_features, k_features, far, sink_q)
    scale = default_scale(q.shape[-1]) if scale is None else scale
    k, v = repeat_heads(q, k, v)
    with without_autocast(q.device.type):
        q, k, v, f, g = (x.to(problem.accumulate) for x in (q, k, v, q_features, k_features))
        far, real = heads_last(far, q), q.new_ones(q.shape[:2]) if key_mask is None else key_mask.to(q.dtype)
        if key_mask is not None:
            # those of queries too: zero times NaN would be NaN in the gradients of the keys
            hidden = ~key_mask[..., None, None]
            q, k, v, f, g, far = (x.masked_fill(hidden, 0) for x in (q, k, v, f, g, far))
        tokens, mixing = (q * scale, k, v, f, g, far), mixing.to(problem.accumulate)
        sinks = at_most(sinks, problem.layout.largest)
        if causal:
            blocks = problem.layout.partition(q.device)
            x = InBlocks.of(tokens, real > 0, blocks)
            if sink_q is not None:
                sink_q = sink_q.to(problem.accumulate) * scale
                sink_q = blocks.split(sink_q if key_mask is None else sink_q.masked_fill(hidden, 0))
            del tokens, q, k, v, f, g  # long texts need their memory
            out = blocks.merge(_causal(x, mixing, blocks, sinks, sink_q))
        else:
            out = attend_all(tokens, real > 0, mixing, problem.layout, grid, sinks)
        return hide(out, key_mask).to(problem.v.dtype)


def _causal(x: InBlocks, mixing: Mixing, blocks: BlockPartition, sinks: int, sink_q: Tensor | None) -> Tensor:
    """Compute the outputs of causal windowed attention, ``[B, H, M, C, V]``.

    Args:
        x: tensors in blocks.
        mixing: mixing coefficients between all blocks.
        blocks: assignment of the tokens to blocks.
        sinks: number of sinks, the first tokens of each sequence, which later queries always read by softmax attention.
        sink_q: queries that read the sinks, multiplied by the scale of the scores, ``[B, H, M, C, Dk]``; None for the
            queries of ``x``.
    """
    # True for the first block of each sequence: the block before it belongs to a different sequence, or does not exist
    index = torch.arange(blocks.blocks, device=x.q.device)
    starts = index == 0 if blocks.local is None else blocks.local == 0
    first = index[:1] if blocks.local is None else index - blocks.local
    # `first` is the first block of each block's sequence. It has length 1 without packing, where all blocks read the same.
    reads = [y[:, :, first, :sinks] for y in (x.k, x.v)]
    slot = torch.arange(blocks.slots, device=x.q.device)
    # [M, C, S]: only queries of a first block can come before a sink.
    after = ~starts[:, None, None] | (slot[:, None] >= slot[:sinks])
    sinks_visible = x.visible[:, first, None, :sinks] & after
    x = x.without_sinks(starts, sinks)
    mixer = make_mixer(mixing, blocks)
    # Block i reads the mixture of block i - 1, which covers the blocks before i - 1: block i - 1 itself is near.
    mixed = _later(mixer(x.sums, causal=True)).masked_fill(starts[:, None, None], 0)
    k_before, v_before, visible_before = (_later(y) for y in (x.k, x.v, x.visible[:, None, ..., None]))
    visible_before = visible_before[:, 0, ..., 0] & ~starts[:, None]
    window = CausalWindow(k_before, v_before, visible_before, reads[0], reads[1], sinks_visible, sink_q)
    return window.attend(x, mixed)


class CausalWindow(NamedTuple):
    """Near tokens of causal windowed attention outside the query's own block: the preceding block, and the sinks.

    Attributes:
        k: keys of the block before each block, ``[B, H, M, C, Dk]``.
        v: values of the block before each block, ``[B, H, M, C, V]``.
        visible: ``[B, M, C]`` bool, True for slots of the preceding block that may be attended to.
        sink_k: keys of S sinks, ``[B, H, M, S, Dk]``, or ``[B, H, 1, S, Dk]`` if all blocks of a row read the same sinks.
        sink_v: values of the sinks, ``[B, H, M, S, V]`` or ``[B, H, 1, S, V]``.
        sinks_visible: ``[B, M, C, S]`` bool, True for sinks that a query attends to.
        sink_q: queries that read the sinks, multiplied by the scale of the scores, ``[B, H, M, C, Dk]``; None for the queries
            of the block.
    """

    k: Tensor
    v: Tensor
    visible: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sinks_visible: Tensor
    sink_q: Tensor | None

    def attend(self, x: InBlocks, mixed: Tensor) -> Tensor:
        """Compute the outputs of all queries, ``[B, H, M, C, V]``.

        Args:
            x: tensors in blocks, with sinks hidden.
            mixed: mixed summaries of the far blocks, ``[B, H, M, K, V + 1]``. The last column holds sums of weights.
        """
        slots = x.q.shape[-2]
        until_query = torch.ones(slots, slots, dtype=torch.bool, device=x.q.device).tril()
        near = [
            NearTokens(self.k, self.v, self.visible[:, None, :, None]),
            NearTokens(x.k, x.v, x.visible[:, None, :, None] & until_query),
        ]
        if self.sink_k.shape[-2]:
            near.append(NearTokens(self.sink_k, self.sink_v, self.sinks_visible[:, None], self.sink_q))
        return combine(x.q, near, read_mixed(x.f, mixed, x.far))


def check_sink_queries(sink_q: Tensor | None, q: Tensor, causal: bool = True) -> None:
    """Check the queries that read the sinks, which are the first tokens of a sequence.

    Args:
        sink_q: queries that read the sinks; None if the caller did not pass them, which is always valid.
        q: queries that read all other near tokens, ``[B, N, H, Dk]``.
        causal: whether the attention is causal.

    Raises:
        ValueError: if ``sink_q`` is passed to attention that is not causal, or differs from ``q`` in shape, dtype or device.
    """
    if sink_q is None:
        return
    if not causal:
        raise ValueError("sink_q is for causal attention; leave it out or pass causal=True")
    if (sink_q.shape, sink_q.dtype, sink_q.device) != (q.shape, q.dtype, q.device):
        raise ValueError(
            f"sink_q is {sink_q.dtype} {list(sink_q.shape)} on {sink_q.device}; it must be like q, {q.dtype} "
            f"{list(q.shape)} on {q.device}"
        )


def heads_last(far: Tensor | None, q: Tensor) -> Tensor:
    """Expand the logarithm of a factor on the weights of far tokens to one number for each query and head.

    Far tokens are those outside the window of softmax attention.

    Args:
        far: logarithm of the factor, broadcastable to ``[B, N, H]``, or to ``[B, H]`` for a single token; None for zeros.
        q: queries, ``[B, N, H, Dk]``, or ``[B, H, Dk]`` for a single token.

    Returns:
        Expanded logarithms, ``[B, N, H, 1]`` or ``[B, H, 1]`` in the dtype of ``q``.
    """
    if far is None:
        return q.new_zeros(*q.shape[:-1], 1)
    return far.to(q.dtype).expand(q.shape[:-1])[..., None]


def _later(x: Tensor) -> Tensor:
    # concatenate first, then cut: torch.export would make a constant of M - 1 blocks, which may be 1
    return torch.cat([torch.zeros_like(x[:, :, :1]), x], 2)[:, :, :-1]


def check_feature_shapes(q: Tensor, q_features: Tensor, k_features: Tensor) -> None:
    """Raise ValueError unless the features of queries and keys are ``[B, N, H, K]`` for queries ``[B, N, H, Dk]``."""
    for name, x in (("q_features", q_features), ("k_features", k_features)):
        if x.dim() != 4 or x.shape[:3] != q.shape[:3] or x.shape[-1] != q_features.shape[-1]:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [B, N, H, K] for q of {list(q.shape)}")


def check_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    mixing: Mixing,
    block_size: int | None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    block_offsets: Tensor | Sequence[int] | None = None,
    causal: bool = True,
    sinks: int = 0,
) -> Problem:
    """Check the arguments of windowed attention, and return an object that holds all of them except the features and sinks.

    :func:`mhla_window_attention` documents the arguments and the errors.
    """
    if causal not in (False, True):
        raise ValueError(f"causal={causal!r} is not one of False, True; causal='block' is for mhla_attention")
    if cu_seqlens is not None and not causal:
        raise ValueError(
            "cu_seqlens is for causal attention; otherwise, give each sequence a padded row, with key_mask"
        )
    check_feature_shapes(q, q_features, k_features)
    problem = check_problem(
        q, k, v, mixing, block_size=block_size, block_offsets=block_offsets, causal=causal, normalize=False,
        key_mask=key_mask, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    check_devices(problem)
    check_one_device(q.device, {"q_features": q_features, "k_features": k_features})
    size = problem.layout.block_size or (problem.layout.block_offsets or (0, 0))[1]
    number = as_index(sinks)
    if number is None or not 0 <= number <= size:
        raise ValueError(f"sinks={sinks!r} must be an integer from 0 to the size of the first block, {size}")
    features = {"q_features": (q_features, key_mask), "k_features": (k_features, key_mask)}
    check_features(features, "rows of weights cannot be divided by their sums; give nonnegative ones")
    return problem


def _check_blocks(number: int, block_grid: Sequence[int], has_sinks: bool) -> None:
    """Raise ValueError unless a call with ``number`` blocks fits a grid with ``block_grid`` blocks along its axes.

    With ``has_sinks``, the call must have one block more than the grid. Symbolic sizes are not checked.
    """
    grid = tuple(block_grid)
    if any(is_dynamic(length) for length in (*grid, number)):
        return
    if min(grid, default=0) < 1 or prod(grid) + has_sinks != number:
        lead = " and one of sinks" if has_sinks else ""
        raise ValueError(f"there are {number} blocks, which are not the {prod(grid)} of block_grid={grid}{lead}")


def _check_grid(problem: Problem, block_grid: Sequence[int] | None, causal: bool, sinks: int) -> tuple[int, ...] | None:
    """Check the block grid of windowed attention, and return it as a tuple; None for a sequence of blocks.

    Args:
        problem: checked arguments of the call.
        block_grid: number of blocks along each axis; None for a sequence of blocks.
        causal: whether the attention is causal.
        sinks: number of sinks, the first tokens of a sequence, which every query reads.

    Raises:
        ValueError: if causal attention has a grid, if the number of blocks of the grid does not fit the call, or if the block
            before the grid has more tokens than there are sinks.
    """
    if block_grid is None:
        return None
    grid, number, offsets = tuple(block_grid), problem.layout.blocks, problem.layout.block_offsets
    if causal:
        raise ValueError(f"block_grid={grid} is for attention to all tokens; pass causal=False or leave it out")
    _check_blocks(number, grid, sinks > 0)
    if sinks and offsets is not None and offsets[1] > sinks:
        raise ValueError(
            f"the first block has {offsets[1]} tokens; with block_grid, it must hold only the {sinks} sinks"
        )
    return grid
