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

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_mhla.attention import MHLA, Attention, AttentionConfig
from lightning_mhla.swap.diffusers import SwappedAttention, attention_layers
from lightning_mhla.swap.diffusers_classes import DiffusersFolders
from lightning_mhla.swap.host import SAVED, HostLibrary
from lightning_mhla.swap.layers import KEEP, kinds_of_layers
from lightning_mhla.swap.saved import restored
from lightning_mhla.swap.timm_folders import TimmFolders
from lightning_mhla.swap.transformers_classes import TransformersFolders
from lightning_mhla.system.untrusted import read_json, reason

HOSTS: tuple[HostLibrary, ...] = (DiffusersFolders(), TimmFolders(), TransformersFolders())
"""Libraries whose models can be swapped."""

HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
"""Names of models on the hub."""


def host_of(model: nn.Module) -> HostLibrary:
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
    record = {
        "attention": asdict(attention),
        "layers": {str(index): kind for index, kind in enumerate(kinds) if kind != KEEP},
    }
    swapped = host.put_in(model, record)
    if swapped:
        host.remember(model, record)
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


def load_swapped(
    folder: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    torch_dtype: torch.dtype | str | None = None,
    **options: Any,
) -> Any:
    """A model that ``save_pretrained`` wrote after :func:`swap_attention`, with its attention, in evaluation mode.

    The library's own ``from_pretrained`` reads the weights: its index before single files, a variant where one is asked
    for, safetensors before ``.bin``, which is read without running code.

    Args:
        folder: folder of the model, or a name on the hub.
        dtype: dtype of the weights, but those that the library and mixing keep in float32; None as they were saved.
        torch_dtype: the same by its other name.
        options: options of the library's ``from_pretrained``: ``variant``, ``device_map``, ``subfolder``,
            ``use_safetensors``, ``revision``, ``cache_dir`` and their like. timm takes ``cache_dir`` only.

    Raises:
        FileNotFoundError: when there is no such model in the folder.
        ValueError: when its attention was never swapped, weights do not fit, or an option is unknown.
    """
    if dtype is not None and torch_dtype is not None and dtype != torch_dtype:
        raise ValueError(f"dtype={dtype} and torch_dtype={torch_dtype} are two names of one option; give one of them")
    config = _read_config(folder, options)
    host = next((host for host in HOSTS if host.wrote(config)), None)
    if SAVED not in config or host is None:
        name = config.get("_class_name") or next(iter(config.get("architectures") or ()), "its class")
        raise ValueError(f"the attention of {folder} was never swapped; load it with {name}.from_pretrained")
    if unknown := sorted(set(options) - set(host.options)):
        raise ValueError(
            f"load_swapped: {host.package} takes no option {unknown[0]!r} here; it takes dtype, {', '.join(host.options)}"
        )
    try:
        return host.load(str(folder), restored(config), _dtype(torch_dtype if dtype is None else dtype), options).eval()
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights are not those of the config.json beside them: {error}") from error


def _read_config(folder: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a folder, or of a model on the hub."""
    local, subfolder = Path(folder), options.get("subfolder") or ""
    if not local.exists() and HUB_NAME.fullmatch(str(folder)):
        from huggingface_hub import hf_hub_download

        names = ("revision", "token", "cache_dir", "force_download", "local_files_only")
        chosen = {name: options[name] for name in names if name in options}
        try:
            return read_json(Path(hf_hub_download(str(folder), "config.json", subfolder=subfolder or None, **chosen)))
        except OSError as error:
            raise FileNotFoundError(f"{folder} is neither a folder nor a model on the hub ({reason(error)})") from error
    path = local / subfolder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no config.json; give a folder that save_pretrained wrote")
    return read_json(path)


def _dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of a name.

    Raises:
        ValueError: for any other value.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) and name != "auto" else name
    if name in (None, "auto"):
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r} is not a dtype of weights, such as torch.bfloat16 or 'bfloat16'")
    return dtype


def swap_saved(model: Any, saved: Mapping[str, Any]) -> None:
    """Swap as a saved model's config says."""
    host = host_of(model)
    if host.record(model) is not None:
        raise ValueError("the model's attention is swapped already; load it again to swap it otherwise")
    host.put_in(model, saved)
    host.remember(model, saved)
