"""Multi-head linear attention (MHLA): each block of queries mixes the key-value summaries of all blocks."""

from __future__ import annotations

from typing import Any

import torch
from mhla_kernels.mixing import MixingLike
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.config import AttentionConfig, Causal, check_blocks
from lightning_mhla.attention.layout import BlockLayout, Placement
from lightning_mhla.attention.mixing import DenseCoefficients, ExponentialCoefficients, MixingCoefficients
from lightning_mhla.attention.summaries import SummaryAttention


class MHLA(SummaryAttention, kind="mhla"):
    """Self-attention layer with multi-head linear attention over blocks of tokens (MHLA, arXiv 2601.07832).

    Each block has a key-value summary, the sum of ``k v^T`` over its tokens. The queries of a block read a sum of all
    summaries, weighted by learned mixing coefficients. Tokens are in raster order, unless ``block_ordered`` is True. For
    example, this layer divides 16 x 16 tokens into 4 x 4 blocks:

        layout = BlockLayout((16, 16), blocks=(4, 4))
        attention = MHLA(dim=384, heads=6, layout=layout)
        y = attention(torch.randn(2, 256, 384))

    Args:
        dim: width of the tokens.
        heads: number of query heads.
        layout: token grid and its partition into blocks, such as ``BlockLayout((height, width), blocks=(rows, columns))`` for
            an image or ``BlockLayout((tokens,), block_size=64)`` for a sequence.
        config: configuration of kind ``"mhla"``, with options such as feature map and mixing; None for the defaults. If it sets
            ``block_grid`` or ``block_size``, they must agree with ``layout``.
        key_value_heads: number of key heads and of value heads, a divisor of ``heads``; None for ``heads``.
        key_width: width of the keys of one head; None for ``dim // heads``.
        value_width: width of the values of one head; None for ``dim // heads``.
        bias: whether the projections have a bias.
        causal: True if each token attends only to itself and earlier tokens, or ``"block"`` if each token attends to all tokens
            of its own block and of earlier blocks (block-causal attention). Both require a 1-D grid without prefix
            tokens.
        block_ordered: whether inputs and outputs are in block order, in which the tokens of each block are contiguous.
        projections: whether the layer has its own projections. If not, callers pass the projections of another module to
            :meth:`forward`.

    Raises:
        ValueError: if the configuration is for a different kind or different blocks, widths and numbers of heads do not fit
            together, or a causal layer has a grid with several axes or uneven blocks.
    """

    uses_blocks = True
    block_causal = True

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
        causal: Causal = False,
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
        check_blocks(config, layout)
        if self.causal and "block_size" not in self.blocks:
            raise ValueError(
                f"causal attention needs blocks of equal size, except for a shorter last one; {layout} has uneven ones"
            )
        options: dict[str, Any] = {
            "heads": heads if config.mixing_per_head else None,
            "init": config.mixing_init,
            "causal": bool(self.causal),
            "trainable": config.mixing_trainable,
        }
        self.mixing: MixingCoefficients
        mixed = layout
        if layout.prefix_tokens and not self.mixes_prefix:
            # A layout made from `block_size` has `blocks` too, and BlockLayout takes only one of the two.
            mixed = BlockLayout(layout.grid, None if layout.block_size else layout.blocks, layout.block_size)
        if config.mixing == "exponential":
            self.mixing = ExponentialCoefficients(
                mixed, config.mixing_terms, min_decay=config.mixing_min_decay, **options
            )
        else:
            self.mixing = DenseCoefficients(mixed, **options)

    @override
    def fit(self, layout: BlockLayout, device: torch.device | None = None) -> None:
        """Adapt the layer to a different token layout. Learned parameters stay the same.

        If the number of blocks along an axis changes, each forward pass adapts the mixing coefficients to it.

        Args:
            layout: new layout. It must have as many axes and prefix tokens as the layout that the layer was built with.
            device: device of the tokens; None for the CPU.
        """
        super().fit(layout, device)
        self.blocks = layout.operator_blocks

    @property
    @override
    def max_tokens(self) -> int | None:
        """Maximum length of a sequence in tokens; None (no limit) for a causal layer with exponential mixing coefficients."""
        if not self.causal:
            return self.layout.num_tokens
        return (
            self.layout.num_blocks * int(self.blocks["block_size"])
            if isinstance(self.mixing, DenseCoefficients)
            else None
        )

    @override
    def extend(self, tokens: int) -> None:
        """Extend a causal layer to sequences of up to ``tokens`` tokens. Outputs for shorter sequences stay the same.

        Dense mixing coefficients of new blocks are extrapolated from the existing ones.

        Args:
            tokens: number of tokens in the longest sequence. A number that the layout already covers has no effect.

        Raises:
            ValueError: if the layer is not causal.
        """
        super().extend(tokens)
        self.mixing.extend(self.layout.num_blocks)

    @override
    def coefficients(self, q: Tensor, placement: Placement | None = None) -> tuple[MixingLike, dict[str, Any]]:
        """Return the learned mixing coefficients, and keyword arguments that describe the blocks.

        Args:
            q: queries; ignored, because the coefficients do not depend on them.
            placement: permutation of the tokens into block order, for this call only; None for the layout of the last
                :meth:`fit`.

        Returns:
            Mixing coefficients, and a dict with the keyword argument ``block_size`` or ``block_offsets`` for the functions of
            ``mhla_kernels``.
        """
        if placement is not None:
            return self.mixing(placement.layout.block_grid), placement.blocks
        return self.mixing(None if self.causal else self.layout.block_grid), self.blocks

    def summaries_mixed(self, tokens: int) -> float:
        """Return the number of weighted block summaries that are added up to compute the mixed summaries of all blocks.

        The number of blocks is proportional to ``tokens``, so the result may be fractional.

        Args:
            tokens: number of tokens of the sequence.
        """
        blocks = tokens * self.layout.num_blocks / self.layout.num_tokens
        if isinstance(self.mixing, ExponentialCoefficients):
            # each term keeps a running sum of summaries, updated and read once for each block
            return 2 * self.mixing.amplitude.shape[-1] * blocks
        if self.causal == "block":
            return blocks * (blocks + 1) / 2
        return blocks * (blocks - 1) / 2 if self.causal else blocks**2

    @override
    def operator_flops(self, tokens: int) -> float:
        """Return the number of floating-point operations of the attention of one sequence, without the projections.

        A multiply-add counts as two operations.

        Args:
            tokens: number of tokens of the sequence.
        """
        size = self.layout.num_tokens / self.layout.num_blocks
        return self.summary_flops(tokens, size if self.causal is True else None, self.summaries_mixed(tokens))
