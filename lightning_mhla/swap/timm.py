"""Replacement of the self-attention in timm's vision transformers.

    model = timm.create_model("vit_small_patch14_dinov2.lvd142m", pretrained=True, img_size=518)
    swap_attention(model, AttentionConfig(block_grid=[6, 6]))
    save_swapped(model, "swapped")
    model = load_swapped("swapped")

The new attention only replaces the step that combines queries, keys and values. timm's own modules still compute the
projections, the norms of queries and keys, the rotary embedding, and the norm and gate of the output. The feature map of the
new attention is applied after the rotary embedding. Class and register tokens form one additional block: these tokens and all
other tokens attend to each other. Blocks are fitted to the token grid of the current image, so a model with
``dynamic_img_size`` accepts images of any size. The parameters of the new attention have names that contain ``attn.swapped``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout
from lightning_mhla.swap.host import HostLibrary, TokenGrid, blocks_along, build_beside, check_prefix, refuse_float16

MODELS = ("VisionTransformer", "Eva")
"""Supported timm model classes, including derived classes: ViT, DeiT, DINOv2, SigLIP, CLIP, EVA, DINOv3 and others."""

ATTENTION = ("timm.layers.attention.Attention", "timm.layers.attention.AttentionRope", "timm.models.eva.EvaAttention")
"""Supported timm attention modules, without derived classes."""


class TimmPatchGrid(TokenGrid):
    """Hook that records the number of patches along each axis of the current images of a timm model.

    The hook is a forward pre-hook of the model's patch embedding.
    """

    def __call__(self, embedding: Any, args: tuple[Any, ...]) -> None:
        """Record the number of patches along the height and width of the current images.

        Args:
            embedding: patch embedding of a timm model.
            args: positional arguments of the embedding. The first is a batch of images, ``[batch, channels, height, width]``.
        """
        self.enter(embedding.dynamic_feat_size(args[0].shape[-2:]))


class TimmHost(HostLibrary):
    """Implementation of attention replacement for timm's vision transformer classes ``VisionTransformer`` and ``Eva``."""

    package = "timm"

    @override
    def layers(self, model: Any) -> list[Any]:
        transformer = vision_transformer(model)
        supported = [module for module in transformer.modules() if _is_known(module)]
        blocks_supported = [any(map(_is_known, block.modules())) for block in transformer.blocks]
        if supported and not all(blocks_supported):
            raise ValueError(
                f"the attention of block {blocks_supported.index(False)} is not supported, unlike that of other blocks"
            )
        if not supported:
            raise ValueError(
                f"{type(model).__name__} has no supported attention (its blocks, relative positions or products differ); for "
                "your own model use lightning_mhla.MHLA in place of its attention"
            )
        return supported

    @override
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]) -> None:
        transformer = vision_transformer(model)
        drop = getattr(transformer, "patch_drop", None)
        if drop is not None and not isinstance(drop, nn.Identity):
            raise ValueError(
                "the model drops patches (patch_drop_rate), but blocks need all of them; build it with patch_drop_rate=0"
            )
        for index, layer in layers.items():
            if layer.attn_drop.p:
                raise ValueError(
                    f"layer {index} drops attention weights (attn_drop_rate={layer.attn_drop.p}), which the new attention "
                    "does not; build the model with attn_drop_rate=0"
                )
        for index, config in configs.items():
            if layers[index].proj.weight.dtype == torch.float16:
                refuse_float16(index, Attention.kinds[config.kind])
            blocks = blocks_along(2, config)
            if Attention.kinds[config.kind].mixes_prefix:
                check_prefix(transformer.num_prefix_tokens, blocks, transformer.patch_embed.grid_size)

    @override
    def replace(
        self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]
    ) -> dict[int, Attention]:
        from lightning_mhla.swap.timm_attention import install

        transformer = vision_transformer(model)
        grid = TimmPatchGrid(transformer.num_prefix_tokens)
        built = {index: _build(layer, configs[index], grid.prefix_tokens) for index, layer in layers.items()}
        for index, attention in built.items():
            install(layers[index], attention, grid)
        if built:
            transformer.patch_embed.register_forward_pre_hook(grid)
        return built

    @override
    def use_original(self, model: Any, layer: Any, original: bool) -> bool:
        previous: bool = layer.as_before
        layer.as_before = original
        return previous


def vision_transformer(model: Any) -> Any:
    """Return the vision transformer in a timm model: the model itself, or the one inside a ``features_only`` model.

    Raises:
        ValueError: if the model does not contain timm's ``VisionTransformer`` or ``Eva``.
    """
    import timm.models

    kinds = tuple(getattr(timm.models, name) for name in MODELS)
    transformers = [module for module in model.modules() if isinstance(module, kinds)]
    if not transformers:
        raise ValueError(
            f"{type(model).__name__} is not a vision transformer with global attention; attention can be swapped in timm's "
            f"{' and '.join(MODELS)} and classes derived from them; for your own model use lightning_mhla.MHLA"
        )
    return transformers[0]


def _is_known(module: nn.Module) -> bool:
    """Return whether a module is a timm attention module whose attention can be replaced or was replaced.

    Subclasses of timm's attention classes are not supported, because they may compute something different.
    """
    kind = type(module)
    return hasattr(module, "swapped") or f"{kind.__module__}.{kind.__name__}" in ATTENTION


def _build(layer: Any, config: AttentionConfig, prefix_tokens: int) -> Attention:
    """Build the new attention for a timm attention module. The module keeps its own projections.

    Args:
        layer: timm attention module.
        config: configuration of the new attention.
        prefix_tokens: number of class and register tokens.
    """
    blocks = blocks_along(2, config)
    return build_beside(
        layer.proj.weight,
        replace(config, rotary=False),
        layer.proj.out_features,
        layer.num_heads,
        BlockLayout(blocks, blocks, prefix_tokens=prefix_tokens),  # the smallest grid; replaced by that of each image
        key_value_heads=getattr(layer, "num_kv_heads", layer.num_heads),
        key_width=layer.head_dim,
        value_width=layer.head_dim,
    )
