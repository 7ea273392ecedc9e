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
    """Multi-head linear attention over blocks of tokens (arXiv 2601.07832), as a self-attention layer for any model.

    Tokens enter and leave in raster order, unless ``block_ordered``.

        layout = BlockLayout((16, 16), blocks=(4, 4))
        attention = MHLA(dim=384, heads=6, layout=layout)
        y = attention(torch.randn(2, 256, 384))

    Args:
        dim: width of the tokens.
        heads: number of query heads.
        layout: token grid and its blocks: ``BlockLayout((height, width), blocks=(rows, columns))`` for an image,
            ``BlockLayout((tokens,), block_size=64)`` for a sequence.
        config: configuration of kind ``"mhla"``: feature map, mixing, and the modules around the operator; None for the
            defaults. If it sets ``block_grid`` or ``block_size``, they must be those of ``layout``.
        key_value_heads: number of key and value heads, a divisor of ``heads``; None for ``heads``.
        key_width: width of a key; None for ``dim // heads``.
        value_width: width of a value; None for ``dim // heads``.
        bias: whether the projections have a bias.
        causal: whether token t attends to tokens ``j <= t`` only; needs a 1-D layout.
        block_ordered: whether tokens enter and leave in the layout's block order.
        projections: whether the layer has its own projections. If not, :meth:`forward` takes those of a different module.

    Raises:
        ValueError: if the configuration has a different kind or different blocks, widths do not fit, or a causal layer has
            a grid with several axes or uneven blocks.
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
        requested_grid = config.block_grid and tuple(config.block_grid)
        if requested_grid not in (None, layout.block_grid) or config.block_size not in (None, layout.block_size):
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
        """Adapt the layer to a different token layout. The coefficients of a grid are resized in each forward pass."""
        super().fit(layout, device)
        self.blocks = layout.operator_blocks

    @property
    @override
    def max_tokens(self) -> int | None:
        """Number of tokens of the longest supported sequence; None for causal exponential coefficients."""
        if not self.causal:
            return self.layout.num_tokens
        return (
            self.layout.num_blocks * int(self.blocks["block_size"])
            if isinstance(self.mixing, DenseCoefficients)
            else None
        )

    @override
    def extend(self, tokens: int) -> None:
        """Extend a causal layer to ``tokens`` tokens. :func:`mhla_kernels.extend_mixing` extends dense coefficients."""
        super().extend(tokens)
        self.mixing.extend(self.layout.num_blocks)

    @override
    def coefficients(self, q: Tensor, placement: Placement | None = None) -> tuple[MixingLike, dict[str, Any]]:
        """Return the learned coefficients, and the operator's keyword arguments that describe the blocks."""
        if placement is not None:
            return self.mixing(placement.layout.block_grid), placement.blocks
        return self.mixing(None if self.causal else self.layout.block_grid), self.blocks

    def summaries_mixed(self, tokens: int) -> float:
        """Return the number of weighted block summaries that mixing adds up, over all blocks of a sequence.

        Args:
            tokens: number of tokens in the sequence.
        """
        blocks = tokens * self.layout.num_blocks / self.layout.num_tokens
        if isinstance(self.mixing, ExponentialCoefficients):
            # each term keeps a running sum of summaries, updated and read once for each block
            return 2 * self.mixing.amplitude.shape[-1] * blocks
        return blocks * (blocks - 1) / 2 if self.causal else blocks**2

    @override
    def operator_flops(self, tokens: int) -> float:
        """Count the floating-point operations of attention with block summaries, on a sequence of ``tokens`` tokens."""
        size = self.layout.num_tokens / self.layout.num_blocks
        return self.summary_flops(tokens, size if self.causal else None, self.summaries_mixed(tokens))
