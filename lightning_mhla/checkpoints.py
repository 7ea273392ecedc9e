"""Modules from checkpoints that training wrote, without running any code from them."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import TypeVar

import torch

from lightning_mhla.module import TrainingModule

Module = TypeVar("Module", bound=TrainingModule)


def load_module(kind: type[Module], path: str | Path, live: bool = False) -> Module:
    """The module of a checkpoint, in evaluation mode on the CPU.

    Args:
        kind: its class.
        path: file.
        live: the weights as they were trained, where the checkpoint also has their moving average.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it holds no such module, or cannot be read safely.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"{path} is a sharded checkpoint; make one file of it first: "
            f"python -m lightning.pytorch.utilities.consolidate_checkpoint {path}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a checkpoint of training, or an exported folder")
    try:
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is no checkpoint that can be read safely ({str(error).splitlines()[0]})") from error
    memory = (content.get("hyper_parameters") if isinstance(content, dict) else None) or {}
    options = {name: value for name, value in memory.items() if not name.startswith("_")}
    parameters = inspect.signature(kind).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    if not options or not set(options) <= set(parameters) or not needed <= set(options):
        raise ValueError(f"{path} is no checkpoint of {kind.__module__}.{kind.__name__}")
    module = kind(**options)
    weights = content.get("current_model_state", content["state_dict"]) if live else content["state_dict"]
    module.on_load_checkpoint(content)
    module.load_state_dict(weights)
    return module.eval()
