"""Replacement of the self-attention in language models, text encoders and image encoders from transformers.

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    swap_attention(model, AttentionConfig(block_size=64, mixing="exponential"))
    model.generate(**tokenizer("def ", return_tensors="pt"))

The model's own code still projects and normalizes queries and keys and applies the rotary embedding. The new attention is
called through transformers' attention interface and applies its feature map afterwards. Its output therefore depends on
absolute positions, not only on distances between tokens. If rows are padded on the left, pass ``position_ids``, as ``generate``
does.
The parameters of the new attention have names that contain ``.swapped.``.

In language models, generation stores a recurrent state in transformers' cache in place of keys and values. The size of this
state is constant with ``mixing="exponential"``. Rows may be padded on either side: the first block of a row begins at its first
token that is not padding. Documents packed in one row do not attend to each other, provided that transformers separates them in
the attention mask or the positions.

In text encoders, every token attends to all others. A text shorter than ``max_position_embeddings`` has fewer blocks, and uses
only the mixing coefficients of these blocks. Image encoders need ``block_grid`` instead of ``block_size``.
"""

# Longer than other modules because the differences between families of transformers models are handled in one place.

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout, WindowedMHLA
from lightning_mhla.attention.positions import PositionLimit
from lightning_mhla.swap.host import HostLibrary, TokenGrid, blocks_along, build_beside, check_prefix, refuse_float16
from lightning_mhla.swap.transformers_cross import TransformersCross

DECODERS = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Olmo", "Olmo2", "Phi", "Phi3", "GPTNeoX", "GPT2"
)  # fmt: skip
"""Supported language models: first part of the class names of each model family.

Their causal self-attention calls transformers' attention interface with queries and keys already rotated by their positions.
"""

TEXT_ENCODERS = ("Bert", "Roberta", "XLMRoberta", "Electra", "DistilBert", "ModernBert", "Siglip")
"""Supported text encoders: first part of the class names of each model family. Their attention has no causal mask."""

IMAGE_ENCODERS = {"ViT": 1, "DeiT": 2, "Dinov2": 1, "Dinov2WithRegisters": 1, "DINOv3ViT": 1, "Siglip": 0, "CLIP": 1}
"""Supported image encoders: first part of the class names of each model family, and number of tokens before the registers."""

FAMILIES = tuple(dict.fromkeys((*DECODERS, *TEXT_ENCODERS, *IMAGE_ENCODERS)))
NAMES = {f"{family}{name}": family for family in FAMILIES for name in ("Attention", "SelfAttention")}
"""Model family by the class name of its attention module."""
WRAPPERS = tuple(f"{family}Attention" for family in ("Bert", "Roberta", "XLMRoberta", "Electra"))
"""Class names of modules that only wrap the attention module of their family."""

RELATIVE = (
    "relative_attention", "relative_attention_num_buckets", "use_relative_position_bias", "use_shared_relative_position_bias"
)  # fmt: skip
"""Configuration entries of models that add relative position biases to their scores (T5, MPNet, DeBERTa, BEiT)."""


class TransformersPatchGrid(TokenGrid):
    """Hook that records the number of patches along each axis of the current images of a transformers model.

    The hook is a forward hook of the model's patch convolution.
    """

    def __call__(self, convolution: Any, args: tuple[Any, ...], output: Tensor) -> None:
        """Record the number of patches along the height and width of the current images.

        Args:
            convolution: the patch convolution; not used.
            args: positional arguments of the convolution; not used.
            output: output of the convolution, ``[B, C, H, W]`` for B images of H x W patches with C features each.
        """
        self.enter(tuple(output.shape[-2:]))


