"""The trained video transformer as a folder, and its LoRA adapters."""

from __future__ import annotations

from pathlib import Path

from diffusers import WanPipeline

from lightning_mhla.swap.adapters import merge_adapters, save_adapters
from lightning_mhla.system.files import rebuilt_folder
from mhla_tasks.video.module import VideoDiffusion

OPTIONS = ("adapters",)

LOADING = """\
from diffusers import WanTransformer3DModel
from lightning_mhla import load_swapped
from lightning_mhla.swap import is_swapped

load = load_swapped if is_swapped("FOLDER") else WanTransformer3DModel.from_pretrained
model = load("FOLDER")"""
"""Python that loads an export, FOLDER being its path."""


def write(module: VideoDiffusion, folder: Path, adapters: Path | None = None) -> None:
    """Write what ``lightning_mhla.load_swapped`` loads.

    Args:
        module: the trained module.
        folder: folder of the transformer.
        adapters: folder for LoRA adapters; None to add them to the weights.
    """
    if adapters is None:
        merge_adapters(module.network)
    else:
        with rebuilt_folder(adapters) as aside:
            save_adapters(module.network, aside, WanPipeline)
    module.network.save_pretrained(folder)
