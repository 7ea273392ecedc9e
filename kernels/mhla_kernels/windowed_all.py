"""Windowed attention without causality, with softmax weights for near tokens and MHLA weights for far tokens.

Near tokens are in the query's block or in a neighbor of it, along an axis of the block grid or diagonally. See
:mod:`mhla_kernels.windowed`.

Shape letters: B batch, N tokens, H heads, M blocks, C slots of a block, R blocks of a window, K width of a key's features, V
width of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.blocks import BlockPartition, TokenLayout, at_most, is_dynamic
from mhla_kernels.forms.parts import in_parts
from mhla_kernels.forms.weights import expand_pairs
from mhla_kernels.mixing import Mixing
from mhla_kernels.mixing.base import apply_matrix
from mhla_kernels.near_far import FarTokens, NearTokens, combine, read_mixed
from mhla_kernels.torch_private import is_traced
from mhla_kernels.windowed_blocks import InBlocks
from mhla_kernels.windowed_pairs import Forms, attend_near, cheapest_forms, near_pairs, weigh_pairs

GATHERED = 2**22
"""Largest number of tensor elements for the keys that are gathered at once: 16 MiB in float32.

On a CPU, a larger tensor gets new memory in each call, and the first use of new memory costs more than copying.
"""


def attend_all(
    tokens: Sequence[Tensor],
    real: Tensor,
    mixing: Mixing,
    layout: TokenLayout,
    grid: tuple[int, ...] | None,
    sinks: int,
) -> Tensor:
    """Compute the outputs of windowed attention without causality, ``[B, N, H, V]``.

    Args:
        tokens: queries multiplied by the scale of the scores, keys, values, features of queries and of keys, and the logarithm
            of the factor on far tokens, ``[B, N, H, ...]`` each.
        real: mask of tokens that may be attended to, ``[B, N]`` bool.
        mixing: mixing coefficients between all blocks.
        layout: partition of the tokens into blocks.
        grid: number of blocks along each axis; None for a sequence.
        sinks: number of sinks (first tokens, which every query reads), all in the first block.
    """
    q, _, v, f, *_ = tokens
    blocks = layout.partition(q.device)
    axes, lead = ((blocks.blocks,), 0) if grid is None else (grid, int(sinks > 0))
    matrix = mixing.matrix(blocks.blocks)
    if is_dynamic(blocks.blocks):  # blocks after the last token are empty, so their coefficients do not matter
        index = torch.arange(blocks.blocks, device=matrix.device).clamp(max=matrix.shape[-1] - 1)
        matrix = matrix[..., index[:, None], index]
    matrix = matrix[..., : blocks.blocks, : blocks.blocks]
    near_blocks = _are_near(axes, lead, q.device)
    window = Window(matrix.masked_fill(near_blocks, 0), blocks, axes, lead, sinks)
    forms, where = Forms(near=False, far=False), layout.token_blocks(q.device)
    if q.device.type == "cpu":  # costs were measured there, and scores of all rows are not held at once
        forms = cheapest_forms(layout, axes, q.shape[-1], f.shape[-1], v.shape[-1])
    near = near_pairs(near_blocks, where.block, sinks) if forms.near else None
    pairs = expand_pairs(matrix, where, where) if forms.far else None

    def run(*part: Tensor) -> Tensor:
        *tokens, real = part
        if near is None:
            return window.attend(tokens, real)
        far = window.far(tokens, real) if pairs is None else weigh_pairs(tokens, pairs, near)
        return attend_near(tokens, real, near, far)

    # Values held for one batch row and head: scores of all pairs, or summaries of all blocks.
    numbers = layout.tokens**2 if forms.near else blocks.blocks * f.shape[-1] * (v.shape[-1] + 1)
    return in_parts(run, (*tokens, real), q.shape[2] * numbers)


class Window(NamedTuple):
    """Mixing coefficients and block grid of non-causal windowed attention, with methods that compute it block by block.

    Attributes:
        matrix: mixing coefficients between all blocks, ``[M, M]`` or ``[H, M, M]``; zero for near blocks, whose tokens
            softmax attention reads.
        blocks: partition of the tokens into blocks.
        axes: number of blocks along each axis of the grid.
        lead: 1 if a block of sinks precedes the grid, otherwise 0.
        sinks: number of sinks (first tokens, which every query reads), all in the first block.
    """

    matrix: Tensor
    blocks: BlockPartition
    axes: tuple[int, ...]
    lead: int
    sinks: int

    def far(self, tokens: Sequence[Tensor], real: Tensor) -> FarTokens:
        """Compute the sums over the far tokens of each query from summaries of blocks.

        The result holds the sums, ``[B, H, N, V + 1]``, and the logarithm of a factor on them, ``[B, H, N, 1]``. The sums are V
        weighted sums of values and, in the last column, the sum of the weights.

        Args:
            tokens: tensors of all tokens, as :func:`attend_all` takes them.
            real: mask of tokens that may be attended to, ``[B, N]`` bool.
        """
        x = self._in_blocks(tokens, real)
        sums, log_factor = read_mixed(x.f, self._mixed(x), x.far)
        sums, log_factor = (self.blocks.merge(part).transpose(1, 2) for part in (sums, log_factor))
        # for a sink, no token is far
        return FarTokens(F.pad(sums[:, :, self.sinks :], (0, 0, self.sinks, 0)), log_factor)

    def attend(self, tokens: Sequence[Tensor], real: Tensor) -> Tensor:
        """Compute the outputs of all queries, ``[B, N, H, V]``.

        Args:
            tokens: tensors of all tokens, as :func:`attend_all` takes them.
            real: mask of tokens that may be attended to, ``[B, N]`` bool.
        """
        number, sinks = self.blocks.blocks, self.sinks
        x = self._in_blocks(tokens, real)
        sinks_visible = real[:, :sinks]  # sinks are the first tokens
        mixed = self._mixed(x)
        block, near = _window(self.axes, self.lead, real.device)

        def attend(first: int, last: int) -> Tensor:
            # [m, R] indices of the blocks that each of these m blocks reads
            part = block[first:last]
            visible = (x.visible[:, part] & near[first:last, :, None]).flatten(2)
            groups = [NearTokens(_gather(x.k, part), _gather(x.v, part), visible[:, None, :, None])]
            if sinks:
                # The sinks lie in the first block; the axis of length 1 serves all blocks.
                sink_tokens = x.k[:, :, :1, :sinks], x.v[:, :, :1, :sinks]
                groups.append(NearTokens(*sink_tokens, sinks_visible[:, None, None, None]))
            far = read_mixed(*(y[:, :, first:last] for y in (x.f, mixed, x.far)))
            return combine(x.q[:, :, first:last], groups, far)

        if torch.is_grad_enabled() or is_traced():
            out = attend(0, number)
        else:
            # a few blocks at a time: their gathered keys and values fit into the cache, and memory is reused
            step = max(1, GATHERED // max(1, x.k[:, :, 0].numel() * block.shape[1]))
            out = torch.cat([attend(first, at_most(first + step, number)) for first in range(0, number, step)], 2)
        out = self.blocks.merge(out)
        if not sinks:
            return out
        q, k, v, *_ = tokens
        return torch.cat([_softmax(q[:, :sinks], k, v, real), out[:, sinks:]], 1)

    def _in_blocks(self, tokens: Sequence[Tensor], real: Tensor) -> InBlocks:
        """Arrange the tensors of all tokens in blocks, with the sinks hidden."""
        first = torch.arange(self.blocks.blocks, device=real.device) == 0
        return InBlocks.of(tokens, real, self.blocks).without_sinks(first, self.sinks)

    def _mixed(self, x: InBlocks) -> Tensor:
        sums = x.sums
        return apply_matrix(self.matrix, sums.flatten(3)).view(sums.shape)


def _gather(x: Tensor, block: Tensor) -> Tensor:
    """Collect for each of M blocks the slots of the R blocks that it reads.

    Args:
        x: tensor in blocks of C slots, ``[B, H, blocks, C, D]``.
        block: indices of the blocks that each block reads, ``[M, R]`` int64.

    Returns:
        Collected slots, ``[B, H, M, R * C, D]``.
    """
    # complete blocks are copied: selecting single slots takes ten times as long on a CPU
    return x.index_select(2, block.flatten()).unflatten(2, block.shape).flatten(3, 4)


def _window(grid: Sequence[int], lead: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of the blocks that each block reads by softmax attention: the block itself and its neighbors.

    Args:
        grid: number of blocks along each axis.
        lead: number of blocks before the grid, 0 or 1; such a block reads no blocks.
        device: device of the results.

    Returns:
        Indices of the blocks, int64, and a bool mask; both ``[M, R]``. R is the product of the widths of the window along the
        axes, at most 3 blocks each. The mask is False for indices that only fill up the row of a block at an edge of the grid.
    """
    block = torch.zeros(1, 1, dtype=torch.int64, device=device)
    near = torch.ones_like(block, dtype=torch.bool)
    for length in grid:
        index = torch.arange(length, device=device)
        if is_dynamic(length):  # there may be fewer than three blocks
            width, first = 3, index - 1
        else:
            # At the edge, the window is moved inward, so that all blocks read equally many; the mask hides what is too far.
            width = min(3, length)
            first = (index - 1).clamp(min=0, max=length - width)
        along = first[:, None] + torch.arange(width, device=device)
        inside = ((along - index[:, None]).abs() <= 1) & (along >= 0) & (along < length)
        along = along.clamp(min=0, max=length - 1)
        size = (block.shape[0] * length, block.shape[1] * width)
        # Row-major indices: every block so far times every position along this axis, and the same for the windows.
        block = (block[:, None, :, None] * length + along[:, None]).reshape(size)
        near = (near[:, None, :, None] & inside[:, None]).reshape(size)
    return F.pad(block + lead, (0, 0, lead, 0)), F.pad(near, (0, 0, lead, 0))


def _are_near(grid: Sequence[int], lead: int, device: torch.device) -> Tensor:
    """Return a mask that is True for pairs of a block with itself or with a neighboring block, ``[M, M]`` bool.

    Args:
        grid: number of blocks along each axis.
        lead: number of blocks before the grid, 0 or 1; the mask is False for such a block.
        device: device of the mask.
    """
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
    heads = q.transpose(1, 2)[..., :1]
    no_far = FarTokens(torch.zeros_like(heads).expand(*heads.shape[:3], v.shape[-1] + 1), torch.zeros_like(heads))
    return attend_near([q, k, v], visible, visible.new_ones(1, 1), no_far)
