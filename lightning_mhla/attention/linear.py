"""Linear attention: a baseline in which all queries share one key-value summary."""

from __future__ import annotations

from typing import Any, ClassVar

from mhla_kernels import ExponentialMixing
from mhla_kernels.mixing import MixingLike
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.config import MIXING_OPTIONS
from lightning_mhla.attention.layout import Placement
from lightning_mhla.attention.order import GivenOrder
from lightning_mhla.attention.summaries import SummaryAttention

CHUNK = 64
"""Chunk size of causal linear attention in tokens. It affects speed, not results."""


class LinearAttention(SummaryAttention, kind="linear"):
    """Linear attention, in which all queries share one key-value summary: the sum of ``k v^T`` over the visible tokens.

    The layer computes multi-head linear attention (MHLA) with mixing coefficients of 1. The constructor takes the arguments of
    :class:`Attention`.
    """

    Order = GivenOrder
    unused: ClassVar[tuple[str, ...]] = MIXING_OPTIONS
    block_causal = True

    @override
    def coefficients(self, q: Tensor, placement: Placement | None = None) -> tuple[MixingLike, dict[str, Any]]:
        """Return mixing coefficients of 1, and a dict with the ``block_size`` to pass to the functions of ``mhla_kernels``.

        The coefficients of causal attention are an ``ExponentialMixing`` with a decay of 0, which fits any number of blocks.
        Otherwise, all tokens form one block, whose only coefficient is 1.

        Args:
            q: queries, ``[B, N, H, Dk]``.
            placement: ignored; the coefficients do not depend on the order of the tokens.
        """
        if self.causal:
            # One term of amplitude 1 and decay 0: every block has weight 1, for any number of blocks.
            ones = q.new_ones(1)
            blocks = self.layout.operator_blocks if self.causal == "block" else {"block_size": CHUNK}
            return ExponentialMixing(ones, ones - 1), blocks
        return q.new_ones(1, 1), {"block_size": q.shape[1]}

    @override
    def operator_flops(self, tokens: int) -> float:
        return self.summary_flops(tokens, CHUNK if self.causal is True else None, 0.0)
