"""MHLA: every query block mixes the key-value summaries of all blocks with learned coefficients."""

from __future__ import annotations

from typing import Any

import torch
from mhla_kernels.mixing import MixingLike
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.config import AttentionConfig
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.mixing import DenseCoefficients, ExponentialCoefficients, MixingCoefficients
from lightning_mhla.attention.summaries import SummaryAttention


class MHLA(SummaryAttention, kind="mhla"):
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
            self.mixing = DenseCoefficients(layout, **options)

    @override
    def fit(self, layout: BlockLayout, device: torch.device | None = None) -> None:
        """Use coefficients for the layout's blocks, from :meth:`MixingCoefficients.forward`."""
        super().fit(layout, device)
        self.blocks = layout.operator_blocks

    @property
    @override
    def max_tokens(self) -> int | None:
        """Return the tokens that dense coefficients cover."""
        if not self.causal:
            return self.layout.num_tokens
        return (
            self.layout.num_blocks * int(self.blocks["block_size"])
            if isinstance(self.mixing, DenseCoefficients)
            else None
        )

    @override
    def extend(self, tokens: int) -> None:
        """Continue dense coefficients by :func:`mhla_kernels.extend_mixing`."""
        super().extend(tokens)
        self.mixing.extend(self.layout.num_blocks)

    @override
    def coefficients(self, q: Tensor) -> tuple[MixingLike, dict[str, Any]]:
        """Return the learned coefficients."""
        return self.mixing(None if self.causal else self.layout.block_grid), self.blocks

    def summaries_mixed(self, tokens: int) -> float:
        """Summaries that are added up for others, in all."""
        blocks = tokens * self.layout.num_blocks / self.layout.num_tokens
        if isinstance(self.mixing, ExponentialCoefficients):
            return 2 * self.mixing.amplitude.shape[-1] * blocks
        return blocks * (blocks - 1) / 2 if self.causal else blocks**2

    @override
    def operator_flops(self, tokens: int) -> float:
        """Count the operations of the chunked form."""
        size = self.layout.num_tokens / self.layout.num_blocks
        return self.summary_flops(tokens, size if self.causal else None, self.summaries_mixed(tokens))
