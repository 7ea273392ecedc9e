"""Descriptions of timm vision transformers as plain data, from which the models can be rebuilt.

A checkpoint contains the description of its model, so the checkpoint can be loaded without the model's original folder.
A description is a dict with these entries:

* ``architecture``: timm's name of the architecture, such as ``vit_small_patch14_dinov2``.
* ``model_args``: options for the constructor of the model's class. Rates of dropout and stochastic depth are left out.
  ``dynamic_img_size`` is set, so that the model accepts images of any size.
* ``pretrained_cfg``: timm's information about the weights, such as the size and normalization of images, without the location
  of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lightning_mhla.swap.host import SAVED
from lightning_mhla.swap.loading import give_weights
from lightning_mhla.swap.networks import source_weights
from lightning_mhla.swap.swapping import HUB_NAME, host_of
from lightning_mhla.swap.timm import vision_transformer
from lightning_mhla.swap.timm_folders import HOST_MODEL, register
from lightning_mhla.system.untrusted import BROKEN, read_json, reason

PREFIX, OWNER = "timm:", "timm/"
"""Prefixes of the names of timm models: ``timm:ARCHITECTURE``, ``timm:OWNER/NAME`` and ``timm/NAME``."""

WEIGHTS = (".safetensors", ".pth", ".pth.tar", "pytorch_model.bin")
"""Endings of the names of weight files that timm reads from a folder. Other ``.bin`` files there may belong to a trainer."""

ENTRIES = {"architecture": str, "model_args": Mapping, "pretrained_cfg": Mapping}
"""Entries of a model description and their types. Entries of the same names in timm's ``config.json`` have the same types."""

RATES = ("drop_rate", "drop_path_rate")
"""Endings of the names of options that make a model random during training."""

LOCATION = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load")
"""Entries of timm's ``pretrained_cfg`` that say where the weights are."""


def timm_name(pretrained: str) -> str | None:
    """Return the name under which ``timm.create_model`` finds a model; None for a model that is not from timm.

    Args:
        pretrained: folder with timm's ``config.json``; ``timm:ARCHITECTURE`` for the weights that timm publishes; or
            ``timm:OWNER/NAME`` or ``timm/NAME`` for a model on the Hugging Face Hub. If a folder of this name exists, it takes
            precedence.

    Raises:
        ValueError: if the folder's ``config.json`` is not JSON or has entries of wrong types, or the name of a model is not
            valid.
    """
    folder, file = Path(pretrained), Path(pretrained) / "config.json"
    if file.is_file():
        config = read_json(file)
        if "model_type" in config or not ENTRIES.keys() & config.keys():
            return None
        _check_types(config, str(file))
        return f"local-dir:{folder.resolve()}"
    if folder.exists() or not pretrained.startswith((PREFIX, OWNER)):
        return None
    name = pretrained.removeprefix(PREFIX)
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"{pretrained} is not a model of timm; write timm:ARCHITECTURE or timm:OWNER/NAME")
    return f"hf-hub:{name}" if "/" in name else name


