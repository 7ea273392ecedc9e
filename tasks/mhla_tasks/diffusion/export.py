"""Export of a trained class-to-image model as a diffusers pipeline: network, scheduler and VAE."""

from __future__ import annotations

from pathlib import Path

from mhla_tasks.diffusion.module import ClassToImage
from mhla_tasks.diffusion.pipeline import DiTPipeline

OPTIONS: tuple[str, ...] = ()

LOADING = """\
from mhla_tasks.diffusion import DiTPipeline

pipe = DiTPipeline.from_pretrained("FOLDER")
images = pipe(class_labels=[0, 1], seed=0).images"""
"""Python code that loads an export, where FOLDER is its path."""


def write(module: ClassToImage, folder: Path) -> None:
    """Export a trained class-to-image module to a folder that ``DiTPipeline.from_pretrained`` loads.

    Args:
        module: trained module.
        folder: path of the folder to write.

    Raises:
        FileNotFoundError: if the model has a VAE that does not exist at its path.
    """
    DiTPipeline.of_module(module).save_pretrained(folder)
