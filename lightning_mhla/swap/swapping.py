"""Replacement of self-attention and cross-attention in pretrained models from diffusers, timm and transformers.

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    swap_attention(model, AttentionConfig(block_size=64, mixing="exponential"))
    model.save_pretrained("swapped")
    model = load_swapped("swapped")

The projections of queries, keys, values and outputs and the norms of queries and keys keep their names and weights. Parameters
that the new attention adds are not initialized at random. The output gate and the local convolution (``lepe``) initially do not
change the output.

:mod:`lightning_mhla.swap.diffusers`, :mod:`lightning_mhla.swap.timm` and :mod:`lightning_mhla.swap.transformers` describe the
details for each library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from operator import index
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from lightning_mhla.attention import MHLA, Attention, AttentionConfig, CrossAttention, CrossAttentionConfig
from lightning_mhla.swap.diffusers_classes import DiffusersFolders
from lightning_mhla.swap.groups import LayerGroup
from lightning_mhla.swap.host import CROSS, SAVED, HostLibrary
from lightning_mhla.swap.layers import KEEP, kinds_of_layers
from lightning_mhla.swap.saved import restored
from lightning_mhla.swap.timm_folders import TimmFolders
from lightning_mhla.swap.transformers_classes import TransformersFolders
from lightning_mhla.system.untrusted import read_json, reason

HOSTS: tuple[HostLibrary, ...] = (DiffusersFolders(), TimmFolders(), TransformersFolders())
"""Libraries in whose models attention can be replaced."""

HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
"""Pattern of the names of models on the hub, ``NAME`` or ``OWNER/NAME``."""


def host_of(model: nn.Module) -> HostLibrary:
    """Return the implementation of attention replacement for the library to which a model belongs.

    Raises:
        ValueError: if the model does not belong to diffusers, timm or transformers.
    """
    for host in HOSTS:
        if host.claims(model):
            return host
    *first_packages, last_package = (host.package for host in HOSTS)
    raise ValueError(
        f"{type(model).__name__} is not a model of {', '.join(first_packages)} or {last_package}; for your own model "
        "use lightning_mhla.MHLA in place of its attention"
    )


@overload
def swap_attention(
    model: Any,
    attention: AttentionConfig,
    layers: Sequence[int] | None = None,
    layer_kinds: Sequence[str] | None = None,
    *,
    cross: Literal[False] = False,
) -> dict[int, Attention]: ...


@overload
def swap_attention(
    model: Any,
    attention: AttentionConfig,
    layers: Sequence[int] | None = None,
    layer_kinds: Sequence[str] | None = None,
    *,
    cross: Literal[True],
) -> dict[int, CrossAttention]: ...


def swap_attention(
    model: Any,
    attention: AttentionConfig,
    layers: Sequence[int] | None = None,
    layer_kinds: Sequence[str] | None = None,
    *,
    cross: bool = False,
) -> Any:
    """Replace the self-attention or the cross-attention of a pretrained model in place.

    To replace both, call the function twice.

    Args:
        model: diffusers transformer, timm vision transformer, or transformers language model, encoder or encoder-decoder model.
        attention: configuration of the new attention. Its ``rotary`` is ignored; the model's own rotary embedding applies. For
            cross-attention, a :class:`CrossAttentionConfig` also sets the blocks of the context.
        layers: numbers of the layers to replace, from 0; None for all layers.
        layer_kinds: alternative to ``layers``: attention kinds for the first layers, repeated until all layers have one.
            ``"keep"`` keeps a layer, and ``"replace"`` stands for ``attention.kind``. For example,
            ``["keep", "replace", "replace"]`` replaces two of every three layers.
        cross: True to replace cross-attention instead of self-attention. This is the attention ``attn2`` in diffusers
            transformers, and the decoder's attention to the encoder in encoder-decoder models from transformers.

    Returns:
        Mapping from layer number to the new attention module.

    Raises:
        ValueError: if the model or its attention is not supported, if ``layers`` or ``layer_kinds`` does not fit the model or
            both are given, if the configured blocks do not match the axes of the model's token grid, or if the attention was
            replaced before.
    """
    host = host_of(model)
    if isinstance(attention, CrossAttentionConfig) and not cross:
        raise ValueError("a CrossAttentionConfig describes cross-attention; pass cross=True, or an AttentionConfig")
    group: LayerGroup[Any, Any] = host.cross if cross else host
    all_layers = group.layers(model)
    saved = host.record(model) or {"attention": asdict(AttentionConfig()), "layers": {}}
    if CROSS in saved if cross else saved["layers"]:
        raise ValueError("the model's attention is already swapped; load the model again to swap it differently")
    if cross:
        attention = host.cross.complete(model, _for_cross(attention))
    kinds = kinds_of_layers(attention, len(all_layers), layers, layer_kinds)
    record = {
        "attention": asdict(attention),
        "layers": {str(index): kind for index, kind in enumerate(kinds) if kind != KEEP},
    }
    swapped = group.put_in(model, record)
    # Only after the replacement, because a model for which `put_in` raised an error has no new attention to record.
    if swapped:
        host.remember(model, {**saved, CROSS: record} if cross else {**saved, **record})
    return swapped


def _for_cross(attention: AttentionConfig) -> CrossAttentionConfig:
    if isinstance(attention, CrossAttentionConfig):
        return attention
    return CrossAttentionConfig(**{field.name: getattr(attention, field.name) for field in fields(AttentionConfig)})


@overload
def swapped_layers(model: nn.Module, *, cross: Literal[False] = False) -> dict[int, Attention]: ...


@overload
def swapped_layers(model: nn.Module, *, cross: Literal[True]) -> dict[int, CrossAttention]: ...


def swapped_layers(model: nn.Module, *, cross: bool = False) -> Any:
    """Return the attention modules that :func:`swap_attention` inserted into a model, as a dict by layer number.

    The dict is empty if no such attention was replaced.

    Args:
        model: model from diffusers, timm or transformers.
        cross: whether to return the new cross-attention instead of the new self-attention.

    Raises:
        ValueError: if the model does not belong to one of these libraries.
    """
    host = host_of(model)
    return (host.cross if cross else host).swapped(model)


def resize_blocks(model: Any, block_grid: Sequence[int]) -> None:
    """Change the number of token blocks in the new attention of an image or video model, for example to process larger images.

    The mixing coefficients of self-attention are resized to the new number of blocks, which is also stored in the model's
    configuration. Attention of kind ``mhla_window`` applies softmax inside blocks. More blocks make this kind faster on large
    images, because each block covers a smaller part of the image.

    Args:
        model: model whose attention :func:`swap_attention` replaced; changed in place. At least one layer has attention of kind
            ``mhla`` or ``mhla_window``.
        block_grid: new number of blocks along each axis of the token grid.

    Raises:
        ValueError: if no layer has attention of kind ``mhla`` or ``mhla_window``, or if ``block_grid`` does not have one
            positive entry for each axis of the model's token grid. Also if the kind is ``mhla`` and the model has class or
            register tokens, because the mixing coefficients then have a fixed size.
        TypeError: if an entry of ``block_grid`` is not an integer.
    """
    new, host = tuple(map(index, block_grid)), host_of(model)
    mixed = [attention for attention in host.swapped(model).values() if isinstance(attention, MHLA)]
    if not mixed or any(len(attention.config.block_grid or ()) != len(new) for attention in mixed) or min(new) < 1:
        raise ValueError(
            f"blocks cannot be resized to {list(new)}: the model needs a swapped layer of kind mhla or mhla_window whose "
            "block_grid has the same number of axes"
        )
    if any(getattr(attention.mixing, "prefix_tokens", 0) for attention in mixed):
        raise ValueError(
            "blocks cannot be resized: coefficients of blocks with prefix tokens, which have no position on the grid, keep "
            "their size; mhla_window has no such coefficients"
        )
    for attention in mixed:
        attention.mixing.resize(new)
        attention.config = replace(attention.config, block_grid=list(new))
    host.use_blocks(model, new)
    record = dict(host.record(model) or {})
    host.remember(model, {**record, "attention": {**record["attention"], "block_grid": list(new)}})


def is_swapped(folder: str | Path) -> bool:
    """Return whether ``folder`` holds a model that was saved after its attention was replaced."""
    path = Path(folder) / "config.json"
    return path.is_file() and SAVED in read_json(path)


def load_swapped(
    folder: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    torch_dtype: torch.dtype | str | None = None,
    **options: Any,
) -> Any:
    """Load a saved model with replaced attention, and put it in evaluation mode.

    The model's library, such as transformers, reads the weights with its own loading function. If a folder holds several weight
    files, the library's usual order of preference applies, such as safetensors before ``.bin``.

    Args:
        folder: folder of the model, or its name on the Hugging Face Hub.
        dtype: dtype of the weights, or its name. Mixing coefficients, and weights that the library always keeps in float32, are
            not converted. None or ``"auto"`` for the dtype in which the weights were saved.
        torch_dtype: older name of ``dtype``.
        options: further arguments of the library's ``from_pretrained``, such as ``variant``, ``device_map``, ``subfolder``,
            ``use_safetensors``, ``revision`` and ``cache_dir``. timm models support only ``cache_dir``.

    Returns:
        The model with its new attention, from the same library as the original.

    Raises:
        FileNotFoundError: if the folder has no ``config.json``, or the hub does not have the model.
        ValueError: if the model's attention was never replaced, its weights do not fit, an option is unknown, or ``dtype`` and
            ``torch_dtype`` differ.
    """
    if dtype is not None and torch_dtype is not None and dtype != torch_dtype:
        raise ValueError(f"dtype={dtype} and torch_dtype={torch_dtype} are two names of the same option; pass only one")
    config = _read_config(folder, options)
    host = next((host for host in HOSTS if host.wrote(config)), None)
    if SAVED not in config or host is None:
        name = config.get("_class_name") or next(iter(config.get("architectures") or ()), "its class")
        raise ValueError(f"the attention of {folder} was never swapped; load it with {name}.from_pretrained")
    if unknown := sorted(set(options) - set(host.options)):
        raise ValueError(
            f"load_swapped has no option {unknown[0]!r} for models of {host.package}; its options are dtype, "
            f"{', '.join(host.options)}"
        )
    try:
        return host.load(str(folder), restored(config), _dtype(torch_dtype if dtype is None else dtype), options).eval()
    # torch and timm report names or shapes that do not match as RuntimeError.
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights do not match the config.json next to them: {error}") from error


def _read_config(folder: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the ``config.json`` of a model.

    Args:
        folder: folder of the model, or its name on the Hugging Face Hub.
        options: loading options, of which ``subfolder`` and those for downloads, such as ``revision``, are used.

    Raises:
        FileNotFoundError: if there is no such file or model.
    """
    local, subfolder = Path(folder), options.get("subfolder") or ""
    if not local.exists() and HUB_NAME.fullmatch(str(folder)):
        from huggingface_hub import hf_hub_download

        names = ("revision", "token", "cache_dir", "force_download", "local_files_only")
        hub_options = {name: options[name] for name in names if name in options}
        try:
            return read_json(
                Path(hf_hub_download(str(folder), "config.json", subfolder=subfolder or None, **hub_options))
            )
        except OSError as error:
            raise FileNotFoundError(f"{folder} is neither a folder nor a model on the hub ({reason(error)})") from error
    path = local / subfolder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no config.json; pass a folder that save_pretrained wrote")
    return read_json(path)


def _dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """Convert the name of a dtype to the dtype, and return a dtype unchanged. The result for None and ``"auto"`` is None.

    Raises:
        ValueError: if the value is not a floating-point dtype or the name of one.
    """
    if name in (None, "auto"):
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r} is not a dtype of weights, such as torch.bfloat16 or 'bfloat16'")
    return dtype


def swap_saved(model: Any, saved: Mapping[str, Any]) -> None:
    """Replace the attention of a pretrained model in place, with the same options as in a saved model.

    Args:
        model: model with its original attention.
        saved: entry ``swapped_attention`` from the saved model's ``config.json``.

    Raises:
        ValueError: if the model is not supported, or its attention was replaced before.
    """
    host = host_of(model)
    if host.record(model) is not None:
        raise ValueError("the model's attention is already swapped; load the model again to swap it differently")
    host.restore(model, saved)
