"""Queries, keys, values and features of windowed attention, arranged in blocks of tokens.

Shape letters: B batch, N tokens, H heads, M blocks, C slots of a block, K width of a key's features, V width of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.blocks import BlockPartition
from mhla_kernels.finite import finite_


class InBlocks(NamedTuple):
    """Tensors of windowed attention, arranged in M blocks of C slots. A slot holds one token or zeros.

    Attributes:
        q: queries, multiplied by the scale of the scores, ``[B, H, M, C, Dk]``.
        k: keys, ``[B, H, M, C, Dk]``.
        v: values, ``[B, H, M, C, V]``.
        f: features of the queries, ``[B, H, M, C, K]``.
        g: features of the keys, ``[B, H, M, C, K]``.
        far: logarithm of the factor by which each query scales the attention weights of tokens outside its window,
            ``[B, H, M, C, 1]``.
        visible: ``[B, M, C]`` bool, True for slots with a token that may be attended to.
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
        """Arrange the tensors of all tokens in blocks.

        Args:
            tokens: the tensors q, k, v, f, g and far of all tokens, ``[B, N, H, ...]`` each.
            real: mask of tokens that may be attended to, ``[B, N]`` bool.
            blocks: assignment of the tokens to blocks.
        """
        visible = blocks.split(real[..., None, None].to(tokens[0].dtype))[:, 0, ..., 0] > 0
        q, k, v, f, g, far = map(blocks.split, tokens)
        return cls(q, k, v, f, g, far, visible)

    def without_sinks(self, is_first: Tensor, sinks: int) -> InBlocks:
        """Return the tensors with the sinks masked and their key features set to zero, because queries read sinks separately.

        Args:
            is_first: ``[M]`` bool, True for blocks that begin a sequence.
            sinks: number of sinks, the first tokens of each sequence.
        """
        if not sinks:
            return self
        is_sink = is_first[:, None] & (torch.arange(self.q.shape[-2], device=self.q.device) < sinks)
        return self._replace(g=self.g.masked_fill(is_sink[..., None], 0), visible=self.visible & ~is_sink)

    @property
    def sums(self) -> Tensor:
        """Block summaries, ``[B, H, M, K, V + 1]``: for each feature, V weighted sums of values and a sum of weights."""
        # in one product with a column of ones; features in slots without a token are zero
        return finite_(self.g.transpose(-1, -2) @ F.pad(self.v, (0, 1), value=1.0))