class TransformersHost(HostLibrary):
    """Implementation of attention replacement for language models, text encoders and image encoders from transformers."""

    package = "transformers"
    cross = TransformersCross()

    @override
    def layers(self, model: Any) -> list[Any]:
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__} is an encoder-decoder model, in which only cross-attention can be replaced: pass "
                "cross=True"
            )
        supported = [module for module in model.modules() if _is_known(module)]
        if model.config.get_text_config() is not model.config and not _has_only_images(model, supported):
            raise ValueError(
                f"{type(model).__name__} combines text with other inputs, which is not supported; swap a model of only text "
                "or only images"
            )
        if not supported:
            raise ValueError(
                f"{type(model).__name__} {_reason(model.config)}; attention can be swapped in {', '.join(FAMILIES)}; for "
                "your own model use lightning_mhla.MHLA in place of its attention"
            )
        return supported

    @override
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]) -> None:
        if windows := [index for index, layer in layers.items() if _window(layer)]:
            full = [index for index, layer in enumerate(self.layers(model)) if not _window(layer)]
            way = f"replace others: layers={full}" if full else "a model with full attention is needed"
            raise ValueError(
                f"layer {windows[0]} attends within a window of {_window(layers[windows[0]])} tokens, which the new "
                f"attention would ignore; {way}"
            )
        for index, layer in layers.items():
            _check_layer(index, layer, model)
        for index, config in configs.items():
            if (patches := _patches(model)) is not None:
                size = layers[index].config.image_size
                size = (size, size) if isinstance(size, int) else size
                tokens = [length // step for length, step in zip(size, patches.stride, strict=True)]
                blocks = blocks_along(2, config)
                if Attention.kinds[config.kind].mixes_prefix:
                    check_prefix(_prefix_tokens(layers[index]), blocks, tokens)
            elif Attention.kinds[config.kind].uses_blocks and config.block_size is None:
                raise ValueError(
                    f"layer {index}: attention kind {config.kind!r} needs block_size, the number of tokens in a block"
                    + (f", not block_grid={config.block_grid}" if config.block_grid else "")
                )
            if _floating(layers[index]).dtype == torch.float16:
                refuse_float16(index, Attention.kinds[config.kind])

    @override
    def replace(
        self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]
    ) -> dict[int, Attention]:
        from lightning_mhla.swap.transformers_attention import install, refuse_weights

        patches, grid = _patches(model), None
        if patches is not None and layers:
            grid = TransformersPatchGrid(_prefix_tokens(next(iter(layers.values()))))
        built = {index: _build(layer, configs[index], grid) for index, layer in layers.items()}
        for index, attention in built.items():
            install(layers[index], attention, grid)
            if isinstance(attention, WindowedMHLA) and attention.causal:
                attention.context = _context(model, layers[index])
        if grid is not None:
            assert patches is not None
            patches.register_forward_hook(grid)
        if built:
            model.register_forward_pre_hook(refuse_weights, with_kwargs=True)
            if grid is None:
                inner = _inner_model(model)
                position = list(inspect.signature(inner.forward).parameters).index("attention_mask")
                inner.register_forward_pre_hook(partial(_hand_on_mask, position), with_kwargs=True)
        return built

    @override
    def candidates(self, model: Any) -> list[Any]:
        return [] if getattr(model.config, "is_encoder_decoder", False) else self.layers(model)

    @override
    def use_original(self, model: Any, layer: Any, original: bool) -> bool:
        from lightning_mhla.swap.transformers_attention import NAME

        previous: bool = layer.config._attn_implementation != NAME
        layer.config._attn_implementation = model.config._attn_implementation if original else NAME
        return previous

    @override
    def real_tokens(self, options: Mapping[str, Any], x: Tensor) -> Tensor | None:
        from lightning_mhla.swap.transformers_masks import own_keys

        return own_keys(options.get("attention_mask"), x)


def _context(model: Any, layer: Any) -> PositionLimit | None:
    """Return the limit on the rotary positions of a language model: the context length in its configuration, in tokens.

    Args:
        model: language model.
        layer: one of its attention modules without a sliding window, whose configuration has ``max_position_embeddings``.

    Returns:
        The limit; None if the model has no rotary embedding.
    """
    for module in model.modules():
        for name in ("full_attention_inv_freq", "inv_freq"):  # Gemma3 has one for each type of layers
            if hasattr(module, name):
                # read in each call: models with a dynamic embedding change the frequencies, and loading does
                return PositionLimit(partial(getattr, module, name), layer.config.max_position_embeddings)
    return None


def _is_known(module: nn.Module) -> bool:
    """Return whether a module belongs to one of the transformers attention classes whose attention can be replaced.

    Raises:
        ValueError: if the module's class is a subclass of a supported class, because it may compute something different.
    """
    kind = type(module)
    supported_class = next((base for base in kind.__mro__ if _named(base)), kind)
    if supported_class is not kind:
        raise ValueError(
            f"{kind.__name__} is derived from {supported_class.__name__} and may change its attention, so it is not supported"
        )
    return _named(kind)


def _named(kind: type) -> bool:
    supported_name = kind.__name__ in NAMES and kind.__name__ not in WRAPPERS
    return supported_name and kind.__module__.startswith("transformers.models.")


def _inner_model(model: Any) -> Any:
    """Return the innermost transformers model that contains all replaced layers, such as the decoder in a language model."""
    from transformers import PreTrainedModel

    inner, layers = model, {id(module) for module in model.modules() if hasattr(module, "swapped")}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and layers <= {id(part) for part in module.modules()}:
            # modules() yields a module before its parts, so the last match is the innermost one.
            inner = module
    return inner


