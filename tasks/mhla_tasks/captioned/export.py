"""Export of a trained transformer to a folder, and of its LoRA adapters."""

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
    """Return Python code that loads the exported ``module``. In the code, FOLDER stands for the path of the export."""
    return LOADING.replace("NETWORK", module.host.transformer.__name__)


def write(module: CaptionedDiffusion, folder: Path, adapters: Path | None = None) -> None:
    """Export the transformer of a trained module to a folder that ``lightning_mhla.load_swapped`` can load.

    Args:
        module: trained module.
        folder: path of the folder for the transformer.
        adapters: path of a separate folder for LoRA adapters; None to merge the adapters into the weights.
    """
    if adapters is None:
        merge_adapters(module.network)
    else:
        with rebuilt_folder(adapters) as aside:
            save_adapters(module.network, aside, module.host.pipeline)
    module.network.save_pretrained(folder)
