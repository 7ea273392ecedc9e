"""Descriptions of transformers models as plain data, from which the models can be rebuilt.

A checkpoint contains the description of its model, so the checkpoint can be loaded without the model's original folder.
A description is a dict with these entries:

* ``class_path``: name of the configuration class, such as ``transformers.LlamaConfig``.
* ``init_args`` (optional): options of the configuration.
* ``extra`` (optional): entries of a published ``config.json`` that the class does not know. They are kept unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint
from lightning_mhla.checkpoints.pretrained import read_trained
from lightning_mhla.swap.host import SAVED
from lightning_mhla.swap.loading import give_weights
from lightning_mhla.swap.saved import restored
from lightning_mhla.swap.swapping import is_swapped, load_swapped
from lightning_mhla.system.untrusted import read_json, reason

HOW_SAVED = (
    "transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "auto_map", "quantization_config", SAVED
)  # fmt: skip
"""Entries of a saved configuration that describe how it was saved, as do entries that begin with an underscore."""

NEW = ".swapped."
"""Separator in the names of parameters of new attention, which follows the name of the layer's attention module."""


def read_configuration(pretrained: str) -> PreTrainedConfig:
    """Load a model configuration from a folder or the Hugging Face Hub, without running any code that comes with it.

    Args:
        pretrained: path of a folder saved by transformers, or name of a model on the Hugging Face Hub.

    Raises:
        FileNotFoundError: if there is no configuration.
        ValueError: if transformers has no class for the configuration.
    """
    if is_swapped(pretrained):
        options = restored(read_json(Path(pretrained) / "config.json"))
        return AutoConfig.for_model(options.pop("model_type"), **options)
    try:
        return AutoConfig.from_pretrained(pretrained, trust_remote_code=False)
    except OSError as error:
        raise FileNotFoundError(
            f"{pretrained} is not a checkpoint, a folder or a model on the hub ({reason(error)})"
        ) from error


def describe(config: PreTrainedConfig, pretrained: str) -> dict[str, Any]:
    """Describe a model as plain data, from which :func:`build_configuration` rebuilds its configuration.

    Args:
        config: configuration of the model.
        pretrained: path or name of the model, for the error message.

    Returns:
        Dict with ``class_path`` (name of the configuration class), ``init_args`` (options of the class) and ``extra`` (entries
        of a published ``config.json`` that the class does not know). Without such entries, ``extra`` is left out.

    Raises:
        ValueError: if the model is quantized.
    """
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"{pretrained} is quantized ({method}), and its attention cannot be trained; name the model it was made from"
        )
    names = known_options(type(config))
    options = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in HOW_SAVED and not name.startswith("_")
    }
    network: dict[str, Any] = {
        "class_path": f"transformers.{type(config).__name__}",
        "init_args": {name: value for name, value in options.items() if name in names},
    }
    if extra := {name: value for name, value in options.items() if name not in names}:
        network["extra"] = extra
    return network


def read_description(pretrained: str) -> dict[str, Any]:
    """Read the description of a model, which is plain data from which the model can be built again.

    A description from a checkpoint is not checked until a model is built from it.

    Args:
        pretrained: path of a checkpoint, of a run's folder (its latest complete checkpoint is read) or of a folder saved by
            transformers; or name of a model on the Hugging Face Hub.

    Returns:
        Dict with the same entries as the result of :func:`describe`. For a timm encoder in a checkpoint, dict with the entries
        that :mod:`lightning_mhla.swap.timm_networks` documents.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if the checkpoint is damaged or contains a model that is not from transformers or timm, or if the model is
            quantized.
    """
    path = Path(pretrained)
    if not path.exists() or (path / "config.json").is_file():
        return describe(read_configuration(pretrained), pretrained)
    memory = read_header(resolve_checkpoint(path)).get("hyper_parameters") or {}
    network = memory.get("network")
    if not isinstance(network, dict):
        raise ValueError(f"{pretrained} does not contain a model of transformers or timm")
    return network


