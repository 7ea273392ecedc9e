"""Other attention for pretrained models: ``swap_attention`` replaces self-attention in models of three libraries.

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    swap_attention(model, AttentionConfig(block_size=64, mixing="exponential"))
    model.save_pretrained("swapped")
    model = load_swapped("swapped")

What the model has learned stays where it is and as it is: projections of queries, keys, values and outputs, norms of queries
and keys. What the new attention adds starts from nothing random: the gate is open and ``lepe`` adds nothing.
:mod:`lightning_mhla.swap.diffusers`, :mod:`lightning_mhla.swap.timm` and :mod:`lightning_mhla.swap.transformers` say what
each library's models do with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mhla.attention import MHLA, Attention, AttentionConfig
from lightning_mhla.swap.diffusers import DiffusersHost, SwappedAttention, attention_layers
from lightning_mhla.swap.host import SAVED, Host
from lightning_mhla.swap.layers import KEEP, kinds_of_layers
from lightning_mhla.swap.timm import TimmHost
from lightning_mhla.swap.transformers import TransformersHost
from lightning_mhla.system.untrusted import read_json

HOSTS: tuple[Host, ...] = (DiffusersHost(), TimmHost(), TransformersHost())
"""Libraries whose models can be swapped."""


def host_of(model: nn.Module) -> Host:
    """The library that a model is of.

    Raises:
        ValueError: for a model of none of :data:`HOSTS`.
    """
    for host in HOSTS:
        if host.claims(model):
            return host
    *others, last = (host.package for host in HOSTS)
    raise ValueError(
        f"{type(model).__name__} is no model of {', '.join(others)} or {last}; for your own model use lightning_mhla.MHLA in "
        "place of its attention"
    )


def swap_attention(
    model: Any,
    attention: AttentionConfig,
    layers: Sequence[int] | None = None,
    layer_kinds: Sequence[str] | None = None,
) -> dict[int, Attention]:
    """Replace self-attention of a pretrained model in place; see the module's description.

    Args:
        model: a transformer of diffusers, a vision transformer of timm, or a language
            model or an encoder of transformers.
        attention: what comes in. ``rotary`` is the model's own.
        layers: numbers of those to replace; None for all.
        layer_kinds: kinds of the layers instead, repeated to the depth; ``"keep"`` for those that stay, ``"replace"`` for
            ``attention.kind``: ``["keep", "replace", "replace"]`` replaces two of three.

    Returns:
        The new attention by the number of its layer.

    Raises:
        ValueError: for another kind of model or attention, blocks that do not fit its axes, or one that is swapped already.
    """
    host = host_of(model)
    found = host.layers(model)
    if host.record(model) is not None:
        raise ValueError("the model's attention is swapped already; load it again to swap it otherwise")
    kinds = kinds_of_layers(attention, len(found), layers, layer_kinds)
    configs = {i: attention.with_kind(kind).at_layer(i) for i, kind in enumerate(kinds) if kind != KEEP}
    chosen = {index: found[index] for index in configs}
    host.check(model, chosen, configs)
    swapped = host.replace(model, chosen, configs)
    if configs:
        numbers = {str(index): config.kind for index, config in configs.items()}
        host.remember(model, {"attention": asdict(attention), "layers": numbers})
    return swapped


def swapped_layers(model: nn.Module) -> dict[int, Attention]:
    """The attention modules that :func:`swap_attention` put in, by the number of their layer."""
    return host_of(model).swapped(model)


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
        dtype: dtype of the weights, but those that the library and mixing keep in float32; None as they were saved.

    Raises:
        FileNotFoundError: when there is no such model in the folder.
        ValueError: when its attention was never swapped, or weights do not fit.
    """
    from safetensors.torch import load_file

    local = Path(folder)
    if not (local / "config.json").is_file():
        raise FileNotFoundError(f"{local} has no config.json; give a folder that save_pretrained wrote")
    config = read_json(local / "config.json")
    saved = config.pop(SAVED, None)
    host = next((host for host in HOSTS if host.wrote(config)), None)
    if saved is None or host is None:
        name = config.get("_class_name") or next(iter(config.get("architectures") or ()), "its class")
        raise ValueError(f"the attention of {local} was never swapped; load it with {name}.from_pretrained")
    model: Any = host.build(local, config)
    swap_saved(model, saved)
    state: dict[str, Tensor] = {}
    for file in sorted(local.glob("*.safetensors")):
        state |= load_file(file)
    try:
        host.load(model, state)
    except ValueError as error:
        raise ValueError(f"{local}: {error}") from None
    if dtype is not None:
        host.cast(model, dtype)
    return model.eval()


def swap_saved(model: Any, saved: Mapping[str, Any]) -> None:
    """Swap as a saved model's config says."""
    kinds = saved["layers"]
    depth = len(host_of(model).layers(model))
    swap_attention(
        model, AttentionConfig(**saved["attention"]), layer_kinds=[kinds.get(str(i), KEEP) for i in range(depth)]
    )
