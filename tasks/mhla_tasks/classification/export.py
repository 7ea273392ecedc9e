"""The trained classifier as a folder (safetensors, ``config.json``, ``classes.txt``)."""

from __future__ import annotations

from pathlib import Path

from lightning_mhla.swap import save_swapped
from lightning_mhla.swap.adapters import merge_adapters
from mhla_tasks.classification.module import ImageClassifier
from mhla_tasks.classification.timm import TimmClassifier

OPTIONS: tuple[str, ...] = ()

LOADING = """\
from mhla_tasks.classification import NETWORK

model = NETWORK.from_pretrained("FOLDER")"""
"""Python that loads an export, FOLDER being its path and NETWORK the class of the network."""

LOADING_TIMM = """\
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True)"""
"""The same for a model of timm."""

LOADING_SWAPPED = """\
from lightning_mhla import load_swapped

model = load_swapped("FOLDER")"""
"""The same for a swapped model of timm."""


def loading(module: ImageClassifier) -> str:
    """Python that loads the export of ``module``."""
    if not isinstance(module, TimmClassifier):
        return LOADING
    return LOADING_SWAPPED if module.hparams["attention"] else LOADING_TIMM


def write(module: ImageClassifier, folder: Path) -> None:
    """Write what ``from_pretrained`` of the network's class, timm or ``load_swapped`` loads, and the names of the classes."""
    if not isinstance(module, TimmClassifier):
        module.network.save_pretrained(folder)
    elif module.hparams["attention"]:
        merge_adapters(module.network)
        save_swapped(module.network, folder)
    else:
        from timm.models import save_for_hf  # brings all of timm's models

        save_for_hf(module.network, str(folder), safe_serialization=True)
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in module.class_names))
