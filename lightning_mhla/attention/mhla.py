"""MHLA: every query block mixes the key-value summaries of all blocks with learned coefficients."""

from __future__ import annotations

from typing import Any

import torch
from mhla_kernels.mixing import MixingLike
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.config import AttentionConfig
from lightning_mhla.attention.layout import BlockLayout, Placement
from lightning_mhla.attention.mixing import DenseCoefficients, ExponentialCoefficients, MixingCoefficients
from lightning_mhla.attention.summaries import SummaryAttention


class MHLA(SummaryAttention, kind="mhla"):
    """Multi-head linear attention over blocks of tokens (arXiv 2601.07832): a self-attention layer for any model.

    Tokens enter and leave in raster order, unless ``block_ordered``.

        layout = BlockLayout((16, 16), blocks=(4, 4))
        attention = MHLA(dim=384, heads=6, layout=layout)
        y = attention(torch.randn(2, 256, 384))

    Args:
        dim: width of the tokens.
        heads: number of query heads.
        layout: token grid and its blocks: ``BlockLayout((height, width), blocks=(rows, columns))`` for an image,
            ``BlockLayout((tokens,), block_size=64)`` for a sequence.
        config: feature map, mixing and what surrounds the operator, of kind ``"mhla"``; None for the defaults. Its
            ``block_grid`` or ``block_size``, where given, must be those of ``layout``.
        key_value_heads: number of key and value heads, a divisor of ``heads``; None for as many.
        key_width: width of a key; None for ``dim // heads``.
        value_width: width of a value; None for ``dim // heads``.
        bias: whether the projections have a bias.
        causal: whether token t attends to tokens ``j <= t`` only; 1-D layouts.
        block_ordered: whether tokens enter and leave in the layout's block order.
        projections: whether the layer has projections of its own; without, :meth:`forward` takes those of another module.

    Raises:
        ValueError: for a configuration of a different kind or different blocks, widths that do not fit, a causal layer
            over a grid with several axes or with uneven blocks.
    """

    uses_blocks = True

    def __init__(
        self,
        dim: int,
        heads: int,
        layout: BlockLayout,
        config: AttentionConfig | None = None,
        *,
        key_value_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        bias: bool = True,
        causal: bool = False,
        block_ordered: bool = False,
        projections: bool = True,
    ) -> None:
        config = config or AttentionConfig(kind=self.kind or "mhla")
        super().__init__(
            dim,
            heads,
            layout,
            config,
            key_value_heads=key_value_heads,
            key_width=key_width,
            value_width=value_width,
            bias=bias,
            causal=causal,
            block_ordered=block_ordered,
            projections=projections,
        )
        wanted = config.block_grid and tuple(config.block_grid)
        if wanted not in (None, layout.block_grid) or config.block_size not in (None, layout.block_size):
            raise ValueError(
                f"the configuration asks for blocks {config.block_grid or config.block_size}, not those of {layout}"
            )
        if self.causal and "block_size" not in self.blocks:
            raise ValueError(
                f"causal attention needs equal blocks, the last one short at most; {layout} has uneven ones"
            )
        options: dict[str, Any] = {
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
    def coefficients(self, q: Tensor, placement: Placement | None = None) -> tuple[MixingLike, dict[str, Any]]:
        """Return the learned coefficients."""
        if placement is not None:
            return self.mixing(placement.layout.block_grid), placement.blocks
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