def build_configuration(network: Mapping[str, Any], required: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Build a transformers configuration from its description.

    Args:
        network: description of the model, as :func:`describe` returns it.
        required: values that options must have, by name; also used if the description does not set these options. None to
            require no values.

    Raises:
        ValueError: if the description has unknown entries or names an unknown class, if the class does not have one of the
            options or rejects its value, or if an option differs from its value in ``required``.
    """
    import transformers

    path = str(network.get("class_path", ""))
    if set(network) - {"class_path", "init_args", "extra"} or not path:
        raise ValueError(f"network takes class_path and init_args, not {dict(network)}")
    module, _, name = path.rpartition(".")
    kind = getattr(transformers, name, None) if module.split(".")[0] in ("", "transformers") else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedConfig)):
        raise ValueError(f"network: {path} is not a configuration of transformers, such as transformers.LlamaConfig")
    options = dict(network.get("init_args") or {})
    for option, value in (required or {}).items():
        if options.setdefault(option, value) != value:
            raise ValueError(f"network: {option}={options[option]} and the model's {option}={value} differ")
    names = known_options(kind)
    if wrong := sorted(set(options) - names):
        raise ValueError(f"network: {name} has no option {wrong[0]!r}; it has {', '.join(sorted(names))}")
    try:
        return kind(**{**(network.get("extra") or {}), **options})
    except ValueError as error:
        raise ValueError(f"network: {name} does not accept its options ({reason(error)})") from error


def known_options(kind: type[PreTrainedConfig]) -> set[str]:
    """Return the names of all options of a transformers configuration class."""
    # An attribute map holds other names of the same options, such as hidden_size for n_embd in GPT-2.
    return {*kind().to_dict(), *getattr(kind, "attribute_map", ())}


def load_source(network: PreTrainedModel, pretrained: str, auto_class: Any) -> None:
    """Load pretrained weights into a model, some of whose attention layers may have been replaced.

    Parameters that the replacement added keep their initial values if the weights lack them. Weights of new attention are
    ignored for layers that keep their original attention in ``network``, so a model with some replaced layers can start from
    one with all layers replaced.

    Args:
        network: model to load the weights into.
        pretrained: path of a checkpoint, of a run's folder (its latest complete checkpoint is read) or of an exported folder;
            or name of a model on the Hugging Face Hub.
        auto_class: transformers class that loads such models, such as ``transformers.AutoModel``.

    Raises:
        OSError: if there are no weights.
        ValueError: if the weights are from a different model.
    """

    def read(path: str) -> Mapping[str, Tensor]:
        return auto_class.from_pretrained(path, dtype=torch.float32, trust_remote_code=False).state_dict()

    weights = source_weights(network, pretrained, read)
    give_weights(network, weights, pretrained, tuple(network.all_tied_weights_keys or ()))
    network.tie_weights()


def source_weights(
    network: nn.Module, pretrained: str, read_original: Callable[[str], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Read pretrained weights for a model, some of whose attention layers may have been replaced.

    Weights of new attention are left out for layers that keep their original attention in ``network``.

    Args:
        network: model to which the weights will be given.
        pretrained: path of a checkpoint, of a run's folder (its latest complete checkpoint is read) or of an exported folder;
            or a path or name that ``read_original`` accepts.
        read_original: function that takes the path or name of a model with its original attention, and returns its weights
            by parameter name.

    Returns:
        Weights by parameter name.
    """
    weights: Mapping[str, Tensor]
    if (trained := read_trained(pretrained)) is not None:
        weights = trained.weights
    elif is_swapped(pretrained):
        weights = load_swapped(pretrained, torch.float32).state_dict()
    else:
        weights = read_original(pretrained)
    # Names of the attention modules with replaced attention.
    replaced = {name.partition(NEW)[0] for name in network.state_dict() if NEW in name}
    return {name: value for name, value in weights.items() if NEW not in name or name.partition(NEW)[0] in replaced}


def repeated_layers(network: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a transformers model, from the first to the last.

    Raises:
        ValueError: if the model has no ``nn.ModuleList`` of length ``config.num_hidden_layers``.
    """
    depth = network.config.num_hidden_layers
    # The outermost list comes first, and a layer may contain lists of the same length.
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    if not lists:
        raise ValueError(f"{type(network).__name__} has no list of its {depth} layers")
    return list(lists[0])
