"""timm's attention modules with our attention in them; imports timm.

A replaced module becomes one of a derived class: its parameters keep their names, and what was replaced can be asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from timm.layers.attention import Attention as PlainAttention
from timm.layers.attention import AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor

from lightning_mhla.attention import Attention, Projections
from lightning_mhla.swap.host import TokenGrid, fit


class _Swapped:
    """The common part of all three.

    Attributes:
        swapped: the new attention, without projections.
        blocks: along each axis of the token grid.
        grid: token grid of the present image.
        as_before: whether what was replaced is asked for.
    """

    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Tokens ``[B, N, C]`` to the same shape, as timm calls it.

        Raises:
            ValueError: for a mask, causal attention, or tokens that are not those of the image.
        """
        if self.as_before:
            out: Tensor = super().forward(x, *args, **options)  # type: ignore[misc]  # timm's own
            return out
        rope = options.pop("rope", None)
        if args or options.get("attn_mask") is not None or options.get("is_causal"):
            raise ValueError("swapped attention sees all tokens of one image: no attn_mask, is_causal or packed images")
        layout = fit(self, self.swapped, self.grid.layout(self.blocks, x.shape[1]), x.device)
        host = Projections(
            lambda tokens: _split(self, tokens, rope),
            lambda heads: heads,
            in_raster=rope is not None,  # patches are turned by their place in the image
        )
        return _merge(self, self.swapped(x, projections=host, layout=layout), x)


class SwappedPlainAttention(_Swapped, PlainAttention):
    """Of ViT, DeiT, DINOv2, SigLIP."""


class SwappedAttentionRope(_Swapped, AttentionRope):
    """Of DINOv3 and others with rotary positions."""


class SwappedEvaAttention(_Swapped, EvaAttention):
    """Of EVA."""


KINDS = {PlainAttention: SwappedPlainAttention, AttentionRope: SwappedAttentionRope, EvaAttention: SwappedEvaAttention}


def install(module: Any, attention: Attention, grid: TokenGrid) -> None:
    """Let ``attention`` take the place of the product of queries, keys and values of ``module``."""
    module.__class__ = KINDS[type(module)]
    module.swapped, module.grid, module.blocks = attention, grid, attention.layout.block_grid
    module.as_before, module.fitted = False, None


def _split(module: Any, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[B, N, H, D]`` after norms and rotary."""
    if module.qkv is None:
        q, k, v = (
            layer(x).unflatten(-1, (-1, module.head_dim)) for layer in (module.q_proj, module.k_proj, module.v_proj)
        )
    else:
        projected = module.qkv(x)  # a call, which adapters take part in
        if getattr(module, "q_bias", None) is not None:
            projected = projected + torch.cat([module.q_bias, module.k_bias, module.v_bias])
        q, k, v = projected.unflatten(-1, (3, module.num_heads, module.head_dim)).unbind(2)
    q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        q, k = (_turn(module, heads, rope).type_as(v) for heads in (q, k))
    return q, k, v


def _turn(module: Any, heads: Tensor, rope: Tensor) -> Tensor:
    """Patches turned by their positions; prefix tokens have none."""
    prefix = module.num_prefix_tokens
    patches = heads[:, prefix:].transpose(1, 2)
    turned = apply_rot_embed_cat(patches, rope, half=module.rotate_half).transpose(1, 2)
    return torch.cat([heads[:, :prefix], turned], 1)


def _merge(module: Any, heads: Tensor, x: Tensor) -> Tensor:
    """``[B, N, H * D]`` to tokens, after timm's norm and gate of the output."""
    out = module.norm(heads)
    if module.gate is not None:
        out = out * module.gate(x).sigmoid()
    dropped: Tensor = module.proj_drop(module.proj(out))
    return dropped
