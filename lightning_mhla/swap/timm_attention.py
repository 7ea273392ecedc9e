"""Subclasses of timm's attention modules that compute MHLA or another replacement. Importing this module requires timm.

The attention of a module is replaced by changing the class of the module to such a subclass. The parameters of the module keep
their names, and the module can still compute the original attention.
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
    """Mixin for subclasses of timm's attention classes; its forward pass computes a replacement of the original attention.

    Attributes:
        swapped: the new attention, without projections.
        blocks: number of blocks along each axis of the token grid.
        grid: hook that records the token grid of the current image.
        fitted: block layout and device for which the new attention was last set up; None before the first image.
        as_before: whether the forward pass computes the original attention instead of the new one.
    """

    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Compute the new attention, or the original attention if the attribute ``as_before`` is true.

        The signature is compatible with timm's ``Attention``, ``AttentionRope`` and ``EvaAttention``. B is the batch size, N
        the number of tokens, and C their width.

        Args:
            x: tokens, ``[B, N, C]``.
            args: further positional arguments of timm's modules; the new attention rejects them.
            options: keyword arguments of timm's modules. The new attention uses only ``rope``, the rotary embedding.

        Returns:
            Outputs ``[B, N, C]``.

        Raises:
            ValueError: if the new attention is called with ``args``, ``attn_mask`` or ``is_causal``, or if N is not the number
                of tokens of the image that the model is processing.
        """
        if self.as_before:
            return super().forward(x, *args, **options)  # type: ignore[misc]  # timm's own
        rope = options.pop("rope", None)
        if args or options.get("attn_mask") is not None or options.get("is_causal"):
            raise ValueError(
                "swapped attention sees all tokens of one image; attn_mask, is_causal and packed images are not supported"
            )
        layout = fit(self, self.swapped, self.grid.layout(self.blocks, x.shape[1], self.swapped.mixes_prefix), x.device)
        host = Projections(
            lambda tokens: _split(self, tokens, rope),
            lambda heads: heads,
            in_raster=rope is not None,  # the rotary embedding follows the raster order of patches, not that of blocks
        )
        return _merge(self, self.swapped(x, projections=host, layout=layout), x)


class SwappedPlainAttention(_Swapped, PlainAttention):
    """Variant of timm's ``Attention``, as in ViT, DeiT and DINOv2, that computes MHLA or another replacement attention."""


class SwappedAttentionRope(_Swapped, AttentionRope):
    """Variant of timm's ``AttentionRope``, as in DINOv3, that computes MHLA or another replacement attention."""


class SwappedEvaAttention(_Swapped, EvaAttention):
    """Variant of timm's ``EvaAttention``, as in EVA, that computes MHLA or another replacement attention."""


KINDS = {PlainAttention: SwappedPlainAttention, AttentionRope: SwappedAttentionRope, EvaAttention: SwappedEvaAttention}


def install(module: Any, attention: Attention, grid: TokenGrid) -> None:
    """Make a timm attention module compute a different attention with its existing projections, in place.

    Args:
        module: timm module of class ``Attention``, ``AttentionRope`` or ``EvaAttention``.
        attention: the new attention, without projections.
        grid: hook that records the token grid of the current image.
    """
    module.__class__ = KINDS[type(module)]
    module.swapped, module.grid, module.blocks = attention, grid, attention.layout.block_grid
    module.as_before, module.fitted = False, None


def _split(module: Any, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Project tokens to queries, keys and values, and apply timm's norms and rotary embedding.

    Args:
        module: timm attention module.
        x: tokens, ``[B, N, C]`` for B images of N tokens of width C.
        rope: sines of the patch positions, followed by their cosines along the last axis, ``[..., P, 2 * D]`` for P patches;
            None without a rotary embedding.

    Returns:
        Queries, keys and values, ``[B, N, H, D]`` each for H heads of width D.
    """
    if module.qkv is None:
        q, k, v = (
            layer(x).unflatten(-1, (-1, module.head_dim)) for layer in (module.q_proj, module.k_proj, module.v_proj)
        )
    else:
        projected = module.qkv(x)  # called, not multiplied by its weight, so that LoRA adapters apply
        if getattr(module, "q_bias", None) is not None:
            projected = projected + torch.cat([module.q_bias, module.k_bias, module.v_bias])
        q, k, v = projected.unflatten(-1, (3, module.num_heads, module.head_dim)).unbind(2)
    q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        q, k = (_rotate(module, heads, rope).type_as(v) for heads in (q, k))
    return q, k, v


def _rotate(module: Any, heads: Tensor, rope: Tensor) -> Tensor:
    """Apply the rotary embedding to queries or keys of patches. Class and register tokens have no position and do not change.

    Args:
        module: timm attention module.
        heads: queries or keys, ``[B, N, H, D]`` for N tokens and H heads of width D.
        rope: sines of the patch positions, followed by their cosines along the last axis, ``[..., P, 2 * D]`` for P patches.

    Returns:
        Queries or keys ``[B, N, H, D]``, rotated for patches.
    """
    prefix = module.num_prefix_tokens
    patches = heads[:, prefix:].transpose(1, 2)
    turned = apply_rot_embed_cat(patches, rope, half=module.rotate_half).transpose(1, 2)
    return torch.cat([heads[:, :prefix], turned], 1)


def _merge(module: Any, heads: Tensor, x: Tensor) -> Tensor:
    """Apply timm's output norm, gate and projection to the attention output.

    Args:
        module: timm attention module.
        heads: attention output, ``[B, N, H * D]`` for N tokens and H heads of width D.
        x: input of the attention module, ``[B, N, C]``, from which the gate is computed.

    Returns:
        Output tokens, ``[B, N, C]``.
    """
    out = module.norm(heads)
    if module.gate is not None:
        out = out * module.gate(x).sigmoid()
    return module.proj_drop(module.proj(out))
