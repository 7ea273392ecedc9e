"""Export of a trained classifier (weights, ``config.json``, ``classes.txt``) or image encoder to a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mhla.data.classes import write_classes
from lightning_mhla.swap import SAVED, save_swapped
from lightning_mhla.swap.adapters import merge_adapters
from lightning_mhla.system.files import write_json
from lightning_mhla.system.untrusted import read_json
from mhla_tasks.classification.base import Classifier
from mhla_tasks.classification.timm import TimmClassifier

if TYPE_CHECKING:
    from mhla_tasks.classification.encoder import LinearizedImageEncoder  # needs transformers, which classifiers do not

OPTIONS: tuple[str, ...] = ()

LOADING = """\
from mhla_tasks.classification import NETWORK

model = NETWORK.from_pretrained("FOLDER")
# model.predict("photo.jpg", top=3): names of classes with their probabilities"""
"""Python code that loads an export, where FOLDER is its path and NETWORK the class of the network."""

LOADING_TIMM = """\
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True)"""
"""Python code that loads an exported timm model, where FOLDER is its path."""

LOADING_SWAPPED = """\
from lightning_mhla import load_swapped

model = load_swapped("FOLDER")"""
"""Python code that loads an exported timm model with replaced attention, where FOLDER is its path."""


LOADING_ENCODER = """\
from transformers import AutoModel

model = AutoModel.from_pretrained("FOLDER", trust_remote_code=True)"""
"""Python code that loads an exported transformers encoder, where FOLDER is its path."""


def loading(module: Classifier | LinearizedImageEncoder) -> str:
    """Return the Python code that loads an exported model, for the model card.

    The code contains the placeholder FOLDER instead of the path of the export. For classifiers of this package, it contains
    the placeholder NETWORK instead of the name of the network's class.

    Args:
        module: module that is exported.
    """
    if isinstance(module, Classifier) and not isinstance(module, TimmClassifier):
        return LOADING
    if not _is_timm(module):
        return LOADING_ENCODER
    return LOADING_SWAPPED if hasattr(module.network, SAVED) else LOADING_TIMM


def _is_timm(module: Classifier | LinearizedImageEncoder) -> bool:
    return hasattr(module.network, "pretrained_cfg")


def _data_config(preprocessing: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Convert preprocessing options to the data configuration of a timm model; return None if ``preprocessing`` is None."""
    if preprocessing is None:
        return None
    crop = {"crop_pct": preprocessing["crop_share"], "crop_mode": "center", "interpolation": "bicubic"}
    if preprocessing["crop_share"] is None:  # stretched to a square
        crop = {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "box"}
    return {**crop, "mean": tuple(preprocessing["mean"]), "std": tuple(preprocessing["std"])}


def write(module: Classifier | LinearizedImageEncoder, folder: Path) -> None:
    """Export a trained classifier with its class names, or a trained image encoder, to a folder.

    A timm model is loaded from the folder with ``timm.create_model``, or with ``lightning_mhla.load_swapped`` if its attention
    was replaced. Other networks are loaded with ``from_pretrained`` of their class, or of ``transformers.AutoModel``. LoRA
    adapters are first merged into the weights of ``module``.

    Args:
        module: trained classifier, or encoder with replaced attention.
        folder: path of the folder to write.
    """
    if not isinstance(module, Classifier):
        merge_adapters(module.network)
        if _is_timm(module):  # what timm's configuration says about classes and images is still true
            _write_timm(module.network, folder, module.network.pretrained_cfg.get("label_names"), None)
        else:
            module.network.save_pretrained(folder)
        return
    preprocessing = None if module.preprocessing is None else module.preprocessing.as_dict()
    if not isinstance(module, TimmClassifier):
        module.network.save_pretrained(folder)
        config = {
            **read_json(folder / "config.json"),
            "class_names": module.class_names,
            "preprocessing": preprocessing,
        }
        write_json(folder / "config.json", config, indent=2)
    else:
        merge_adapters(module.network)
        _write_timm(module.network, folder, module.class_names, _data_config(preprocessing))
    write_classes(folder / "classes.txt", module.class_names)


def _write_timm(
    network: Any, folder: Path, class_names: Sequence[str] | None, data_config: Mapping[str, Any] | None
) -> None:
    """Write a timm model to a folder.

    Args:
        network: timm model; its attention may be replaced.
        folder: path of the folder to write.
        class_names: class names in the order of the labels; None to write no names.
        data_config: preprocessing options in timm's notation; None to keep those of the model.
    """
    if hasattr(network, SAVED):
        save_swapped(network, folder, label_names=class_names, data_config=data_config)
        return
    from timm.models import save_for_hf  # imports all of timm's models

    names = {"label_names": class_names} if class_names else {}
    save_for_hf(network, str(folder), names, safe_serialization=True, data_config=data_config)
