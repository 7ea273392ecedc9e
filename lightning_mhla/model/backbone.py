"""Transformer for images, video and text: pre-norm blocks over a grid of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_mhla.attention import AttentionConfig, layout_for
from lightning_mhla.attention.config import Causal
from lightning_mhla.attention.inputs import check_mask, check_tokens
from lightning_mhla.attention.layout import LayoutTables
from lightning_mhla.attention.positions import Rotary, SequenceRotary, next_positions, sequence_positions
from lightning_mhla.attention.sequence import SequenceShare
from lightning_mhla.model.block import Block, MlpKind, NormKind, make_norm
from lightning_mhla.model.cache import GenerationCache

SHARED_BLOCK = 64
"""Number of tokens in the units by which a sequence is divided among processes, if no layer uses attention blocks."""


class Backbone(LayoutTables):
    """Transformer for images, video and text: a stack of transformer blocks over a grid of tokens, and a final norm.

    Attention can divide the tokens into groups, called attention blocks. Before the first transformer block, tokens are
    reordered so that those of each attention block are contiguous (block order). After the last one, they are brought back into
    raster order.

    Args:
        dim: width of the tokens.
        depth: number of transformer blocks.
        heads: number of attention heads.
        grid: number of tokens along each axis.
        attention: configuration of the attention for all layers, or a list with one configuration per layer. All layers must
            divide the tokens into the same attention blocks.
        prefix_tokens: number of tokens before the grid (class or register tokens).
        drop_path: stochastic depth rate of the last transformer block. The rate rises linearly from 0 in the first block.
        checkpointing: whether to recompute each transformer block in the backward pass instead of keeping its activations.
        block: class of the transformer blocks.
        mlp_ratio: inner width of the MLPs divided by ``dim``.
        mlp: ``"gelu"``, ``"gelu_tanh"`` (its tanh approximation) or ``"swiglu"``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        mlp_norm_eps: epsilon of the norms before the MLPs.
        condition_dim: width of a conditioning vector that shifts, scales and gates attention and MLP (adaLN-Zero, DiT,
            arXiv 2212.09748); None for no conditioning.
        context_dim: width of the tokens that cross-attention attends to; None for no cross-attention.
        causal: True if the self-attention is causal; ``"block"`` if each token attends to all tokens of its own attention
            block and of earlier ones; False if each token attends to all tokens.
        bias: whether the linear layers of attention and MLPs have a bias.
        key_value_heads: number of key and value heads, a divisor of ``heads``; None for ``heads``.
        key_width: width of a key; None for ``dim // heads``.
        value_width: width of a value; None for ``dim // heads``.

    Attributes:
        layout: token grid and its partition into attention blocks.
        order: int64 indices ``[N]`` that bring tokens from raster order into block order; None if both orders are the same.
        inverse: int64 indices ``[N]`` that bring tokens from block order into raster order; None if both orders are the same.

    Raises:
        ValueError: if the number of configurations is not ``depth``, or if layers need different attention blocks.
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
        causal: Causal = False,
        bias: bool = True,
        key_value_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
    ) -> None:
        super().__init__()
        configs = [attention] * depth if isinstance(attention, AttentionConfig) else list(attention)
        if len(configs) != depth:
            raise ValueError(f"attention lists {len(configs)} layers, but depth={depth}")
        self.layout = layout_for(configs, grid, prefix_tokens, causal)
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
        # With conditioning, the output layer scales and shifts after this norm.
        self.norm = make_norm(norm, dim, affine=condition_dim is None)
        reorders = not self.layout.is_raster
        # not persistent, since the order follows from the options
        self.register_buffer("order", self.layout.order if reorders else None, persistent=False)
        self.register_buffer("inverse", self.layout.inverse if reorders else None, persistent=False)
        self.apply(_init_linear)
        for name, parameter in self.named_parameters():  # adaLN-Zero: the gates of attention and MLP start at zero
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
        """Apply all transformer blocks and the final norm to a batch of tokens.

        Args:
            x: tokens ``[B, N, dim]`` in raster order, prefix tokens first.
            condition: conditioning vectors, ``[B, condition_dim]``; required with ``condition_dim``.
            context: tokens for cross-attention, ``[B, L, context_dim]``; required with ``context_dim``.
            key_mask: ``[B, N]`` bool, True for tokens that may be attended to, in raster order; None if all may be.
            context_mask: ``[B, L]`` bool, True for context tokens that may be attended to; None if all may be.
            cu_seqlens: index of the first token of each sequence packed into the row (B = 1), followed by N; causal backbones
                only. None if each row is one sequence.
            share: part of each sequence that this process holds, if sequences are distributed over processes; None for complete
                sequences.
            positions: positions of the rotary embedding, ``[N]`` or ``[B, N]``; None to count the tokens of each sequence.
            states: list to which the input of each block and the final output are appended, ``[B, N, dim]`` each in raster
                order; None to append nothing.

        Returns:
            Output tokens ``[B, N, dim]`` in raster order.

        Raises:
            ValueError: if the number of tokens does not fit the layout, or an argument does not fit the tokens or the layers.
        """
        check_tokens("x", x)
        check_mask("key_mask", key_mask, x)
        if self.order is not None:
            if x.shape[1] != self.layout.num_tokens:  # further tokens would be left out
                raise ValueError(f"{x.shape[1]} tokens for a layout of {self.layout.num_tokens} ({self.layout})")
            x = x.index_select(1, self.order)
            key_mask = key_mask if key_mask is None else key_mask.index_select(1, self.order)
        if positions is None:
            positions = sequence_positions(x, cu_seqlens)
            # The process holds a later part of each sequence, whose first token is not at position 0.
            positions = positions if share is None else positions + share.start
        angles = self._angles(positions)
        for block in self.layers:
            self._keep(x, states)
            rotary = angles.get(block.attn.config.rotary_base)
            # draw_kept runs outside of the block, since a compiled block would draw different random numbers
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
        """Process the next tokens of every row during generation with a causal backbone, and update the cache.

        Args:
            x: next tokens, ``[B, N, dim]``; tokens of a row beyond its count are padding.
            cache: states of the earlier tokens, updated in place.
            counts: number of tokens in each row that are not padding.
            positions: positions of the rotary embedding, ``[N]`` or ``[B, N]``; None to continue after the cached tokens.
            states: list to which the input of each block and the final output are appended, ``[B, N, dim]`` each; None to
                append nothing.

        Returns:
            Output tokens, ``[B, N, dim]``.

        Raises:
            ValueError: if the backbone is not causal, has conditioning or cross-attention, or has a layer that does not support
                generation.
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
        """Return the part of each sequence that this process holds, if sequences are distributed over processes.

        Args:
            group: process group.
            tokens: number of tokens in a complete sequence.

        Raises:
            ValueError: if the sequence has fewer blocks of tokens than the group has processes.
        """
        # Processes exchange summaries of complete blocks, so the sequence is cut between blocks.
        in_blocks = any(block.attn.uses_blocks for block in self.layers)
        size = self.layout.operator_blocks["block_size"] if in_blocks else SHARED_BLOCK
        return SequenceShare(group, tokens, int(size))

    @override
    def tables(self) -> dict[str, Tensor]:
        return {"order": self.layout.order, "inverse": self.layout.inverse}

    @property
    def layers(self) -> list[Block]:
        """The backbone's transformer blocks, from first to last."""
        return cast(list[Block], list(self.blocks))

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens in the longest sequence that every layer supports; None for sequences of any length."""
        limits = [block.attn.max_tokens for block in self.layers]
        return min((limit for limit in limits if limit is not None), default=None)

    def extend(self, tokens: int) -> None:
        """Extend a causal backbone to longer sequences. Outputs for shorter sequences stay the same.

        Args:
            tokens: number of tokens in the longest sequence to support. A number below the present limit has no effect.

        Raises:
            ValueError: if the backbone is not causal and ``tokens`` exceeds the present limit.
        """
        if tokens <= self.layout.num_tokens:
            return
        for block in self.layers:
            block.attn.extend(tokens)
        # a layer that does not use blocks, such as softmax, has one block, which is not the partition of the others
        with_blocks = [block.attn for block in self.layers if block.attn.uses_blocks]
        self.layout = (with_blocks or [self.layers[0].attn])[0].layout

    def _angles(self, positions: Tensor) -> dict[float, Rotary]:
        """Compute rotary angles for all layers that rotate by sequence position, once for each rotary base.

        Args:
            positions: positions of the tokens, ``[N]`` or ``[B, N]``.

        Returns:
            Mapping from rotary base to rotary angles.
        """
        parts = [block.attn.rotary for block in self.layers]
        using = {part.base: part for part in parts if isinstance(part, SequenceRotary)}
        return {base: part.angles(positions) for base, part in using.items()}


def _init_linear(module: nn.Module) -> None:
    """Initialize a module if it is a linear layer: weights from a truncated normal distribution (std 0.02), biases zero."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
