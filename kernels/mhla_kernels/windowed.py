"""Attention with softmax weights for near tokens and MHLA weights for far tokens.

MHLA is multi-head linear attention with mixing coefficients m between blocks. For token t in block i = b(t),

    w[t, j] = exp(scale q_t . k_j)                                   j near
    w[t, j] = exp(far_t) m[i', b(j)] f_t . g_j                       j far
    o_t = sum_j w[t, j] v_j / sum_j w[t, j]

f and g are nonnegative features of queries and keys. Both kinds of weights share one normalizer. In causal attention, j runs
over tokens up to t, the near tokens are in block i or i - 1, and i' = i - 1. Otherwise j runs over all tokens, the near tokens
are in block i or next to it along every axis of the block grid, and i' = i. In addition, the first tokens of a sequence can be
sinks, which are near for every query; without causality, every token is also near for a sink.

Softmax attention to near tokens is most of what linearized language models need (LoLCATs, arXiv 2410.10254, section 3.3,
describes the combination with plain linear attention). Pretrained models put much of their attention on the first tokens
(attention sinks, StreamingLLM, arXiv 2309.17453, section 3), which features approximate badly. Far tokens cost one summary per
block. The two sums are combined by their logarithms, so that neither overflows.

Shape letters: B batch, N tokens, H heads, M blocks, C slots of a block, S sinks, K width of a key's features, V width of a
value, ``W = K V + K`` numbers of a summary.

Longer than other modules: both directions share the checks, the blocks, the sinks, and the combination of near and far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.attention import without_autocast
from mhla_kernels.blocks import BlockPartition, at_most, is_dynamic
from mhla_kernels.checks import as_index, check_devices, check_features, check_problem
from mhla_kernels.finite import finite_
from mhla_kernels.forms.chunked import make_mixer
from mhla_kernels.mixing import DenseMixing, Mixing, MixingLike, as_mixing
from mhla_kernels.problem import Problem, nothing, repeat_heads

LEAST_WEIGHT = 0.8
"""Exponent e: a sum of far weights below ``tiny ** e`` (4e-31 in float32) counts as this bound when the divisor is chosen."""
MOST_GRADIENT = 0.5
"""Exponent e: ``max ** e`` bounds the gradient of coefficients that are zero, which ``far`` can increase."""


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
) -> Tensor:
    """Compute attention with softmax weights for near tokens and MHLA weights for far tokens, in time linear in N.

    The weight of a near token j for query t is ``exp(scale q_t . k_j)``. The weight of a far token is
    ``exp(far_t) m[i, b(j)] f_t . g_j``, with block b(j) of token j, mixing coefficients m between blocks, and features f and g
    of queries and keys. Each output is the mean of the values with these weights.

    With ``causal``, near tokens are in the query's block and in the block before it, all earlier tokens are far, and i is the
    block before the query's. Otherwise, near tokens are in the query's block and in the blocks next to it, along each axis and
    diagonally, all others are far, and i is the query's block. Sinks are near for every query. Without ``causal``, every token
    is near for a sink.

    Args:
        q: queries, ``[B, N, H, Dk]``, for B batch rows, N tokens and H heads of width Dk. Tokens of a block are contiguous.
        k: keys, ``[B, N, Hkv, Dk]``; Hkv divides H.
        v: values, ``[B, N, Hkv, V]``.
        q_features: nonnegative features of the queries, ``[B, N, H, K]``.
        k_features: nonnegative features of the keys, ``[B, N, H, K]``.
        mixing: nonnegative coefficients, as for :func:`mhla_kernels.mhla_attention`.
        block_size: tokens in a block. Give it or ``block_offsets``.
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

    Returns:
        Outputs ``[B, N, H, V]`` in the dtype of v. Sums are computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if the shapes or options do not fit together, or if features are negative.
        TypeError: if a dtype is not float32, bfloat16 or float64.
    """
    mixing = as_mixing(mixing)
    problem = check_window(
        q, k, v, q_features, k_features, mixing, block_size, key_mask, cu_seqlens, block_offsets, causal, sinks
    )
    grid = _check_grid(problem, block_grid, causal, sinks)
    if v.numel() == 0 or q.numel() == 0:
        return nothing_far(problem, q_features, k_features, far)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = repeat_heads(q, k, v)
    with without_autocast(q.device.type):
        q, k, v, f, g = (x.to(problem.accumulate) for x in (q, k, v, q_features, k_features))
        real = q.new_ones(q.shape[:2]) if key_mask is None else key_mask.to(q.dtype)
        if key_mask is not None:
            k, v, g = (x.masked_fill(~key_mask[..., None, None], 0) for x in (k, v, g))
        blocks = problem.layout.partition(q.device)
        far = heads_last(far, q)
        visible = blocks.split(real[..., None, None])[:, 0, ..., 0] > 0
        q_blocks, k_blocks, v_blocks, f, g, far = (blocks.split(x) for x in (q, k, v, f, g, far))
        in_blocks = InBlocks(q_blocks, k_blocks, v_blocks, f, g, far, visible)
        sinks = at_most(sinks, blocks.slots)
        if causal:
            out = blocks.merge(_causal(in_blocks, mixing.to(problem.accumulate), blocks, sinks, scale))
        else:
            out = blocks.merge(_bidirectional(in_blocks, mixing.to(problem.accumulate), grid, sinks, scale))
            if sinks:
                out = torch.cat([_softmax(q[:, :sinks], k, v, real > 0, scale), out[:, sinks:]], 1)
        return (out if key_mask is None else out.masked_fill(~key_mask[..., None, None], 0)).to(problem.v.dtype)


class InBlocks(NamedTuple):
    """Tensors of windowed attention in M blocks of C slots, each of which holds a token or zeros.

    Attributes:
        q: queries, ``[B, H, M, C, Dk]``.
        k: keys, ``[B, H, M, C, Dk]``.
        v: values, ``[B, H, M, C, V]``.
        f: features of the queries, ``[B, H, M, C, K]``.
        g: features of the keys, ``[B, H, M, C, K]``.
        far: logarithm of a factor on the weights of far tokens, ``[B, H, M, C, 1]``.
        visible: mask of slots with a token that may be attended to, ``[B, M, C]`` bool.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    g: Tensor
    far: Tensor
    visible: Tensor

    def without_sinks(self, is_first: Tensor, sinks: int) -> InBlocks:
        """Return the tensors with sinks hidden and their features zero, because every query reads sinks separately.

        Args:
            is_first: mask of the blocks that begin a sequence, ``[M]`` bool.
            sinks: number of sinks.
        """
        if not sinks:
            return self
        is_sink = is_first[:, None] & (torch.arange(self.q.shape[-2], device=self.q.device) < sinks)
        return self._replace(g=self.g.masked_fill(is_sink[..., None], 0), visible=self.visible & ~is_sink)

    @property
    def sums(self) -> Tensor:
        """Summary of each block, ``[B, H, M, K, V + 1]``: V sums of weighted values and the sum of weights by feature."""
        return finite_(torch.cat([self.g.transpose(-1, -2) @ self.v, self.g.sum(-2)[..., None]], -1))


