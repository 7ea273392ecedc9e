"""Loading of training modules from checkpoints, without running code from them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning_mhla.attention.mixing import MixingCoefficients
from lightning_mhla.checkpoints.former_names import present_options, stored_options
from lightning_mhla.checkpoints.io import WholeCheckpointIO
from lightning_mhla.checkpoints.weights import LIVE
from lightning_mhla.system.untrusted import BROKEN, reason
from lightning_mhla.training.module import TrainingModule

Module = TypeVar("Module", bound=TrainingModule)


def accepts(kind: type[TrainingModule], memory: Mapping[str, Any]) -> bool:
    """Return whether the constructor of a training module accepts the hyperparameters of a checkpoint as arguments.

    The answer is False for a checkpoint without hyperparameters.

    Args:
        kind: class of the training module.
        memory: hyperparameters of the checkpoint, by name. Former names of renamed options are also accepted.
    """
    options = {name for name in present_options("model", kind, memory) if not name.startswith("_")}
    parameters = {
        name: parameter for name, parameter in inspect.signature(kind.__init__).parameters.items() if name != "self"
    }
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    return bool(options) and options <= set(parameters) and needed <= options


def load_module(kind: type[Module], path: str | Path, live: bool = False) -> Module:
    """Load a training module from a checkpoint to the CPU, and put it in evaluation mode.

    Args:
        kind: class of the training module.
        path: path of a checkpoint file or a sharded checkpoint, or of a folder with checkpoints, whose latest complete one is
            loaded.
        live: whether to load the weights that the optimizer updates instead of their moving average, if the checkpoint has
            both.

    Raises:
        FileNotFoundError: if the path does not exist.
        ValueError: if the checkpoint does not contain a module of this class, or cannot be read safely.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a checkpoint of training, or an exported folder")
    content = WholeCheckpointIO().load_checkpoint(path)
    memory = content.get("hyper_parameters") or {}
    if not accepts(kind, memory):
        raise ValueError(f"{path} is not a checkpoint of {kind.__module__}.{kind.__name__}")
    present = stored_options("model", kind, memory, path)
    options = {name: value for name, value in present.items() if not name.startswith("_")}
    try:
        module = kind(**options)
    # Errors of our own checks already say what to do. The others come from options of a wrong type.
    except ValueError:
        raise
    except BROKEN as error:
        raise ValueError(f"{path} holds options that do not fit {kind.__name__} ({reason(error)})") from error
    weights = content.get(LIVE, content["state_dict"]) if live else content["state_dict"]
    module.on_load_checkpoint(content)
    try:
        module.load_state_dict(weights)
    except BROKEN as error:
        raise ValueError(f"the weights of {path} do not fit their model ({reason(error)})") from error
    for part in module.modules():
        if isinstance(part, MixingCoefficients):
            part.bring_inside_()  # other programs may read the parameters, and do not bound them
    return module.eval()