def _hand_on_mask(
    position: int, model: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook that passes the model's ``attention_mask`` to the attention modules as keyword argument ``given_mask``.

    Args:
        position: index of ``attention_mask`` among the positional arguments of the model's forward pass.
        model: model that is called.
        args: positional arguments of the call.
        options: keyword arguments of the call.

    Returns:
        The positional arguments, unchanged, and the keyword arguments with ``given_mask``: a one-item tuple with the mask that
        the model was called with, or with None if it was called without one.
    """
    from lightning_mhla.swap.transformers_masks import GIVEN

    mask = args[position] if len(args) > position else options.get("attention_mask")
    return args, {**options, GIVEN: (mask,)}


def _family(layer: Any) -> str:
    return NAMES[type(layer).__name__]


def _has_only_images(model: Any, layers: list[Any]) -> bool:
    """Return whether all supported attention layers of a model belong to the same image encoder.

    Args:
        model: model from the transformers library.
        layers: supported attention modules of the model.
    """
    return (
        _patches(model) is not None
        and len({layer.config.model_type for layer in layers}) == 1
        and all(_family(layer) in IMAGE_ENCODERS for layer in layers)
    )


def _prefix_tokens(layer: Any) -> int:
    return IMAGE_ENCODERS[_family(layer)] + (getattr(layer.config, "num_register_tokens", None) or 0)


def _patches(model: Any) -> nn.Conv2d | None:
    """Return the convolution that turns images into patches; None if the model has no such convolution."""
    modules = model.named_modules()
    return next((module for name, module in modules if isinstance(module, nn.Conv2d) and "patch_embed" in name), None)


def _check_layer(index: int, layer: Any, model: Any) -> None:
    """Check that an attention layer has no feature that the new attention lacks, such as dropout of attention weights.

    Args:
        index: number of the layer, for error messages.
        layer: attention module of the layer.
        model: model that contains the layer.

    Raises:
        ValueError: if the layer limits its scores (``attn_logit_softcapping``), uses dropout on attention weights, or has
            offloaded weights. Also if a layer of a language model is not causal, if a layer of an encoder is causal, or if the
            layer belongs to an image encoder and ``model`` has no patch convolution.
    """
    if (cap := getattr(layer, "attn_logit_softcapping", None)) is not None:
        raise ValueError(
            f"layer {index} caps its scores at {cap} (attn_logit_softcapping), which the new attention does not"
        )
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
        if share := getattr(layer.config, name, 0):
            raise ValueError(
                f"layer {index} drops attention weights ({name}={share}), which the new attention does not; load the model "
                f"with {name}=0"
            )
    family = _family(layer)
    causal = layer.is_causal and getattr(layer.config, "is_causal", True) is not False
    if family in DECODERS and not causal:
        raise ValueError(f"layer {index} sees later tokens too; of this family, only causal attention can be swapped")
    if family not in DECODERS and (layer.is_causal or getattr(layer.config, "is_causal", False)):
        raise ValueError(
            f"layer {index} is causal (is_decoder, is_causal); of this family, only encoders can be swapped"
        )
    if family not in TEXT_ENCODERS and family not in DECODERS and _patches(model) is None:
        raise ValueError(
            f"{type(model).__name__} has no image patches; of this family, only image encoders are supported"
        )
    if any(p.is_meta for p in layer.parameters()) and any(hasattr(m, "_hf_hook") for m in layer.modules()):
        raise ValueError(f"the weights of layer {index} are offloaded; swap before the model is dispatched")


def _window(layer: Any) -> int | None:
    """Return the width of a layer's sliding window in tokens; None if the layer attends to all tokens."""
    return layer.sliding_window if hasattr(layer, "sliding_window") else getattr(layer.config, "sliding_window", None)


def _reason(config: Any) -> str:
    """Return the reason why a model's attention cannot be replaced, such as ``has no supported attention``.

    The text completes a sentence that begins with the name of the model's class.
    """
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "adds biases by distance to its scores (ALiBi), which linear attention does not have"
    if any(getattr(config, name, None) for name in RELATIVE):
        return "adds biases by relative position to its scores, which linear attention does not have"
    return "has no supported attention"


def _floating(layer: Any) -> Tensor:
    """Return a floating-point weight of a layer. The new attention gets the dtype and device of this weight.

    If all weights are quantized, the result is an empty tensor with the dtype of the layer's configuration.
    """
    weights = list(layer.parameters())
    for weight in weights:
        if weight.is_floating_point():
            return weight
    dtype = layer.config.dtype or torch.float32
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # saving a model turns it into a name
    return torch.empty(0, dtype=torch_dtype, device=weights[0].device)


def _build(layer: Any, config: AttentionConfig, grid: TransformersPatchGrid | None) -> Attention:
    """Build the new attention for a transformers attention module. The module keeps its own projections.

    Args:
        layer: transformers attention module.
        config: configuration of the new attention.
        grid: hook that records the token grid of the current image; None for text.
    """
    layer_config = layer.config
    if grid is not None:
        blocks = blocks_along(2, config)
        layout = BlockLayout(blocks, blocks, prefix_tokens=grid.prefix_tokens)  # replaced by that of each image
    else:
        tokens = layer_config.max_position_embeddings
        size = config.block_size if Attention.kinds[config.kind].uses_blocks else None
        layout = BlockLayout((tokens,), block_size=size or tokens)
    names = ("head_dim", "head_size", "attention_head_size")
    width = next(getattr(layer, name) for name in names if hasattr(layer, name))
    heads = layer_config.num_attention_heads
    return build_beside(
        _floating(layer),
        replace(config, rotary=False),
        layer_config.hidden_size,
        heads,
        layout,
        key_value_heads=heads // getattr(layer, "num_key_value_groups", 1),
        key_width=width,
        value_width=width,
        causal=_family(layer) in DECODERS,
    )
