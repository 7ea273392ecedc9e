"""MHLA: every query block mixes the key-value summaries of all blocks with learned coefficients."""

from __future__ import annotations

from typing import Any

from mhla_kernels import attention_matrix, mhla_attention
from torch import Tensor

from lightning_mhla.attention.base import Attention, AttentionConfig, map_features
from lightning_mhla.layout import BlockLayout
from lightning_mhla.mixing import DenseMixing, ExponentialCoefficients, MixingCoefficients


class MHLA(Attention, kind="mhla"):
    """Multi-head linear attention over blocks of tokens (arXiv 2601.07832); arguments as for :class:`Attention`.

    Works inside any model: alone it takes and gives tokens in raster order.

        layout = BlockLayout((16, 16), blocks=(4, 4))
        attention = MHLA(dim=384, heads=6, layout=layout)
        y = attention(torch.randn(2, 256, 384))
    """

    uses_blocks = True

    def __init__(
        self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig | None = None, **options: Any
    ) -> None:
        config = config or AttentionConfig()
        super().__init__(dim, heads, layout, config, **options)
        wanted = config.block_grid and tuple(config.block_grid)
        if wanted not in (None, layout.block_grid) or config.block_size not in (None, layout.block_size):
            raise ValueError(
                f"the configuration asks for blocks {config.block_grid or config.block_size}, not those of {layout}"
            )
        self.blocks = layout.operator_blocks
        if self.causal and "block_size" not in self.blocks:
            raise ValueError(
                f"causal attention needs equal blocks, the last one short at most; {layout} has uneven ones"
            )
        options = {
            "heads": heads if config.mixing_per_head else None,
            "init": config.mixing_init,
            "causal": self.causal,
            "trainable": config.mixing_trainable,
        }
        self.mixing: MixingCoefficients
        if config.mixing == "exponential":
            self.mixing = ExponentialCoefficients(layout, config.mixing_terms, **options)
        else:
            self.mixing = DenseMixing(layout, **options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """See :meth:`Attention.attend`."""
        q, k, options = self._operands(q, k)
        return mhla_attention(q, k, v, self.mixing(), key_mask=key_mask, **options)

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        """See :meth:`Attention.weights`."""
        q, k, options = self._operands(q, k)
        return attention_matrix(q, k, self.mixing(), key_mask=key_mask, **options)

    def _operands(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        q, k, feature_map = map_features(q, k, self.config.feature_map)
        options = {"causal": self.causal, "normalize": self.config.normalize, "feature_map": feature_map}
        return q, k, options | self.blocks
