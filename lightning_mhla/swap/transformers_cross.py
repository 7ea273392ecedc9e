"""Replacement of the cross-attention in encoder-decoder models of transformers, such as T5, BART and Whisper.

    model = AutoModelForSeq2SeqLM.from_pretrained("google-t5/t5-small", dropout_rate=0.0)
    swap_attention(model, AttentionConfig(block_size=32), cross=True)

The model's own code still computes queries, keys and values, and keeps keys and values of the encoder in its cache during
generation. The new attention is called through transformers' attention interface. The block of a query depends on the
query's position in the decoder's input. During generation, this position follows from the number of tokens in the cache of the
self-attention. Blocks of the context are counted from its first token that is not padding. Self-attention does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from lightning_mhla.attention import BlockLayout, CrossAttention, CrossAttentionConfig
from lightning_mhla.swap.groups import LayerGroup
from lightning_mhla.swap.host import build_beside, refuse_float16

CROSS_MODULES = ("EncDecAttention", "encoder_attn")
"""Possible attribute names of the cross-attention module in a decoder layer."""

CROSS_FAMILIES = (
    "T5",
    "MT5",
    "UMT5",
    "Bart",
    "MBart",
    "PLBart",
    "Blenderbot",
    "Marian",
    "Pegasus",
    "M2M100",
    "Whisper",
)
"""Supported encoder-decoder models: first part of the class names of each model family."""

CROSS_CLASSES = tuple(f"{family}Attention" for family in CROSS_FAMILIES)

LONGEST = 512
"""Number of tokens that dense mixing coefficients cover if the model, like T5, does not limit the number of tokens."""


class TransformersCross(LayerGroup[CrossAttention, CrossAttentionConfig]):
    """Implementation of attention replacement for the cross-attention of transformers' encoder-decoder models."""

    config_class = CrossAttentionConfig

    @override
    def layers(self, model: Any) -> list[Any]:
        name = type(model).__name__
        if not getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{name} is not an encoder-decoder model, so it has no cross-attention; leave out cross=True"
            )
        layers = cross_modules(model)
        wrong = sorted({type(layer).__name__ for layer in layers if not _is_supported(layer)})
        if wrong or not layers:
            raise ValueError(
                f"the cross-attention of {name}{f' ({wrong[0]})' if wrong else ''} is not supported; cross-attention can be "
                f"swapped in {', '.join(CROSS_FAMILIES)}; for your own model use lightning_mhla.MHLACrossAttention"
            )
        return layers

    @override
    def candidates(self, model: Any) -> list[Any]:
        return cross_modules(model)

    @override
    def complete(self, model: Any, config: CrossAttentionConfig) -> CrossAttentionConfig:
        longest = _longest(model.config, "max_source_positions", "max_position_embeddings", "n_positions")
        return replace(
            config,
            key_block_size=config.key_block_size or config.block_size or longest,
            key_tokens=config.key_tokens or longest,
        )

    @override
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, CrossAttentionConfig]) -> None:
        for index, layer in layers.items():
            config = configs[index]
            if share := layer.dropout:
                option = "dropout_rate" if hasattr(layer.config, "dropout_rate") else "attention_dropout"
                raise ValueError(
                    f"layer {index} drops attention weights ({option}={share}), which the new attention does not; load the "
                    f"model with {option}=0"
                )
            kind = CrossAttention.kinds.get(config.kind)
            if kind is not None and kind.uses_blocks and config.block_size is None:
                raise ValueError(
                    f"layer {index}: attention kind {config.kind!r} needs block_size, the number of tokens in a block of the "
                    "decoder's input" + (f", not block_grid={config.block_grid}" if config.block_grid else "")
                )
            if kind is not None and next(layer.parameters()).dtype == torch.float16:
                refuse_float16(index, kind)
            if any(p.is_meta for p in layer.parameters()) and any(hasattr(m, "_hf_hook") for m in layer.modules()):
                raise ValueError(f"the weights of layer {index} are offloaded; swap before the model is dispatched")

    @override
    def replace(
        self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, CrossAttentionConfig]
    ) -> dict[int, CrossAttention]:
        from lightning_mhla.swap.transformers_attention import refuse_weights
        from lightning_mhla.swap.transformers_cross_attention import install, refuse_left_padding

        built = {index: _build(layer, configs[index]) for index, layer in layers.items()}
        for index, attention in built.items():
            install(layers[index], attention)
        if any(attention.uses_blocks for attention in built.values()):
            refuse_left_padding(model.get_decoder())
        if built:
            model.register_forward_pre_hook(refuse_weights, with_kwargs=True)
        return built

    @override
    def use_original(self, model: Any, layer: Any, original: bool) -> bool:
        from lightning_mhla.swap.transformers_cross_attention import CROSS_NAME

        previous: bool = layer.config._attn_implementation != CROSS_NAME
        layer.config._attn_implementation = model.config._attn_implementation if original else CROSS_NAME
        return previous


def cross_modules(model: Any) -> list[Any]:
    """Return the cross-attention modules of a model, in the order of its layers."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in CROSS_MODULES]


def _is_supported(layer: Any) -> bool:
    kind = type(layer)
    return kind.__name__ in CROSS_CLASSES and kind.__module__.startswith("transformers.models.")


def _longest(config: Any, *names: str) -> int:
    """Return the first token limit that a model configuration sets; 512 if it sets none.

    Args:
        config: configuration of the model.
        names: configuration entries that may set a limit, in order of preference.
    """
    limits = [getattr(config, name, None) for name in names]
    return next((limit for limit in limits if limit), LONGEST)


def _build(layer: Any, config: CrossAttentionConfig) -> CrossAttention:
    """Build the new attention for a cross-attention module. The module keeps its own projections.

    Args:
        layer: cross-attention module of transformers.
        config: configuration of the new attention, in which ``key_tokens`` and ``key_block_size`` are set.
    """
    weight = next(layer.parameters())
    # T5 and its relatives name heads and widths differently from BART and its relatives.
    is_t5 = hasattr(layer, "key_value_proj_dim")
    heads, width = (layer.n_heads, layer.key_value_proj_dim) if is_t5 else (layer.num_heads, layer.head_dim)
    longest = _longest(layer.config, "max_target_positions", "max_position_embeddings", "n_positions")
    layout = BlockLayout((longest,), block_size=config.block_size or longest)
    dim = layer.d_model if is_t5 else layer.embed_dim
    return build_beside(weight, config, dim, heads, layout, key_width=width, value_width=width)