def _causal(x: InBlocks, mixing: Mixing, blocks: BlockPartition, sinks: int, scale: float) -> Tensor:
    """Compute the outputs of causal attention, ``[B, H, M, C, V]``."""
    # first blocks of sequences: the block before them belongs to another sequence, or does not exist
    index = torch.arange(blocks.blocks, device=x.q.device)
    starts = index == 0 if blocks.local is None else blocks.local == 0
    first = index[:1] if blocks.local is None else index - blocks.local
    reads = [y[:, :, first, :sinks] for y in (x.k, x.v)]
    slot = torch.arange(blocks.slots, device=x.q.device)
    after = ~starts[:, None, None] | (slot[:, None] >= slot[:sinks])
    sinks_visible = x.visible[:, first, None, :sinks] & after
    x = x.without_sinks(starts, sinks)
    mixer = make_mixer(mixing, blocks)
    mixed = _later(mixer(x.sums, causal=True)).masked_fill(starts[:, None, None], 0)
    k_before, v_before, visible_before = (_later(y) for y in (x.k, x.v, x.visible[:, None, ..., None]))
    visible_before = visible_before[:, 0, ..., 0] & ~starts[:, None]
    window = CausalWindow(k_before, v_before, visible_before, reads[0], reads[1], sinks_visible)
    return window.attend(x, mixed, scale)


