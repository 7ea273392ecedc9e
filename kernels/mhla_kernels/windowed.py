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

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.attention import without_autocast
from mhla_kernels.blocks import BlockPartition, TokenLayout, at_most, divide_up, is_dynamic
from mhla_kernels.checks import as_index, check_block_size, check_devices, check_features, check_problem
from mhla_kernels.finite import finite_
from mhla_kernels.forms.chunked import make_mixer
from mhla_kernels.forms.parallel import PART
from mhla_kernels.mixing import DenseMixing, Mixing, MixingLike, as_mixing
from mhla_kernels.mixing.base import apply_matrix
from mhla_kernels.near_far import FarTokens, NearTokens, combine, read_mixed
from mhla_kernels.problem import Problem, nothing, repeat_heads
from mhla_kernels.torch_private import is_traced
from mhla_kernels.windowed_pairs import TokenPairs, attend_pairs, pairs_are_cheaper

GATHERED = 2**22
"""Numbers of keys that are gathered at once for the windows of attention to all tokens: 16 MiB in float32.

On a CPU, larger tensors get new memory in each call, whose first use costs more than copying.
"""


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
        mixing: nonnegative coefficients, as for :func:`mhla_kernels.mhla_attention`. With sinks and ``block_grid``, they are
            those of the blocks of the grid, without the block of sinks.
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
    if block_grid is not None and sinks and not causal:
        if block_size is not None:
            _check_blocks(divide_up(q.shape[1], check_block_size(block_size)), block_grid, True)
        elif block_offsets is not None:
            _check_blocks(len(block_offsets) - 1, block_grid, True)
        mixing = DenseMixing(F.pad(mixing.matrix(prod(block_grid)), (1, 0, 1, 0)))
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
        tokens, mixing = (q * scale, k, v, f, g, heads_last(far, q)), mixing.to(problem.accumulate)
        sinks = at_most(sinks, problem.layout.largest)
        if causal:
            out = _causal(tokens, real > 0, mixing, problem.layout.partition(q.device), sinks)
        else:
            out = _bidirectional(tokens, real > 0, mixing, problem.layout, grid, sinks)
        return (out if key_mask is None else out.masked_fill(~key_mask[..., None, None], 0)).to(problem.v.dtype)


