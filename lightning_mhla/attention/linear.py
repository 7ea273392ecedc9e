"""Linear attention: the baseline in which one key-value summary serves every query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mhla_kernels import ExponentialMixing, MHLAState, attention_matrix, mhla_attention
from torch import Tensor

from lightning_mhla.attention.base import Attention, Rotary, map_features, summary_flops
from lightning_mhla.attention.mhla import continue_linear

CHUNK = 64
"""Tokens that causal linear attention works on at once; it changes the speed and not the result."""


class LinearAttention(Attention, kind="linear"):
    """Linear attention, as MHLA whose coefficients are all 1; arguments as for :class:`Attention`."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        rotary: Rotary | None = None,
        cu_seqlens: Sequence[int] | None = None,
    ) -> Tensor:
        """See :meth:`Attention.attend`."""
        q, k, options = self._operands(q, k, rotary)
        return mhla_attention(q, k, v, causal=self.causal, key_mask=key_mask, cu_seqlens=cu_seqlens, **options)

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rotary: Rotary | None = None) -> Tensor:
        """See :meth:`Attention.weights`."""
        q, k, options = self._operands(q, k, rotary)
        return attention_matrix(q, k, causal=self.causal, key_mask=key_mask, **options)

    def continue_from(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: MHLAState | None,
        counts: Sequence[int],
        rotary: Rotary | None = None,
    ) -> tuple[Tensor, MHLAState]:
        """See :meth:`Attention.continue_from`."""
        q, k, options = self._operands(q, k, rotary)
        return continue_linear(q, k, v, options.pop("mixing"), state, counts, options)

    def operator_flops(self, tokens: int) -> float:
        """See :meth:`Attention.operator_flops`."""
        return summary_flops(self, tokens, CHUNK if self.causal else None, 0.0)

    def _operands(self, q: Tensor, k: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
        q, k, feature_map = map_features(q, k, self.config.feature_map, rotary)
        options: dict[str, Any] = {"normalize": self.config.normalize, "feature_map": feature_map}
        if self.causal:  # blocks of equal weight, so that the cost is linear in the tokens
            ones = q.new_ones(1)
            return q, k, {"mixing": ExponentialMixing(ones, ones - 1), "block_size": CHUNK, **options}
        return q, k, {"mixing": q.new_ones(1, 1), "block_size": q.shape[1], **options}
