"""Chunked form of bidirectional attention on a CPU, computed in parts, so that the summaries of a part fit into the cache.

A part is one or more batch rows with all heads, or some of the heads of one batch row. Its tokens are copied in pieces, which
are runs of blocks of equal size or parts of a large block, so that blocks of different sizes need no padding. As in
:mod:`mhla_kernels.forms.parallel_parts`, large intermediate results are written to workspaces that all parts share, and the
feature map is applied to one piece at a time. There is no backward pass: one that computes the summaries again would be no
faster than that of :mod:`mhla_kernels.forms.chunked`, which saves them.

With normalization, values get a last feature of 1. The last column of a summary is then the sum of the keys, and the last
feature of the product of a query and a mixture is the sum of the query's weights.

Shape letters: B batch, N tokens, H heads, M blocks, n blocks of a piece, C tokens of a block, K key width, V value width, W
value width with the last feature (V without normalization).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.forms.parts import Workspace, divide_attention
from mhla_kernels.problem import Weighting

PART = 8 * 2**20
"""Bytes of summaries and mixtures that are held at once, unless one head of one batch row needs more."""
PIECE = 2**18
"""Largest number of features of queries, keys or values that are copied at once."""
LEAST = 64
"""Number of tokens for which a piece has room, unless a single head is too wide: products of fewer tokens are slow."""


class TokenPiece(NamedTuple):
    """Run of consecutive blocks of equal size, or a run of tokens of one large block.

    Attributes:
        start: index of the first token.
        size: number of tokens of each block; if the piece is a part of a block, number of tokens of the piece.
        first: index of the first block.
        last: index after the last block.
        continues: whether the piece is a part of a block, and not its first one.
    """

    start: int
    size: int
    first: int
    last: int
    continues: bool = False

    def of(self, x: Tensor) -> Tensor:
        """Return a view of the tokens of this piece, ``[n, heads, rows, C, D]``, in ``[heads, rows, tokens, D]``."""
        count = self.last - self.first
        tokens = x[:, :, self.start : self.start + count * self.size]
        return tokens.unflatten(2, (count, self.size)).permute(2, 0, 1, 3, 4)


@lru_cache(maxsize=256)
def pieces(tokens: int, block_size: int, block_offsets: tuple[int, ...] | None, most: int) -> tuple[TokenPiece, ...]:
    """Divide the tokens of a layout into pieces.

    Args:
        tokens: number of tokens.
        block_size: tokens in a block; the last block may be shorter. Ignored if there are offsets.
        block_offsets: index of the first token of each uneven block, followed by the number of tokens; None for blocks of
            equal size.
        most: largest number of tokens in a piece.
    """
    bounds = [*range(0, tokens, block_size), tokens] if block_offsets is None else block_offsets
    result, block = list[TokenPiece](), 0
    for size, run in groupby(end - start for start, end in pairwise(bounds)):
        last = block + len(list(run))
        step = max(1, most // max(1, size))
        for first in range(block, last, step):
            if 0 < size <= most:
                result.append(TokenPiece(bounds[first], size, first, min(first + step, last)))
            for start in range(0, size if size > most else 0, most):
                part = min(most, size - start)
                result.append(TokenPiece(bounds[first] + start, part, first, first + 1, continues=start > 0))
        block = last
    return tuple(result)


class _Call:
    """Workspaces and sizes of one attention call.

    Args:
        q: queries, ``[B, N, H, K]``.
        v: values, ``[B, N, H, V]``.
        layout: partition of the tokens into blocks.
        normalize: whether values get a last feature of 1.
    """

    def __init__(self, q: Tensor, v: Tensor, layout: TokenLayout, normalize: bool) -> None:
        self.space = Workspace(q)
        self.width, self.wide = q.shape[3], v.shape[3] + normalize
        self.blocks = layout.blocks
        head_bytes = 2 * self.blocks * self.width * self.wide * q.element_size()
        widest = max(self.width, self.wide)
        most_heads = min(PART // max(1, head_bytes), PIECE // (LEAST * widest))
        self.parts = divide_attention(len(q), q.shape[2], most_heads)
        heads, rows, *_ = self.parts[0].of(q).shape
        most = max(1, PIECE // (heads * rows * widest))
        self.pieces = pieces(layout.tokens, layout.block_size, layout.block_offsets, most)

    def summaries(self, name: str, like: Tensor) -> Tensor:
        """Return memory for summaries or mixtures of all blocks, ``[M, heads, rows, K, W]``.

        Args:
            name: name of the memory.
            like: tensor of the part, ``[heads, rows, ...]``.
        """
        return self.space.take(name, (self.blocks, *like.shape[:2], self.width, self.wide))

    def values(self, piece: TokenPiece, v: Tensor) -> Tensor:
        """Copy the values of a piece of ``v``, ``[heads, rows, tokens, V]``; with normalization, append a feature of 1."""
        view = piece.of(v)
        values = self.space.take("values", (*view.shape[:-1], self.wide))
        values[..., : view.shape[-1]].copy_(view)
        values[..., view.shape[-1] :].fill_(1)
        return values

    def product(self, one: Tensor, two: Tensor) -> Tensor:
        """Compute products of matrices ``[n, heads, rows, ., .]``, in memory that the next call overwrites."""
        result = self.space.take("product", (*one.shape[:-1], two.shape[-1]))
        torch.bmm(_flat(one), _flat(two), out=_flat(result))
        return result


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 2)


def _collect(target: Tensor, piece: TokenPiece, left: Tensor, right: Tensor) -> None:
    """Compute ``left^T right`` for each block of a piece, and write it to the blocks' matrices in ``target``.

    Args:
        target: matrices of all blocks, ``[M, heads, rows, K, W]``.
        piece: the piece. If it is not the first of its block, the product is added.
        left: tokens of the piece, ``[n, heads, rows, C, K]``.
        right: tokens of the piece, ``[n, heads, rows, C, W]``.
    """
    matrices = _flat(target[piece.first : piece.last])
    if piece.continues:
        torch.baddbmm(matrices, _flat(left).mT, _flat(right), out=matrices)
    else:
        torch.bmm(_flat(left).mT, _flat(right), out=matrices)


def _mix(matrix: Tensor, summaries: Tensor, out: Tensor) -> Tensor:
    """Mix summaries with the coefficients of a part, and return the mixtures.

    Args:
        matrix: ``[M, M]``, or ``[heads, M, M]``.
        summaries: ``[M, heads, rows, K, W]``.
        out: memory of the mixtures, ``[M, heads, rows, K, W]``.
    """
    if matrix.dim() == 2:
        torch.mm(matrix, summaries.flatten(1), out=out.flatten(1))
    else:
        for head, coefficients in enumerate(matrix):
            torch.mm(coefficients, summaries[:, head].flatten(1), out=out[:, head].flatten(1))
    return out


def chunked_in_parts(
    q_BNHK: Tensor,
    k_BNHK: Tensor,
    v_BNHV: Tensor,
    matrix: Tensor,
    layout: TokenLayout,
    weighting: Weighting,
    relu: bool,
) -> Tensor:
    """Compute bidirectional attention for a few batch rows or heads at a time, without support for autograd.

    Args:
        q_BNHK: queries, ``[B, N, H, K]``.
        k_BNHK: keys, ``[B, N, H, K]``.
        v_BNHV: values, ``[B, N, H, V]``.
        matrix: mixing coefficients, ``[M, M]`` or ``[H, M, M]``.
        layout: partition of the tokens into blocks, without packed sequences.
        weighting: normalization of the attention weights.
        relu: whether the feature map ``relu(x) + 1e-6`` is still to be applied to queries and keys.

    Returns:
        Outputs, ``[B, N, H, V]``.
    """
    call = _Call(q_BNHK, v_BNHV, layout, weighting.normalize)
    out_BNHV = q_BNHK.new_empty(*q_BNHK.shape[:3], v_BNHV.shape[3])
    for part in call.parts:
        q, k, v, out = (part.of(x) for x in (q_BNHK, k_BNHK, v_BNHV, out_BNHV))
        summaries = call.summaries("summaries", k)
        for piece in call.pieces:
            keys = call.space.features("features", piece.of(k), relu)
            _collect(summaries, piece, keys, call.values(piece, v))
        mixed = _mix(part.of_heads(matrix), summaries, call.summaries("mixtures", q))
        for piece in call.pieces:
            queries = call.space.features("features", piece.of(q), relu)
            outs = call.product(queries, mixed[piece.first : piece.last])
            if weighting.scale is not None:
                torch.mul(outs, weighting.scale, out=piece.of(out))
            else:
                torch.div(outs[..., :-1], outs[..., -1:].add_(weighting.eps), out=piece.of(out))
    return out_BNHV
