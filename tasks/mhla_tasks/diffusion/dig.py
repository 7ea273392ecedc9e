"""DiG (arXiv 2405.18428), a diffusion transformer whose blocks scan the image in alternating directions."""

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
from lightning_mhla.system.ranges import check_range

SIZES: dict[str, Shape] = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 18)}
"""Width, depth and number of heads of each size (DiG, table 1; its code has 18 heads in XL)."""

PROJECTION_GAIN = 2.0**-2.5
"""Gain of the Xavier initialization of the attention's projections, from flash-linear-attention's GLA, which DiG uses."""


@dataclass(frozen=True)
class DiGConfig:
    """Options of a DiG (arXiv 2405.18428), a DiT whose blocks scan the image in alternating directions.

    Args:
        directions: number of scan directions, "four", "two" or "one". With "four", the blocks scan rows forward and backward,
            then columns forward and backward, and so on. With "two", they scan rows forward and backward. With "one", all
            blocks scan rows forward.
        causal: whether a token attends only to itself and earlier tokens; false for attention over all tokens, such as mhla
            with block_grid.
        mlp_width: inner width of the SwiGLU MLP; null for 8 / 3 of the tokens' width, rounded up to a multiple of 256, as in
            DiG.
        key_ratio: width of a key divided by the width of a value.
        local: whether each block ends with a depthwise 3 x 3 convolution.

    Raises:
        ValueError: if an option is out of range.
    """

    directions: Literal["four", "two", "one"] = "four"
    causal: bool = True
    mlp_width: int | None = None
    key_ratio: float = 0.5
    local: bool = True

    def __post_init__(self) -> None:
        if self.directions not in ("four", "two", "one"):
            raise ValueError(f"directions={self.directions!r} is not one of 'four', 'two', 'one'")
        check_range(above=0, key_ratio=self.key_ratio)
        if self.mlp_width is not None and self.mlp_width < 1:
            raise ValueError(f"mlp_width={self.mlp_width} must be positive, or null for DiG's")

    def inner(self, dim: int) -> int:
        """Return the inner width of the SwiGLU MLP for tokens of width ``dim``."""
        return self.mlp_width or -(-8 * dim // (3 * 256)) * 256


class DiGBlock(Block):
    """Transformer block, followed by an optional depthwise 3 x 3 convolution that is initialized as the identity.

    Args:
        grid: numbers of rows and columns of tokens in the image that the block receives.
        local: whether to add the convolution.
        dim: width of the tokens.
        arguments: further positional arguments of :class:`lightning_mhla.Block`.
        options: keyword arguments of :class:`lightning_mhla.Block`.
    """

    def __init__(self, grid: tuple[int, int], local: bool, dim: int, *arguments: Any, **options: Any) -> None:
        super().__init__(dim, *arguments, **options)
        self.grid = grid
        self.local = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if local else None
        if self.local is not None:
            nn.init.dirac_(self.local.weight, groups=dim)
            nn.init.zeros_(self.local.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Apply the block and, if there is one, the convolution to a sequence of image tokens.

        Args:
            x: tokens ``[B, N, dim]`` in raster order.
            arguments: further positional arguments of the block's forward pass, such as the conditioning vector.
            options: keyword arguments of the block's forward pass.

        Returns:
            Tokens ``[B, N, dim]`` in the same order.
        """
        x = super().forward(x, *arguments, **options)
        if self.local is None:
            return x
        image = x.transpose(1, 2).unflatten(-1, self.grid)
        return self.local(image).flatten(2).transpose(1, 2)


class TurningBackbone(nn.Module):
    """Backbone of a DiG: transformer blocks between which the token order is reversed or transposed, and a final norm.

    Args:
        dim: width of the tokens.
        heads: number of attention heads.
        grid: numbers of rows and columns of tokens in the image.
        attention: attention configurations, one for each layer.
        config: options of the DiG, such as the scan directions.
        condition_dim: width of the conditioning vector.
        mlp_norm_eps: epsilon of the norm before the MLP.
        checkpointing: whether to recompute the activations of each block in the backward pass, to save memory.
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
        for index, layer_config in enumerate(attention):
            layer_grid = grid
            if self.transposed(index):
                # This layer gets the transposed image, so its grid and its blocks are transposed too.
                layer_grid = (grid[1], grid[0])
                layer_config = replace(
                    layer_config, block_grid=layer_config.block_grid and layer_config.block_grid[::-1]
                )
            # Causal attention treats the image as one sequence; other attention needs rows and columns.
            layout = layout_for([layer_config], (grid[0] * grid[1],) if config.causal else layer_grid)
            self.blocks.append(
                DiGBlock(
                    layer_grid,
                    config.local,
                    dim,
                    heads,
                    layout,
                    layer_config.at_layer(index),
                    mlp_ratio=config.inner(dim) / dim,
                    mlp="swiglu",
                    mlp_norm_eps=mlp_norm_eps,
                    condition_dim=condition_dim,
                    causal=config.causal,
                    bias=False,
                    key_width=round(dim / heads * config.key_ratio),
                    # Between the blocks, tokens are reversed and transposed in raster order.
                    block_ordered=False,
                )
            )
        self.norm = make_norm("layernorm", dim, affine=False)
        for name, parameter in self.named_parameters():
            # With gates of zero, every block starts as the identity, as in DiT (adaLN-Zero).
            if ".modulation." in name:
                nn.init.zeros_(parameter)

    @property
    def layers(self) -> list[DiGBlock]:
        """Transformer blocks in the order of execution."""
        return cast(list[DiGBlock], list(self.blocks))

    def transposed(self, layer: int) -> bool:
        """Return whether the layer with index ``layer`` (from 0) receives the transposed image, so that it scans columns."""
        return self.config.directions == "four" and layer // 2 % 2 == 1

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Apply all blocks and the final norm.

        Args:
            x: tokens ``[B, N, dim]`` in raster order.
            condition: conditioning vector of each sample, ``[B, condition_dim]``.

        Returns:
            Tokens ``[B, N, dim]`` in raster order.
        """
        current_grid, transposes = self.grid, self.config.directions == "four"
        for index, block in enumerate(self.blocks):
            if self.checkpointing and torch.is_grad_enabled():
                x = cast(Tensor, checkpoint(block, x, condition, use_reentrant=False))
            else:
                x = block(x, condition)
            if self.config.directions != "one":
                x = x.flip(1)
            # after a pair of scans, forward and backward
            if transposes and index % 2:
                x, current_grid = _exchanged(x, current_grid), (current_grid[1], current_grid[0])
        if len(self.blocks) % 2 and self.config.directions != "one":  # an even number of reversals cancels out
            x = x.flip(1)
        if self.transposed(len(self.blocks) // 2 * 2):
            x = _exchanged(x, current_grid)
        return self.norm(x)

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialize the projections of all attention layers as the original DiG code does.

        The weights for queries, keys, values and outputs are initialized separately, with Xavier's uniform distribution and
        gain 2^-2.5.
        """
        for block in self.layers:
            attention = block.attn
            for layer in (module for module in attention.modules() if isinstance(module, nn.Linear)):
                # Queries, keys and values share one matrix here; each part gets the bound of a matrix of its own.
                sections = attention.sections if layer is attention.qkv else [len(layer.weight)]
                for part in layer.weight.split(sections):
                    nn.init.xavier_uniform_(part, PROJECTION_GAIN)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)


def _exchanged(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Transpose an image of tokens ``[B, N, dim]`` in raster order.

    Args:
        x: tokens of the image.
        grid: number of rows and of columns of the image, in tokens.

    Returns:
        Tokens ``[B, N, dim]`` of the transposed image, in raster order.
    """
    return x.unflatten(1, grid).transpose(1, 2).flatten(1, 2)