def read_timm_description(pretrained: str) -> dict[str, Any]:
    """Read the description of a timm vision transformer, which is plain data from which the model can be built again.

    The weights are not read.

    Args:
        pretrained: folder or name that :func:`timm_name` accepts.

    Returns:
        Dict with the entries ``architecture``, ``model_args`` and ``pretrained_cfg``.

    Raises:
        FileNotFoundError: if the folder has no weights, or the model cannot be read from the hub.
        ValueError: if timm cannot build the model or does not publish its weights, or if its attention cannot be replaced.
    """
    from timm import models as timm_models  # executes timm, whose import the command line defers

    name, config = str(timm_name(pretrained)), {}
    register()  # the architecture of folders of swapped models
    if name.startswith("local-dir:"):
        config = read_json(Path(pretrained) / "config.json")
        if not any(path.name.endswith(WEIGHTS) for path in Path(pretrained).iterdir()):
            raise FileNotFoundError(f"{pretrained} has no weights (model.safetensors or pytorch_model.bin)")
    elif name.startswith("hf-hub:"):
        config = _hub_config(pretrained, name.removeprefix("hf-hub:"))
    model = _create(name, pretrained, "meta")
    try:
        host_of(model).layers(model)
    except ValueError as error:
        raise ValueError(f"{pretrained}: {error}") from error
    if vision_transformer(model) is not model:
        raise ValueError(f"{pretrained} is a {type(model).__name__}; name a model without features_only")
    facts = model.pretrained_cfg
    if not any(facts.get(place) for place in LOCATION):
        raise ValueError(f"timm publishes no weights of {pretrained}; add a tag, such as {pretrained}.TAG")
    options = {key: value for key, value in config.get("model_args", {}).items() if key not in (HOST_MODEL, SAVED)}
    description = {
        "architecture": facts["architecture"],
        "model_args": {
            **{key: value for key, value in options.items() if not key.endswith(RATES)},
            "dynamic_img_size": True,
        },
        "pretrained_cfg": {
            key: value for key, value in timm_models.filter_pretrained_cfg(facts).items() if key not in LOCATION
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(description))
    # A description from which no model can be built is an error now, before anything is trained and saved with it.
    build_timm(plain, "meta", pretrained)
    return plain


def build_timm(network: Mapping[str, Any], device: str = "cpu", name: str = "network") -> Any:
    """Build a timm vision transformer with random weights from its description.

    The model has no randomness during training: dropout, stochastic depth and random rotary positions are switched off, even
    if they are defaults of the architecture.

    Args:
        network: description with the entries ``architecture``, ``model_args`` and ``pretrained_cfg``, as returned by
            :func:`read_timm_description`. It may come from an untrusted file.
        device: device of the weights. ``"meta"`` allocates no memory for them.
        name: name of the description in error messages.

    Raises:
        ValueError: if an entry of the description is missing, is unknown or has a wrong type, if timm has no such vision
            transformer, or if its constructor does not accept the options.
    """
    import timm
    from timm import layers, models  # executes timm, whose import the command line defers

    if different := sorted(map(str, network.keys() ^ ENTRIES.keys())):
        state = "is missing" if different[0] in ENTRIES else "is unknown"
        raise ValueError(f"{name}: {different[0]} {state}; a model of timm is described by {', '.join(ENTRIES)}")
    _check_types(network, name)
    architecture, options, facts = (network[entry] for entry in ENTRIES)
    if not models.is_model(architecture):
        raise ValueError(f"{name}: timm {timm.__version__} has no architecture {architecture!r}")
    # timm.create_model and its builders take more arguments than models have options, and some of them read files.
    kind = type(vision_transformer(_create(architecture, name, "meta")))
    plain_facts = {field.name for field in fields(models.PretrainedCfg)} - {*LOCATION}
    for entry, names in (("model_args", _options(kind)), ("pretrained_cfg", plain_facts)):
        if unknown := sorted(map(str, network[entry].keys() - names)):
            raise ValueError(
                f"{name}: {entry} of {architecture} has no entry {unknown[0]!r}; it has {', '.join(sorted(names))}"
            )
    model = _create(
        architecture, f"{name} ({architecture} with {options})", device, pretrained_cfg=dict(facts), **options
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, layers.DropPath):
            module.drop_prob = 0.0
        elif getattr(module, "aug_active", False):  # rotary positions that are shifted and scaled at random
            module.aug_active = False
    return model


def load_timm(network: nn.Module, pretrained: str) -> None:
    """Load pretrained weights into a timm vision transformer, some of whose attention layers may have been replaced.

    Parameters that the replacement added keep their initial values if the weights lack them.

    Args:
        network: model to load the weights into, in float32.
        pretrained: path of a checkpoint or of a run's folder (its latest complete checkpoint is read), or a folder or name
            that :func:`timm_name` accepts.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: if the weights cannot be read, or are from a different model.
    """
    give_weights(network, source_weights(network, pretrained, _published), pretrained)


def _published(pretrained: str) -> Mapping[str, Tensor]:
    """Load a pretrained timm model with its original attention, and return its weights in float32, by parameter name.

    Args:
        pretrained: folder or name that :func:`timm_name` accepts.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: if the weights cannot be read.
    """
    import timm

    try:
        model: nn.Module = timm.create_model(str(timm_name(pretrained)), pretrained=True)
    except OSError as error:
        raise FileNotFoundError(f"timm cannot read the weights of {pretrained} ({reason(error)})") from error
    except (*BROKEN, UnpicklingError, SafetensorError) as error:
        raise ValueError(f"timm cannot read the weights of {pretrained} ({reason(error)})") from error
    return model.float().state_dict()


def _check_types(entries: Mapping[str, Any], place: str) -> None:
    """Check the types of the entries in the description of a timm model, or in timm's ``config.json``.

    Args:
        entries: entries by name. ``architecture`` is required, ``model_args`` and ``pretrained_cfg`` are optional, and further
            entries are ignored.
        place: location of the entries, for error messages.

    Raises:
        ValueError: if ``architecture`` is missing, or an entry has the wrong type.
    """
    for entry, kind in ENTRIES.items():
        value = entries.get(entry, None if kind is str else {})
        if not isinstance(value, kind):
            wanted = "the name of an architecture of timm" if kind is str else "a mapping of names to values"
            raise ValueError(f"{place}: {entry}={str(value)[:60]} must be {wanted}")


def _hub_config(pretrained: str, name: str) -> dict[str, Any]:
    """Read the ``config.json`` of a timm model on the Hugging Face Hub.

    Args:
        pretrained: name of the model as the user gave it, for error messages.
        name: name of the model on the hub, such as ``timm/vit_base_patch16_224.augreg_in21k``.

    Raises:
        FileNotFoundError: if the file cannot be read.
        ValueError: if an entry of the file has a wrong type.
    """
    from huggingface_hub import hf_hub_download

    try:
        config = read_json(Path(hf_hub_download(name, "config.json")))
    except OSError as error:
        raise FileNotFoundError(
            f"{pretrained} is not a folder, and timm cannot read it from the hub ({reason(error)})"
        ) from error
    _check_types(config, f"config.json of {pretrained}")
    return config


def _create(architecture: str, name: str, device: str, **options: Any) -> Any:
    """Build a timm model with random weights.

    Args:
        architecture: name that ``timm.create_model`` accepts.
        name: name of the model in error messages.
        device: device of the weights. ``"meta"`` allocates no memory for them.
        options: further arguments of ``timm.create_model``.

    Raises:
        ValueError: if timm cannot build the model.
    """
    import timm

    with torch.device(device):
        try:
            return timm.create_model(architecture, pretrained=False, **options)
        except BROKEN as error:
            raise ValueError(f"timm {timm.__version__} cannot build {name} ({reason(error)})") from error


def _options(kind: type[nn.Module]) -> set[str]:
    """Return the names of the constructor arguments of a model class and its bases, except ``device`` and ``dtype``."""
    bases = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    names = {
        option.name for base in bases for option in signature(base).parameters.values() if option.kind not in variable
    }
    return names - {"device", "dtype"}
