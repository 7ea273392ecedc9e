"""Trained models of checkpoints, written for use anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint
from lightning_mhla.training.loading import accepts, load_module
from lightning_mhla.training.module import TrainingModule
from mhla_tasks.trust import refusal

DOMAINS = {
    "classification": "ImageClassifier",
    "diffusion": "ClassToImage",
    "language": "LanguageModel",
    "video": "VideoDiffusion",
}
"""Module classes of the domains; each domain's ``export`` has a function ``write`` and the names of its ``OPTIONS``."""


def write_export(checkpoint: Path, folder: Path, live: bool, options: Mapping[str, Any]) -> None:
    """Write the model of a checkpoint as the library of its domain loads it.

    Args:
        checkpoint: file, or folder of a run or of a sharded checkpoint.
        folder: where the model goes.
        live: the weights as trained, where the checkpoint also has their moving average.
        options: of the domain, by name.

    Raises:
        FileNotFoundError: when there is no checkpoint.
        ValueError: when it holds no module of a domain, or for options of another domain.
    """
    module, domain = _load(checkpoint, live)
    for name in options:
        if name not in domain.OPTIONS:
            raise ValueError(
                f"--{name} is no option for {checkpoint}, which holds the model of {type(module).__name__}"
            )
    domain.write(module, folder, **options)


def _load(checkpoint: Path, live: bool) -> tuple[TrainingModule, ModuleType]:
    """The module of a checkpoint, and the ``export`` of its domain."""
    path = resolve_checkpoint(checkpoint)
    memory = read_header(path).get("hyper_parameters") or {}
    class_path = str(memory.get("_class_path", ""))
    if class_path:
        if refused := refusal(class_path):
            raise ValueError(f"{checkpoint} was trained with the class {class_path[:80]}: {refused}")
        package, _, name = class_path.rpartition(".")
        kind = getattr(import_module(package), name)
        return load_module(kind, path, live), _domain_of(kind)
    for domain, name in DOMAINS.items():  # trained from Python: the checkpoint does not name its class
        kind = getattr(import_module(f"mhla_tasks.{domain}"), name)
        if accepts(kind, memory):
            return load_module(kind, path, live), _domain_of(kind)
    raise ValueError(f"{checkpoint} holds no module of {', '.join(DOMAINS)}")


def _domain_of(kind: type) -> ModuleType:
    for base in kind.__mro__:
        package = base.__module__.rpartition(".")[0]
        if package.startswith("mhla_tasks."):
            return import_module(f"{package}.export")
    raise ValueError(f"{kind.__module__}.{kind.__name__} is of none of the domains {', '.join(DOMAINS)}")