class CausalWindow(NamedTuple):
    """Near tokens of causal windowed attention, apart from those in the query's own block.

    Attributes:
        k: keys of the block before each block, ``[B, H, M, C, Dk]``.
        v: values of the block before each block, ``[B, H, M, C, V]``.
        visible: mask of slots of the block before that may be attended to, ``[B, M, C]`` bool.
        sink_k: keys of the sinks, ``[B, H, M or 1, S, Dk]``.
        sink_v: values of the sinks, ``[B, H, M or 1, S, V]``.
        sinks_visible: mask of the sinks that each query attends to, ``[B, M, C, S]`` bool.
    """

    k: Tensor
    v: Tensor
    visible: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sinks_visible: Tensor

    def attend(self, x: InBlocks, mixed: Tensor, scale: float) -> Tensor:
        """Compute the outputs of all queries, ``[B, H, M, C, V]``.

        Args:
            x: tensors in blocks, with sinks hidden.
            mixed: mixed summaries of the far blocks, ``[B, H, M, K, V + 1]``. The last column holds sums of weights.
            scale: factor on the scores of near tokens.
        """
        slots = x.q.shape[-2]
        own_block = x.visible[:, None, :, None] & torch.ones(slots, slots, dtype=torch.bool, device=x.q.device).tril()
        block_before = self.visible[:, None, :, None].expand(-1, -1, -1, slots, -1)
        visible, keys, values = [block_before, own_block], [self.k, x.k], [self.v, x.v]
        if self.sink_k.shape[-2]:
            visible.append(self.sinks_visible[:, None].expand(-1, -1, x.q.shape[2], -1, -1))
            keys.append(self.sink_k.expand(-1, -1, x.q.shape[2], -1, -1))
            values.append(self.sink_v.expand(-1, -1, x.q.shape[2], -1, -1))
        scores = (x.q * scale) @ torch.cat(keys, -2).transpose(-1, -2)
        return combine(scores, torch.cat(visible, -1), torch.cat(values, -2), x.f, mixed, x.far)


def _bidirectional(x: InBlocks, mixing: Mixing, grid: tuple[int, ...] | None, sinks: int, scale: float) -> Tensor:
    """Compute the outputs of attention to all tokens, ``[B, H, M, C, V]``; those of sinks are to be replaced.

    Args:
        x: tensors in blocks.
        mixing: mixing coefficients between all blocks.
        grid: number of blocks along each axis; None for a sequence.
        sinks: number of sinks, which are in the first block.
        scale: factor on the scores of near tokens.
    """
    number = x.q.shape[2]
    axes, lead = ((number,), 0) if grid is None else (grid, int(sinks > 0))
    sinks_visible = x.visible[:, 0, :sinks]
    x = x.without_sinks(torch.arange(number, device=x.q.device) == 0, sinks)
    slot, near = _window(axes, lead, x.q.shape[-2], x.q.device)
    all_visible = torch.cat([sinks_visible, x.visible.flatten(1)], 1)
    # the first S slots of the gathered keys and values are the sinks, for every block
    slot = torch.cat([torch.arange(sinks, device=slot.device).expand(number, -1), slot + sinks], 1)
    near = F.pad(near, (sinks, 0), value=True)
    keys, values = (_gather(torch.cat([y[:, :, 0, :sinks], y.flatten(2, 3)], 2), slot) for y in (x.k, x.v))
    visible = (all_visible[:, slot] & near)[:, None, :, None]
    matrix = mixing.matrix(number)
    if is_dynamic(number):  # blocks after the last token are empty, so their coefficients do not matter
        index = torch.arange(number, device=matrix.device).clamp(max=matrix.shape[-1] - 1)
        matrix = matrix[..., index[:, None], index]
    matrix = matrix[..., :number, :number].masked_fill(_are_near(axes, lead, x.q.device), 0)
    mixed = DenseMixing(matrix).mix(x.sums.flatten(3), False).view(x.sums.shape)
    scores = (x.q * scale) @ keys.transpose(-1, -2)
    return combine(scores, visible, values, x.f, mixed, x.far)


def _gather(x: Tensor, slot: Tensor) -> Tensor:
    """Return the values ``[B, H, M, R, D]`` of the slots that each block reads, from those of all slots, ``[B, H, n, D]``."""
    return x.index_select(2, slot.flatten()).unflatten(2, slot.shape)


