"""Vision transformers of timm described by plain data, from which a checkpoint rebuilds its model without the original folder.

A description is a dict with these entries:

* ``architecture``: timm's name of the architecture, such as ``vit_small_patch14_dinov2``.
* ``model_args``: options of the model. Dropout is left out, and images of any size are accepted (``dynamic_img_size``).
* ``pretrained_cfg``: timm's facts about the weights, such as the size and the normalization of images; without their location.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
"""Beginnings of the names of models of timm: ``timm:ARCHITECTURE``, ``timm:OWNER/NAME`` and ``timm/NAME``."""

WEIGHTS = (".safetensors", ".bin", ".pth")
"""Suffixes of files of weights that timm reads from a folder."""

LOCATION = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load")
"""Entries of timm's ``pretrained_cfg`` that say where the weights are."""


def timm_name(pretrained: str) -> str | None:
    """Return the name by which ``timm.create_model`` finds a model; None if it is not a model of timm.

    Args:
        pretrained: folder with timm's ``config.json``, ``timm:ARCHITECTURE`` for the weights that timm publishes,
            ``timm:OWNER/NAME`` or ``timm/NAME`` for a model on the Hugging Face Hub. A folder takes precedence.

    Raises:
        ValueError: if the folder's ``config.json`` is not JSON, or nothing follows ``timm:``.
    """
    folder = Path(pretrained)
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        is_timm = isinstance(config.get("architecture"), str) and "model_type" not in config
        return f"local-dir:{folder.resolve()}" if is_timm else None
    if folder.exists() or not pretrained.startswith((PREFIX, OWNER)):
        return None
    name = pretrained.removeprefix(PREFIX)
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"{pretrained} is not a model of timm; write timm:ARCHITECTURE or timm:OWNER/NAME")
    return f"hf-hub:{name}" if "/" in name else name


def read_timm_description(pretrained: str) -> dict[str, Any]:
    """Read the description of a vision transformer of timm, see the top of this module. Weights are not read.

    Args:
        pretrained: folder or name that :func:`timm_name` accepts.

    Raises:
        FileNotFoundError: if the folder has no weights, or the model cannot be read from the hub.
        ValueError: if timm cannot build the model or publishes no weights of it, or its attention cannot be replaced.
    """
    import timm
    from timm import models as timm_models  # executes timm, whose import the command line defers

    name, model_args = str(timm_name(pretrained)), {}
    register()  # the architecture of folders of swapped models
    if name.startswith("local-dir:"):
        model_args = dict(read_json(Path(pretrained) / "config.json").get("model_args") or {})
        if not any(path.suffix in WEIGHTS for path in Path(pretrained).iterdir()):
            raise FileNotFoundError(f"{pretrained} has no weights (model.safetensors or pytorch_model.bin)")
    elif name.startswith("hf-hub:"):
        try:
            model_args = dict(timm_models.load_model_config_from_hf(name.removeprefix("hf-hub:"))[2])
        except (OSError, *BROKEN) as error:
            raise FileNotFoundError(
                f"{pretrained} is not a folder, and timm cannot read it from the hub ({reason(error)})"
            ) from error
    with torch.device("meta"):
        try:
            model: Any = timm.create_model(name, pretrained=False)
        except BROKEN as error:
            raise ValueError(f"timm {timm.__version__} cannot build {pretrained} ({reason(error)})") from error
    try:
        host_of(model).layers(model)
    except ValueError as error:
        raise ValueError(f"{pretrained}: {error}") from error
    if vision_transformer(model) is not model:
        raise ValueError(f"{pretrained} is a {type(model).__name__}; name a model without features_only")
    facts = model.pretrained_cfg
    if not any(facts.get(place) for place in LOCATION):
        raise ValueError(f"timm publishes no weights of {pretrained}; add a tag, such as {pretrained}.TAG")
    options = {key: value for key, value in model_args.items() if key not in (HOST_MODEL, SAVED)}
    description = {
        "architecture": facts["architecture"],
        "model_args": {
            **{key: value for key, value in options.items() if not key.endswith("drop_rate")},
            "dynamic_img_size": True,
        },
        "pretrained_cfg": {
            key: value for key, value in timm_models.filter_pretrained_cfg(facts).items() if key not in LOCATION
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(description))
    build_timm(plain, "meta")
    return plain


def build_timm(network: Mapping[str, Any], device: str = "cpu") -> Any:
    """Build a vision transformer of timm with random weights from its description.

    Args:
        network: description, see the top of this module.
        device: device of the weights; ``"meta"`` for none.

    Raises:
        ValueError: if timm has no such architecture, or does not accept the options.
    """
    import timm

    architecture, options = network["architecture"], network["model_args"]
    if not timm.models.is_model(architecture):
        raise ValueError(f"timm {timm.__version__} has no architecture {architecture!r}")
    with torch.device(device):
        try:
            return timm.create_model(
                architecture, pretrained=False, pretrained_cfg=dict(network["pretrained_cfg"]), **options
            )
        except BROKEN as error:
            raise ValueError(f"timm cannot build {architecture} with {options} ({reason(error)})") from error


def load_timm(network: nn.Module, pretrained: str) -> None:
    """Load pretrained weights into a vision transformer of timm, some of whose attention layers may have been replaced.

    Parameters that the replacement added keep their initial values if the weights lack them.

    Args:
        network: model to load the weights into, in float32.
        pretrained: path of a checkpoint, of a run's folder or of a folder of timm, or a name that :func:`timm_name` accepts.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: if the weights cannot be read, or are from a different model.
    """
    give_weights(network, source_weights(network, pretrained, _published), pretrained)


def _published(pretrained: str) -> Mapping[str, Tensor]:
    """Read the weights of a model with its original attention, by timm's own rules."""
    import timm

    try:
        model: nn.Module = timm.create_model(str(timm_name(pretrained)), pretrained=True)
    except OSError as error:
        raise FileNotFoundError(f"timm cannot read the weights of {pretrained} ({reason(error)})") from error
    except (*BROKEN, UnpicklingError, SafetensorError) as error:
        raise ValueError(f"timm cannot read the weights of {pretrained} ({reason(error)})") from error
    return model.float().state_dict()
