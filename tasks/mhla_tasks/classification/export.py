"""The trained classifier as a folder (safetensors, ``config.json``, ``classes.txt``)."""

from __future__ import annotations

from pathlib import Path

from mhla_tasks.classification.module import ImageClassifier

OPTIONS: tuple[str, ...] = ()

LOADING = """\
from mhla_tasks.classification import NETWORK

model = NETWORK.from_pretrained("FOLDER")"""
"""Python that loads an export, FOLDER being its path and NETWORK the class of the network."""


def write(module: ImageClassifier, folder: Path) -> None:
    """Write what ``from_pretrained`` of the network's class loads, and the names of the classes."""
    module.network.save_pretrained(folder)
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in module.class_names))