class InBlocks(NamedTuple):
    """Tensors of windowed attention in M blocks of C slots, each of which holds a token or zeros.

    Attributes:
        q: queries, multiplied by the scale of the scores, ``[B, H, M, C, Dk]``.
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

    @classmethod
    def of(cls, tokens: Sequence[Tensor], real: Tensor, blocks: BlockPartition) -> InBlocks:
        """Arrange q, k, v, f, g and far, ``[B, N, H, ...]`` each, and the mask of tokens ``[B, N]`` in blocks."""
        visible = blocks.split(real[..., None, None].to(tokens[0].dtype))[:, 0, ..., 0] > 0
        q, k, v, f, g, far = map(blocks.split, tokens)
        return cls(q, k, v, f, g, far, visible)

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
        # in one product with a column of ones; features in slots without a token are zero
        return finite_(self.g.transpose(-1, -2) @ F.pad(self.v, (0, 1), value=1.0))


def _causal(tokens: Sequence[Tensor], real: Tensor, mixing: Mixing, blocks: BlockPartition, sinks: int) -> Tensor:
    """Compute the outputs of causal attention, ``[B, N, H, V]``, from the arguments of :meth:`InBlocks.of`."""
    x = InBlocks.of(tokens, real, blocks)
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
    return blocks.merge(window.attend(x, mixed))


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
            near.append(NearTokens(self.sink_k, self.sink_v, self.sinks_visible[:, None]))
        return combine(x.q, near, read_mixed(x.f, mixed, x.far))


def _bidirectional(
    tokens: Sequence[Tensor],
    real: Tensor,
    mixing: Mixing,
    layout: TokenLayout,
    grid: tuple[int, ...] | None,
    sinks: int,
) -> Tensor:
    """Compute the outputs of attention to all tokens, ``[B, N, H, V]``.

    On a CPU, as many batch rows at a time are computed as have at most :data:`PART` bytes of scores or of summaries.

    Args:
        tokens: queries multiplied by the scale of the scores, keys, values, features of queries and of keys, and the logarithm
            of the factor on far tokens, ``[B, N, H, ...]`` each.
        real: mask of tokens that may be attended to, ``[B, N]`` bool.
        mixing: mixing coefficients between all blocks.
        layout: partition of the tokens into blocks.
        grid: number of blocks along each axis; None for a sequence.
        sinks: number of sinks, which are in the first block.
    """
    q, _, v, f, *_ = tokens
    blocks = layout.partition(q.device)
    axes, lead = ((blocks.blocks,), 0) if grid is None else (grid, int(sinks > 0))
    matrix = mixing.matrix(blocks.blocks)
    if is_dynamic(blocks.blocks):  # blocks after the last token are empty, so their coefficients do not matter
        index = torch.arange(blocks.blocks, device=matrix.device).clamp(max=matrix.shape[-1] - 1)
        matrix = matrix[..., index[:, None], index]
    matrix = matrix[..., : blocks.blocks, : blocks.blocks]
    near = _are_near(axes, lead, q.device)
    run: Callable[..., Tensor]
    if pairs_are_cheaper(layout, axes, q.shape[-1], f.shape[-1], v.shape[-1]):
        run = partial(attend_pairs, pairs=TokenPairs.of(matrix, near, layout.token_blocks(q.device).block, sinks))
        numbers = layout.tokens**2
    else:
        run = partial(_in_blocks, matrix=matrix.masked_fill(near, 0), blocks=blocks, axes=axes, lead=lead, sinks=sinks)
        numbers = blocks.blocks * f.shape[-1] * (v.shape[-1] + 1)
    if len(q) == 1 or q.device.type != "cpu" or is_traced():
        return run(tokens, real)
    count = max(1, PART // max(1, q.shape[2] * numbers * q.element_size()))
    *parts, masks = (x.split(count) for x in (*tokens, real))
    return torch.cat([run(part, mask) for *part, mask in zip(*parts, masks, strict=True)])


def _in_blocks(
    tokens: Sequence[Tensor],
    real: Tensor,
    *,
    matrix: Tensor,
    blocks: BlockPartition,
    axes: tuple[int, ...],
    lead: int,
    sinks: int,
) -> Tensor:
    """Compute the outputs of attention to all tokens from summaries of blocks, ``[B, N, H, V]``.

    Args:
        tokens: tensors that :func:`_bidirectional` takes.
        real: mask of tokens that may be attended to, ``[B, N]`` bool.
        matrix: mixing coefficients between all blocks, ``[M, M]`` or ``[H, M, M]``; zero for near blocks.
        blocks: partition of the tokens into blocks.
        axes: number of blocks along each axis.
        lead: number of blocks before the grid, 0 or 1.
        sinks: number of sinks, which are in the first block.
    """
    x = InBlocks.of(tokens, real, blocks)
    sinks_visible = x.visible[:, 0, :sinks]
    x = x.without_sinks(torch.arange(blocks.blocks, device=real.device) == 0, sinks)
    block, near = _window(axes, lead, real.device)
    mixed = apply_matrix(matrix, x.sums.flatten(3)).view(x.sums.shape)

    def attend(first: int, last: int) -> Tensor:
        part = block[first:last]
        visible = (x.visible[:, part] & near[first:last, :, None]).flatten(2)
        groups = [NearTokens(_gather(x.k, part), _gather(x.v, part), visible[:, None, :, None])]
        if sinks:
            groups.append(NearTokens(x.k[:, :, :1, :sinks], x.v[:, :, :1, :sinks], sinks_visible[:, None, None, None]))
        far = read_mixed(*(y[:, :, first:last] for y in (x.f, mixed, x.far)))
        return combine(x.q[:, :, first:last], groups, far)

    if torch.is_grad_enabled() or is_traced():
        out = attend(0, blocks.blocks)
    else:
        # a few blocks at a time: their gathered keys and values fit into the cache, and memory is reused
        step = max(1, GATHERED // (x.k[:, :, 0].numel() * block.shape[1]))
        firsts = range(0, blocks.blocks, step)
        out = torch.cat([attend(first, at_most(first + step, blocks.blocks)) for first in firsts], 2)
    out = blocks.merge(out)
    if not sinks:
        return out
    q, k, v, *_ = tokens
    return torch.cat([_softmax(q[:, :sinks], k, v, real), out[:, sinks:]], 1)


def _gather(x: Tensor, block: Tensor) -> Tensor:
    """Return the slots ``[B, H, M, R C, D]`` that each block reads, for the numbers ``[M, R]`` of the blocks that it reads."""
    # complete blocks are copied: selecting single slots takes ten times as long on a CPU
    return x.index_select(2, block.flatten()).unflatten(2, block.shape).flatten(3, 4)


def _window(grid: Sequence[int], lead: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which blocks each block reads: itself and those next to it.

    Args:
        grid: number of blocks along each axis.
        lead: number of blocks before the grid, which read nothing: 0 or 1.
        device: device of the results.

    Returns:
        Numbers of blocks, int64, and a mask that is False for blocks that are not in the window; both ``[M, R]``, where R is
        the product of at most 3 blocks along each axis.
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
    return F.pad(block + lead, (0, 0, lead, 0)), F.pad(near, (0, 0, lead, 0))


def _are_near(grid: Sequence[int], lead: int, device: torch.device) -> Tensor:
    """Return which blocks are the same or next to each other, ``[M, M]`` bool, for ``lead`` blocks before a grid of blocks."""
    near = torch.ones(1, 1, dtype=torch.bool, device=device)
    for length in grid:
        index = torch.arange(length, device=device)
        along = (index[:, None] - index).abs() <= 1
        size = near.shape[0] * length
        near = (near[:, None, :, None] & along[:, None]).reshape(size, size)
    return F.pad(near, (lead, 0, lead, 0))


def _softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Compute softmax attention of S queries to all N tokens, ``[B, S, H, V]``.

    Args:
        q: queries, multiplied by the scale of the scores, ``[B, S, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, V]``.
        visible: mask of the tokens that may be attended to, ``[B, N]`` bool.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    no_far = FarTokens(q.new_zeros(*q.shape[:-1], v.shape[-1] + 1), q.new_zeros(*q.shape[:-1], 1))
    return combine(q, [NearTokens(k, v, visible[:, None, None])], no_far).transpose(1, 2)


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


def _check_blocks(number: int, block_grid: Sequence[int], has_sinks: bool) -> None:
    """Raise ValueError if ``number`` blocks are not those of a grid, and one of sinks if there are sinks."""
    grid = tuple(block_grid)
    if any(is_dynamic(length) for length in (*grid, number)):
        return
    if min(grid, default=0) < 1 or prod(grid) + has_sinks != number:
        lead = " and one of sinks" if has_sinks else ""
        raise ValueError(f"there are {number} blocks, which are not the {prod(grid)} of block_grid={grid}{lead}")


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
    _check_blocks(number, grid, sinks > 0)
    if sinks and offsets is not None and offsets[1] > sinks:
        raise ValueError(
            f"the first block has {offsets[1]} tokens; with block_grid, it must hold only the {sinks} sinks"
        )
    return grid
