"""Reading of published model weights from files, diffusers folders or the Hugging Face Hub, without running code from them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lightning_mhla.system.untrusted import BROKEN, read_json, reason


@contextmanager
def read_safely(path: str | Path) -> Iterator[None]:
    """Context manager that converts errors from reading a damaged or malicious file to a ValueError that names the file.

    Args:
        path: path of the file, for the error message.

    Raises:
        ValueError: if reading fails.
        FileNotFoundError: if the file does not exist.
    """
    try:
        yield
    except (ValueError, FileNotFoundError):
        raise
    except (pickle.UnpicklingError, SafetensorError, OSError, *BROKEN) as error:
        raise ValueError(f"{path} cannot be read safely ({reason(error)})") from error


def read_weights_file(
    path: Path, containers: Sequence[str] = (), classes: Sequence[Any] = (), mixed: bool = False
) -> dict[str, Tensor]:
    """Read model weights from a ``.safetensors`` file or a file written by ``torch.save``, as a dict from name to tensor.

    Args:
        path: path of the file.
        containers: keys of a training checkpoint under which the weights may be stored.
        classes: classes whose objects the file may contain, in addition to tensors and plain Python containers.
        mixed: whether to skip entries that are not weights, instead of raising an error.

    Raises:
        ValueError: if the file contains no weights, or if it also contains other entries and ``mixed`` is false. For damaged
            files, torch and safetensors raise errors of other types, which :func:`read_safely` converts to ValueError.
    """
    if path.suffix.lower() == ".safetensors":
        return load_file(path)
    with torch.serialization.safe_globals(list(classes)):
        content = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__} instead of weights by name")
    for key in containers:
        if isinstance(content.get(key), dict):
            content = content[key]
    weights = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if not weights or (len(weights) < len(content) and not mixed):
        raise ValueError(f"{path} contains entries other than weights by name")
    return weights


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors from the ``.safetensors`` files in a folder into one dict from name to tensor."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def read_diffusers(path: str, kind: Any, what: str, option: str = "") -> dict[str, Tensor]:
    """Read the weights of a diffusers model, or of the transformer in a diffusers pipeline, as a dict from name to tensor.

    Args:
        path: folder of a model, folder of a pipeline, or name of a pipeline on the Hugging Face Hub.
        kind: diffusers class of the model.
        what: description of the model, for error messages.
        option: text that precedes the path in error messages, such as the name of the option that contains the path.

    Raises:
        FileNotFoundError: if there is no model of this class at the path or on the hub.
    """
    config = Path(path) / "config.json"
    # A pipeline has the transformer in a subfolder.
    alone = config.is_file() and read_json(config).get("_class_name") == kind.__name__
    try:
        model = kind.from_pretrained(path, **({} if alone else {"subfolder": "transformer"}))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{option}{path} is neither a file, nor a folder of {what}, nor a model on the hub ({reason(error)})"
        ) from error
    return dict(model.state_dict())
