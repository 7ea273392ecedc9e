"""Other attention for pretrained models: ``swap_attention`` replaces the self-attention of a diffusers transformer.

    model = WanTransformer3DModel.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", subfolder="transformer")
    swap_attention(model, AttentionConfig(block_grid=[3, 5, 10], normalize=False, gate=True))
    model.save_pretrained("swapped")
    model = load_swapped("swapped")

Projections of queries, keys, values and outputs, and the norms of queries and keys, stay where they are and as they are.
The new attention is the *processor* of diffusers' attention module, so that the model's other names do not change, and
what it adds (mixing coefficients, output norm, gate) is found under ``...attn1.processor``. Its start depends on nothing
random: the gate is open and ``lepe`` adds nothing. A swapped model takes images or clips of any size: blocks are fitted to
each, and where an axis has fewer tokens than blocks, the coefficients are resized (:func:`mhla_kernels.resize_mixing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mhla.attention import MHLA, Attention, AttentionConfig
from lightning_mhla.swap.diffusers import (
    SwappedAttention,
    TokenGrid,
    attention_layers,
    build_swapped,
    check_supported,
)
from lightning_mhla.swap.layers import KEEP, kinds_of_layers
from lightning_mhla.system.untrusted import read_json

SAVED = "swapped_attention"
"""Entry of a diffusers model's ``config`` that says what was swapped."""


def swap_attention(
    model: Any,
    attention: AttentionConfig,
    layers: Sequence[int] | None = None,
    layer_kinds: Sequence[str] | None = None,
) -> dict[int, Attention]:
    """Replace self-attention of a diffusers transformer in place; see the module's description.

    Args:
        model: a ``WanTransformer3DModel``, ``DiTTransformer2DModel``, ``SanaTransformer2DModel`` or another of
            :data:`PROCESSORS`.
        attention: what comes in. ``rotary`` is the model's own: wherever it turns queries and keys, so does the new
            attention, after the feature map; ``normalize`` must then be off.
        layers: numbers of those to replace; None for all.
        layer_kinds: kinds of the layers instead, repeated to the depth; ``"keep"`` for those that stay, ``"replace"`` for
            ``attention.kind``: ``["keep", "replace", "replace"]`` replaces two of three.

    Returns:
        The new attention by the number of its layer.

    Raises:
        ValueError: for another kind of model or attention, blocks that do not fit its axes, or one that is swapped already.
    """
    hosts = attention_layers(model)
    if SAVED in model.config:
        raise ValueError("the model's attention is swapped already; load it again to swap it otherwise")
    kinds = kinds_of_layers(attention, len(hosts), layers, layer_kinds)
    check_supported(model, {index: host for index, host in enumerate(hosts) if kinds[index] != KEEP})
    configs = {
        index: replace(attention.with_kind(kind).at_layer(index), rotary=hasattr(model, "rope"))
        for index, kind in enumerate(kinds)
        if kind != KEEP
    }
    for config in configs.values():
        if config.rotary and "rotary" not in Attention.kinds[config.kind].handles:
            raise ValueError(
                f"{type(model).__name__} turns queries and keys by their positions, and attention kind {config.kind!r} does "
                "not take rotary: handle inputs.rotary, and name it in handles"
            )
    patch = model.config.patch_size
    axes = len(patch) if isinstance(patch, Sequence) else 2
    grid = TokenGrid(tuple(patch) if isinstance(patch, Sequence) else (patch, patch))
    swapped = {index: build_swapped(hosts[index], config, axes) for index, config in configs.items()}
    for index, built in swapped.items():
        hosts[index].set_processor(SwappedAttention(built, built.layout.block_grid, grid))
    if configs:
        model.register_forward_pre_hook(grid, with_kwargs=True)
        saved = {
            "attention": asdict(attention),
            "layers": {str(index): config.kind for index, config in configs.items()},
        }
        model.register_to_config(**{SAVED: saved})
    return swapped


def swapped_layers(model: nn.Module) -> dict[int, Attention]:
    """The attention modules that :func:`swap_attention` put in, by the number of their layer."""
    processors = ((index, layer.processor) for index, layer in enumerate(attention_layers(model)))
    return {index: processor.attention for index, processor in processors if isinstance(processor, SwappedAttention)}


def resize_blocks(model: Any, block_grid: Sequence[int]) -> None:
    """Carry the mixing coefficients of a swapped model to other blocks, for good: for clips of another size.

    Args:
        model: swapped, with kind mhla in some layers.
        block_grid: blocks along each axis.

    Raises:
        ValueError: when no layer has blocks, or the axes are not as many.
    """
    new = tuple(block_grid)
    processors = [layer.processor for layer in attention_layers(model) if isinstance(layer.processor, SwappedAttention)]
    mixed = [processor for processor in processors if isinstance(processor.attention, MHLA)]
    if not mixed or any(len(processor.blocks) != len(new) for processor in mixed):
        raise ValueError(
            f"no blocks of a swapped attention can become {list(new)}: as many axes, and layers of kind mhla"
        )
    for processor in mixed:
        assert isinstance(processor.attention, MHLA)
        processor.attention.mixing.resize(new)
        processor.attention.config = replace(processor.attention.config, block_grid=list(new))
        processor.blocks = new
    saved = dict(model.config[SAVED])
    model.register_to_config(**{SAVED: {**saved, "attention": {**saved["attention"], "block_grid": list(new)}}})


def is_swapped(folder: str | Path) -> bool:
    """Whether ``folder`` holds a model that was saved after a swap."""
    path = Path(folder) / "config.json"
    return path.is_file() and SAVED in read_json(path)


def load_swapped(folder: str | Path, dtype: torch.dtype | None = None) -> Any:
    """A model that ``save_pretrained`` wrote after :func:`swap_attention`, with its attention, in evaluation mode.

    Args:
        folder: with ``config.json`` and safetensors files.
        dtype: dtype of the weights, but those that diffusers and mixing keep in float32; None as they were saved.

    Raises:
        FileNotFoundError: when there is no such model in the folder.
        ValueError: when its attention was never swapped, or weights do not fit.
    """
    import diffusers
    from safetensors.torch import load_file

    local = Path(folder)
    if not (local / "config.json").is_file():
        raise FileNotFoundError(f"{local} has no config.json; give a folder that save_pretrained wrote")
    config = read_json(local / "config.json")
    saved = config.pop(SAVED, None)
    if saved is None:
        raise ValueError(
            f"the attention of {local} was never swapped; load it with {config.get('_class_name')}.from_pretrained"
        )
    model = getattr(diffusers, config["_class_name"]).from_config(config)
    swap_saved(model, saved)
    files = sorted(local.glob("*.safetensors"))
    state: dict[str, Tensor] = {}
    for file in files:
        state |= load_file(file)
    if set(state) != set(model.state_dict()):
        differing = sorted(set(state) ^ set(model.state_dict()))
        raise ValueError(f"the weights in {local} are not those of its config.json: {', '.join(differing[:3])}")
    model.load_state_dict(state, assign=True)
    if dtype is not None:
        kept = (*(model._keep_in_fp32_modules or ()), "mixing")
        for name, parameter in model.named_parameters():
            if not set(kept) & set(name.split(".")):
                parameter.data = parameter.data.to(dtype)
    return model.eval()


def swap_saved(model: Any, saved: Mapping[str, Any]) -> None:
    """Swap as a saved model's config says."""
    kinds = saved["layers"]
    depth = len(attention_layers(model))
    swap_attention(
        model, AttentionConfig(**saved["attention"]), layer_kinds=[kinds.get(str(i), KEEP) for i in range(depth)]
    )
