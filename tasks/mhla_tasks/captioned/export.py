"""Export of a trained transformer to a folder, with the option to export its LoRA adapters separately."""

from __future__ import annotations

from pathlib import Path

from lightning_mhla.swap.adapters import merge_adapters, save_adapters
from lightning_mhla.system.files import rebuilt_folder
from mhla_tasks.captioned.module import CaptionedDiffusion

OPTIONS = ("adapters",)

LOADING = """\
from diffusers import NETWORK
from lightning_mhla import load_swapped
from lightning_mhla.swap import is_swapped

load = load_swapped if is_swapped("FOLDER") else NETWORK.from_pretrained
model = load("FOLDER")"""
"""Python code that loads an export, where FOLDER is its path and NETWORK the class of the transformer."""


def loading(module: CaptionedDiffusion) -> str:
    """Return the Python code that loads an exported model, for the model card.

    The code contains the placeholder FOLDER instead of the path of the export.

    Args:
        module: module that is exported. It determines the class of the transformer.
    """
    return LOADING.replace("NETWORK", module.host.transformer.__name__)


def write(module: CaptionedDiffusion, folder: Path, adapters: Path | None = None) -> None:
    """Export the transformer of a trained module to a folder that ``lightning_mhla.load_swapped`` or diffusers can load.

    If every layer kept its original attention, ``from_pretrained`` of the transformer's class loads the folder. Otherwise,
    ``lightning_mhla.load_swapped`` does.

    Args:
        module: trained module. Its LoRA adapters are merged into its weights, or removed if they are exported separately.
        folder: path of the folder for the transformer.
        adapters: path of a separate folder for LoRA adapters; None to merge the adapters into the weights.

    Raises:
        ValueError: if ``adapters`` is given for a model without LoRA adapters.
    """
    if adapters is None:
        merge_adapters(module.network)
    else:
        with rebuilt_folder(adapters) as aside:
            save_adapters(module.network, aside, module.host.pipeline)
    module.network.save_pretrained(folder)
