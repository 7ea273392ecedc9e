"""Linear attention: the baseline in which one key-value summary serves every query."""

from __future__ import annotations

from typing import Any

from mhla_kernels import attention_matrix, mhla_attention
from torch import Tensor

from lightning_mhla.attention.base import Attention, map_features


class LinearAttention(Attention, kind="linear"):
    """MHLA with a single block and a coefficient of 1, which is linear attention; arguments as for :class:`Attention`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """See :meth:`Attention.attend`."""
        q, k, options = self._operands(q, k)
        return mhla_attention(q, k, v, key_mask=key_mask, **options)

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        """See :meth:`Attention.weights`."""
        q, k, options = self._operands(q, k)
        return attention_matrix(q, k, key_mask=key_mask, **options)

    def _operands(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        q, k, feature_map = map_features(q, k, self.config.feature_map)
        options = {
            "mixing": q.new_ones(1, 1),
            "block_size": q.shape[1],
            "causal": self.causal,
            "normalize": self.config.normalize,
            "feature_map": feature_map,
        }
        return q, k, options
