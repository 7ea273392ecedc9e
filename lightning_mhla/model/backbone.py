"""The transformer that every domain stands on: pre-norm blocks over tokens of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_mhla.attention import AttentionConfig, layout_for
from lightning_mhla.attention.layout import LayoutTables
from lightning_mhla.attention.positions import Rotary, next_positions, sequence_positions
from lightning_mhla.attention.sequence import SequenceShare
from lightning_mhla.model.block import Block, MlpKind, NormKind, make_norm
from lightning_mhla.model.cache import GenerationCache

SHARED_BLOCK = 64
"""Tokens in a block of a sequence that processes share, where no layer uses blocks."""


class Backbone(LayoutTables):
    """Blocks over the tokens of one layout, and a final norm. Tokens are put in block order once, and back once.

    Args:
        dim: width of the tokens.
        depth: number of blocks.
        heads: attention heads.
        grid: tokens along each axis.
        attention: one configuration, or one for each layer (their blocks must agree).
        prefix_tokens: tokens before the grid (class, register).
        drop_path: stochastic depth of the last block; it rises linearly from 0 at the first.
        checkpointing: recompute each block in the backward pass instead of keeping its activations.
        block: class of the blocks.
        mlp_ratio: see :class:`Block`, as are all that follow.
        mlp: see :class:`Block`.
        norm: see :class:`Block`.
        mlp_norm_eps: see :class:`Block`.
        condition_dim: see :class:`Block`.
        context_dim: see :class:`Block`.
        causal: see :class:`Block`.
        bias: see :class:`Block`.
        key_value_heads: see :class:`Block`.
        key_width: see :class:`Block`.
        value_width: see :class:`Block`.
    """

    order: Tensor | None
    inverse: Tensor | None

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        grid: Sequence[int],
        attention: AttentionConfig | Sequence[AttentionConfig],
        *,
        prefix_tokens: int = 0,
        drop_path: float = 0.0,
        checkpointing: bool = False,
        block: type[Block] = Block,
        mlp_ratio: float = 4.0,
        mlp: MlpKind = "gelu",
        norm: NormKind = "layernorm",
        mlp_norm_eps: float = 1e-6,
        condition_dim: int | None = None,
        context_dim: int | None = None,
        causal: bool = False,
        bias: bool = True,
        key_value_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
    ) -> None:
        super().__init__()
        configs = [attention] * depth if isinstance(attention, AttentionConfig) else list(attention)
        if len(configs) != depth:
            raise ValueError(f"attention lists {len(configs)} layers, but depth={depth}")
        self.layout = layout_for(configs, grid, prefix_tokens)
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(
            block(
                dim,
                heads,
                self.layout,
                config.at_layer(index),
                mlp_ratio=mlp_ratio,
                mlp=mlp,
                norm=norm,
                mlp_norm_eps=mlp_norm_eps,
                drop_path=drop_path * index / max(depth - 1, 1),
                condition_dim=condition_dim,
                context_dim=context_dim,
                causal=causal,
                bias=bias,
                key_value_heads=key_value_heads,
                key_width=key_width,
                value_width=value_width,
            )
            for index, config in enumerate(configs)
        )
        self.norm = make_norm(norm, dim, affine=condition_dim is None)
        moves = not self.layout.is_raster
        self.register_buffer("order", self.layout.order if moves else None, persistent=False)
        self.register_buffer("inverse", self.layout.inverse if moves else None, persistent=False)
        self.apply(_init_linear)
        for name, parameter in self.named_parameters():
            if ".modulation." in name:
                nn.init.zeros_(parameter)

    def forward(
        self,
        x: Tensor,
        condition: Tensor | None = None,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        share: SequenceShare | None = None,
        positions: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Tokens ``[B, N, dim]`` in raster order, prefix first, to the same; arguments as for :class:`Block`.

        Args:
            positions: ``[N]`` or ``[B, N]``, what rotary turns by; None counts the tokens of each sequence.
            states: what goes into each block and what comes out in the end is appended here.
        """
        if self.order is not None:
            x = x.index_select(1, self.order)
            key_mask = key_mask if key_mask is None else key_mask.index_select(1, self.order)
        if positions is None:
            positions = sequence_positions(x, cu_seqlens)
            positions = positions if share is None else positions + share.start
        angles = self._angles(positions)
        for block in self.layers:
            self._keep(x, states)
            rotary = angles.get(block.attn.config.rotary_base)
            options = (condition, context, key_mask, context_mask, rotary, cu_seqlens, share, block.draw_kept(x))
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, *options, use_reentrant=False)
            else:
                x = block(x, *options)
        x = self.norm(x)
        self._keep(x, states)
        return x if self.inverse is None else x.index_select(1, self.inverse)

    def _keep(self, x: Tensor, states: list[Tensor] | None) -> None:
        if states is not None:
            states.append(x if self.inverse is None else x.index_select(1, self.inverse))

    def next_tokens(
        self,
        x: Tensor,
        cache: GenerationCache,
        counts: Sequence[int],
        positions: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Causal: the next tokens ``[B, N, dim]`` of every row to the same shape; ``cache`` takes them in.

        Args:
            x: tokens; whatever a row has beyond its count is padding at its right.
            cache: states so far, changed in place.
            counts: number of real tokens in each row.
            positions: as for :meth:`forward`; None for those that follow the state's.
            states: as for :meth:`forward`.
        """
        angles = self._angles(next_positions(cache.lengths, x) if positions is None else positions)
        for index, block in enumerate(self.layers):
            self._keep(x, states)
            rotary = angles.get(block.attn.config.rotary_base)
            x, cache.layers[index] = block.next_tokens(x, cache.layers[index], counts, rotary)
        cache.columns += x.shape[1]
        x = self.norm(x)
        self._keep(x, states)
        return x

    def share(self, group: dist.ProcessGroup, tokens: int) -> SequenceShare:
        """This process's share of sequences of ``tokens`` tokens that ``group`` trains on together."""
        in_blocks = any(block.attn.uses_blocks for block in self.layers)
        size = self.layout.operator_blocks["block_size"] if in_blocks else SHARED_BLOCK
        return SequenceShare(group, tokens, int(size))

    @override
    def tables(self) -> dict[str, Tensor]:
        return {"order": self.layout.order, "inverse": self.layout.inverse}

    @property
    def layers(self) -> list[Block]:
        """The blocks, first to last."""
        return cast(list[Block], list(self.blocks))

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest sequence; None for sequences of any length."""
        limits = [block.attn.max_tokens for block in self.layers]
        return min((limit for limit in limits if limit is not None), default=None)

    def extend(self, tokens: int) -> None:
        """Let a causal backbone take sequences of ``tokens`` tokens; what it does on shorter ones stays the same."""
        if tokens <= self.layout.num_tokens:
            return
        for block in self.layers:
            block.attn.extend(tokens)
        self.layout = self.layers[0].attn.layout

    def _angles(self, positions: Tensor) -> dict[float, Rotary]:
        """Rotary angles of the layers, by their base; layers that do not turn by them take none."""
        layers = [block.attn for block in self.layers if block.attn.rotary and not block.attn.turns_by_grid]
        using = {layer.config.rotary_base: layer for layer in layers}
        return {base: layer.angles(positions) for base, layer in using.items()}


def _init_linear(module: nn.Module) -> None:
    """Truncated normal of standard deviation 0.02 for weights, zeros for biases (ViT and DeiT alike)."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
