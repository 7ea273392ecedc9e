"""Linear attention: the baseline in which one key-value summary serves every query."""

from __future__ import annotations

from typing import Any, ClassVar

from mhla_kernels import ExponentialMixing
from mhla_kernels.mixing import MixingLike
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.config import MIXING_OPTIONS
from lightning_mhla.attention.layout import Placement
from lightning_mhla.attention.summaries import SummaryAttention

CHUNK = 64
"""Tokens that causal linear attention works on at once; it changes the speed and not the result."""


class LinearAttention(SummaryAttention, kind="linear"):
    """Linear attention, as MHLA whose coefficients are all 1; arguments as for :class:`Attention`."""

    unused: ClassVar[tuple[str, ...]] = MIXING_OPTIONS

    @override
    def coefficients(self, q: Tensor, placement: Placement | None = None) -> tuple[MixingLike, dict[str, Any]]:
        """Return coefficients of 1; causal attention uses blocks of equal weight, for a cost linear in the tokens."""
        if self.causal:
            ones = q.new_ones(1)
            return ExponentialMixing(ones, ones - 1), {"block_size": CHUNK}
        return q.new_ones(1, 1), {"block_size": q.shape[1]}

    @override
    def operator_flops(self, tokens: int) -> float:
        return self.summary_flops(tokens, CHUNK if self.causal else None, 0.0)