def _window(grid: Sequence[int], lead: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which slots each block reads: its own and those of the blocks next to it.

    Args:
        grid: number of blocks along each axis.
        lead: number of blocks before the grid, which read nothing: 0 or 1.
        slots: number of slots in a block, C.
        device: device of the results.

    Returns:
        Indices of slots, counted over all M blocks, int64, and a mask that is False for slots that are not in the window; both
        ``[M, R C]``, where R is the product of at most 3 blocks along each axis.
    """
    block = torch.zeros(1, 1, dtype=torch.int64, device=device)
    near = torch.ones_like(block, dtype=torch.bool)
    for length in grid:
        index = torch.arange(length, device=device)
        if is_dynamic(length):  # there may be fewer than three blocks
            width, first = 3, index - 1
        else:
            width = min(3, length)
            first = (index - 1).clamp(min=0, max=length - width)
        along = first[:, None] + torch.arange(width, device=device)
        inside = ((along - index[:, None]).abs() <= 1) & (along >= 0) & (along < length)
        along = along.clamp(min=0, max=length - 1)
        size = (block.shape[0] * length, block.shape[1] * width)
        block = (block[:, None, :, None] * length + along[:, None]).reshape(size)
        near = (near[:, None, :, None] & inside[:, None]).reshape(size)
    slot = (block + lead)[..., None] * slots + torch.arange(slots, device=device)
    near = near[..., None].expand(slot.shape)
    return F.pad(slot.flatten(1), (0, 0, lead, 0)), F.pad(near.flatten(1), (0, 0, lead, 0))


def _are_near(grid: Sequence[int], lead: int, device: torch.device) -> Tensor:
    """Return which blocks are the same or next to each other, ``[M, M]`` bool, for ``lead`` blocks before a grid of blocks."""
    near = torch.ones(1, 1, dtype=torch.bool, device=device)
    for length in grid:
        index = torch.arange(length, device=device)
        along = (index[:, None] - index).abs() <= 1
        size = near.shape[0] * length
        near = (near[:, None, :, None] & along[:, None]).reshape(size, size)
    return F.pad(near, (lead, 0, lead, 0))


def _softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Compute softmax attention of S queries to all N tokens, ``[B, S, H, V]``.

    Args:
        q: queries, ``[B, S, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, V]``.
        visible: mask of the tokens that may be attended to, ``[B, N]`` bool.
        scale: factor on the scores.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    no_features = q[..., :0]
    mixed = v.new_zeros(*v.shape[:2], 0, v.shape[-1] + 1)
    scores = (q * scale) @ k.transpose(-1, -2)
    return combine(scores, visible[:, None, None], v, no_features, mixed, torch.zeros_like(q[..., :1])).transpose(1, 2)


def nothing_far(problem: Problem, f: Tensor, g: Tensor, far: Tensor | None) -> Tensor:
    """Return the outputs of windowed attention for empty inputs: zeros of shape ``[B, N, H, V]``.

    Inputs are empty if the number of batch rows, tokens, heads or features is zero. Windowed attention has
    softmax weights for near tokens and MHLA weights for far tokens. Autograd gives all input tensors gradients of zeros.

    Args:
        problem: checked arguments of :func:`mhla_window_attention`, except the features.
        f: features of the queries, ``[B, N, H, K]``.
        g: features of the keys, ``[B, N, H, K]``.
        far: logarithm of a factor on the weights of far tokens; None if it was not given.
    """
    return nothing(problem, f, g, *([] if far is None else [far]))


def heads_last(far: Tensor | None, q: Tensor) -> Tensor:
    """Expand the logarithm of a factor on the weights of far tokens to one number for each query and head.

    Far tokens are those before the window of softmax attention.

    Args:
        far: tensor broadcastable to ``[B, N, H]``; None for zeros.
        q: queries, ``[B, N, H, Dk]``.

    Returns:
        ``[B, N, H, 1]`` in the dtype of ``q``.
    """
    if far is None:
        return q.new_zeros(*q.shape[:3], 1)
    return far.to(q.dtype).expand(q.shape[:3])[..., None]


def _later(x: Tensor) -> Tensor:
    # concatenate first, then cut: torch.export would make a constant of M - 1 blocks, which may be 1
    return torch.cat([torch.zeros_like(x[:, :, :1]), x], 2)[:, :, :-1]


def combine(scores: Tensor, visible: Tensor, v: Tensor, f: Tensor, mixed: Tensor, far: Tensor) -> Tensor:
    """Combine softmax attention to near tokens and linear attention to far tokens into one output for each query.

    For stability, all weights of a query are divided by a number close to the largest of them. This divisor is a constant for
    autograd, since the output does not depend on it. Far weights are not first divided by their own sum, because coefficients
    of zero would then get no gradient.

    Args:
        scores: scores of the S near tokens for each of C queries, ``[..., C, S]``.
        visible: bool mask of the near tokens that a query attends to, broadcastable to ``scores``.
        v: values of the near tokens, ``[..., S, V]``.
        f: features of the queries, ``[..., C, K]``.
        mixed: for each feature of the keys, V sums of weighted values and the sum of weights, ``[..., K, V + 1]``.
        far: logarithm of a factor on the weights of far tokens, ``[..., C, 1]``.

    Returns:
        Outputs, ``[..., C, V]``; zeros for a query that attends to no token.
    """
    numbers = torch.finfo(f.dtype)
    # normalize the features: with features near 1e-11, second derivatives square the inverse of their sum, which overflows
    size = f.detach().amax(-1, keepdim=True) if f.shape[-1] else torch.ones_like(far)
    size = size.masked_fill(size < numbers.tiny, 1)
    sums = (f / size) @ mixed
    far = far + size.log()
    scores = scores.masked_fill(~visible, -torch.inf)
    weight = sums.detach()[..., -1:]  # the divisor is a constant for autograd
    no_far = weight <= 0
    largest = (far.detach() + weight.clamp(min=numbers.tiny**LEAST_WEIGHT).log()).masked_fill(no_far, numbers.min)
    log_divisor = torch.maximum(scores.detach().amax(-1, keepdim=True), largest)
    near = (scores - log_divisor).exp()
    # far weights that are all zero set no divisor; their factor must stay finite, or zero times it would be NaN
    bound = torch.where(no_far, MOST_GRADIENT * math.log(numbers.max), torch.inf)
    factor = torch.minimum(far - log_divisor, bound).exp()
    total = near.sum(-1, keepdim=True) + factor * sums[..., -1:]
    unseen = total <= 0  # adding it keeps 0 / 0 out of the forward and the backward pass
    return ((near @ v + factor * sums[..., :-1]) / (total + unseen)).masked_fill(unseen, 0)


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
    for name, x in (("q_features", q_features), ("k_features", k_features)):
        if x.dim() != 4 or x.shape[:3] != q.shape[:3] or x.shape[-1] != q_features.shape[-1]:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [B, N, H, K] for q of {list(q.shape)}")
    problem = check_problem(
        q, k, v, mixing, block_size=block_size, block_offsets=block_offsets, causal=causal, normalize=False,
        key_mask=key_mask, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    check_devices(problem)
    size = problem.layout.block_size or (problem.layout.block_offsets or (0, 0))[1]
    number = as_index(sinks)
    if number is None or not 0 <= number <= size:
        raise ValueError(f"sinks={sinks!r} must be an integer from 0 to the size of the first block, {size}")
    features = {"q_features": (q_features, key_mask), "k_features": (k_features, key_mask)}
    check_features(features, "rows of weights cannot be divided by their sums; give nonnegative ones")
    return problem


def _check_grid(problem: Problem, block_grid: Sequence[int] | None, causal: bool, sinks: int) -> tuple[int, ...] | None:
    """Check the block grid of attention to all tokens, and return it; None for a sequence of blocks.

    Args:
        problem: checked arguments of the call.
        block_grid: number of blocks along each axis; None for a sequence of blocks.
        causal: whether the attention is causal.
        sinks: number of sinks.

    Raises:
        ValueError: if a grid is given for causal attention, or has a different number of blocks.
    """
    if block_grid is None:
        return None
    grid, number, offsets = tuple(block_grid), problem.layout.blocks, problem.layout.block_offsets
    if causal:
        raise ValueError(f"block_grid={grid} is for attention to all tokens; pass causal=False or leave it out")
    if any(is_dynamic(length) for length in (*grid, number)):
        return grid
    lead = " and one of sinks" if sinks else ""
    if min(grid, default=0) < 1 or prod(grid) + (sinks > 0) != number:
        raise ValueError(f"there are {number} blocks, which are not the {prod(grid)} of block_grid={grid}{lead}")
    if sinks and offsets is not None and offsets[1] > sinks:
        raise ValueError(
            f"the first block has {offsets[1]} tokens; with block_grid, it must hold only the {sinks} sinks"
        )
    return grid
