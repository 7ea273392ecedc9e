"""DiG (arXiv 2405.18428): blocks that read the image in one direction each, by turns along rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mhla import AttentionConfig, Block
from lightning_mhla.attention import layout_for
from lightning_mhla.model.block import make_norm
from lightning_mhla.model.sizes import Shape

SIZES: dict[str, Shape] = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 18)}
"""Width, depth and heads (DiG, table 1; its code has 18 heads in XL)."""

PROJECTION_GAIN = 2.0**-2.5
"""Of the Xavier start of the mixer's projections (flash-linear-attention's GLA, which DiG takes)."""


@dataclass(frozen=True)
class DiGConfig:
    """Options that make a DiT a DiG.

    Args:
        directions: how the image turns between blocks. four: it is reversed behind every block and transposed behind every
            second, so that blocks read rows forward and backward, then columns; two: reversed alone; one: never.
        causal: whether a token sees those before it only; false for attention that sees all, mhla with block_grid.
        mlp_width: inner width of the SwiGLU; null for DiG's, 8 / 3 of the tokens' in whole multiples of 256.
        key_ratio: width of a key over that of a value.
        local: whether a depthwise 3 x 3 convolution follows each block.
    """

    directions: Literal["four", "two", "one"] = "four"
    causal: bool = True
    mlp_width: int | None = None
    key_ratio: float = 0.5
    local: bool = True

    def __post_init__(self) -> None:
        if self.directions not in ("four", "two", "one"):
            raise ValueError(f"directions={self.directions!r} is not one of 'four', 'two', 'one'")
        if self.key_ratio <= 0:
            raise ValueError(f"key_ratio={self.key_ratio} must be positive")
        if self.mlp_width is not None and self.mlp_width < 1:
            raise ValueError(f"mlp_width={self.mlp_width} must be positive, or null for DiG's")

    def inner(self, dim: int) -> int:
        """Inner width of the SwiGLU for tokens of width ``dim``."""
        return self.mlp_width or -(-8 * dim // (3 * 256)) * 256


class DiGBlock(Block):
    """A block of :class:`lightning_mhla.Block`, and behind it a depthwise 3 x 3 convolution that starts as the identity.

    Args:
        grid: rows and columns of the image as the block sees it.
        local: whether there is the convolution.
        dim: width of the tokens.
        options: others of :class:`lightning_mhla.Block`.
    """

    def __init__(self, grid: tuple[int, int], local: bool, dim: int, *arguments: Any, **options: Any) -> None:
        super().__init__(dim, *arguments, **options)
        self.grid = grid
        self.local = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if local else None
        if self.local is not None:
            nn.init.dirac_(self.local.weight, groups=dim)
            nn.init.zeros_(self.local.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Tokens ``[B, N, dim]`` in raster order to the same shape."""
        x = super().forward(x, *arguments, **options)
        if self.local is None:
            return x
        image = x.transpose(1, 2).unflatten(-1, self.grid)
        return self.local(image).flatten(2).transpose(1, 2)


class TurningBackbone(nn.Module):
    """Blocks between which the image is reversed and transposed, and a final norm.

    Args:
        dim: width of the tokens.
        heads: attention heads.
        grid: rows and columns of the image.
        attention: one configuration for each layer.
        config: see :class:`DiGConfig`.
        condition_dim: see :class:`lightning_mhla.Block`.
        mlp_norm_eps: see there.
        checkpointing: recompute each block in the backward pass.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        grid: tuple[int, int],
        attention: Sequence[AttentionConfig],
        config: DiGConfig,
        *,
        condition_dim: int,
        mlp_norm_eps: float = 1e-6,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.grid, self.config, self.checkpointing = grid, config, checkpointing
        self.blocks = nn.ModuleList()
        for index, each in enumerate(attention):
            seen, own = grid, each
            if self.transposed(index):
                seen = (grid[1], grid[0])
                own = replace(each, block_grid=each.block_grid and each.block_grid[::-1])
            layout = layout_for([own], (grid[0] * grid[1],) if config.causal else seen)
            self.blocks.append(
                DiGBlock(
                    seen,
                    config.local,
                    dim,
                    heads,
                    layout,
                    own.at_layer(index),
                    mlp_ratio=config.inner(dim) / dim,
                    mlp="swiglu",
                    mlp_norm_eps=mlp_norm_eps,
                    condition_dim=condition_dim,
                    causal=config.causal,
                    bias=False,
                    key_width=round(dim / heads * config.key_ratio),
                    block_ordered=False,
                )
            )
        self.norm = make_norm("layernorm", dim, affine=False)
        for name, parameter in self.named_parameters():
            if ".modulation." in name:
                nn.init.zeros_(parameter)

    @property
    def layers(self) -> list[DiGBlock]:
        """The blocks, first to last."""
        return cast(list[DiGBlock], list(self.blocks))

    def transposed(self, layer: int) -> bool:
        """Whether the layer of this number, counted from 0, sees the image with rows and columns exchanged."""
        return self.config.directions == "four" and layer // 2 % 2 == 1

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Tokens ``[B, N, dim]`` in raster order, and ``[B, condition_dim]``, to tokens."""
        seen, four = self.grid, self.config.directions == "four"
        for index, block in enumerate(self.blocks):
            if self.checkpointing and torch.is_grad_enabled():
                x = cast(Tensor, checkpoint(block, x, condition, use_reentrant=False))
            else:
                x = block(x, condition)
            if self.config.directions != "one":
                x = x.flip(1)
            if four and index % 2:
                x, seen = _exchanged(x, seen), (seen[1], seen[0])
        if len(self.blocks) % 2 and self.config.directions != "one":  # whole turns bring the image back by themselves
            x = x.flip(1)
        if self.transposed(len(self.blocks) // 2 * 2):
            x = _exchanged(x, seen)
        return self.norm(x)

    @torch.no_grad()
    def initialize(self) -> None:
        """Start the mixers' projections as DiG's code does: each of its own Xavier bound, times 2^-2.5."""
        for block in self.blocks:
            attention = cast(DiGBlock, block).attn
            for layer in (module for module in attention.modules() if isinstance(module, nn.Linear)):
                sections = attention.sections if layer is attention.qkv else [len(layer.weight)]
                for part in layer.weight.split(sections):
                    nn.init.xavier_uniform_(part, PROJECTION_GAIN)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)


def _exchanged(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens of an image of ``grid`` with rows and columns exchanged."""
    return x.unflatten(1, grid).transpose(1, 2).flatten(1, 2)
