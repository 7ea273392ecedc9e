"""Pretrained models to linearize: folders of transformers, names on the hub, and GGUF and ONNX files, which are converted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_mhla.swap import is_swapped
from lightning_mhla.swap.networks import read_configuration
from mhla_tasks.tools.linearize.conversion import convert_gguf, convert_onnx

Domain = Literal["language", "text", "image"]

CONVERTED = (".gguf", ".onnx")
"""Suffixes of files that are converted to folders of transformers."""


@dataclass(frozen=True)
class PretrainedSource:
    """Pretrained model of transformers.

    Attributes:
        path: folder of the model, or its name on the Hugging Face Hub.
        domain: ``"language"`` for a causal language model, ``"text"`` or ``"image"`` for an encoder.
        depth: number of layers.
        name: what the user called it, without the folders before it.
    """

    path: str
    domain: Domain
    depth: int
    name: str


def open_source(name: str, folder: Path) -> PretrainedSource:
    """Open a pretrained model, after converting it to a folder of transformers if it is a GGUF or ONNX file.

    Args:
        name: folder of transformers, name on the Hugging Face Hub, ``.gguf`` or ``.onnx`` file, or folder with one such file.
        folder: folder to write a converted model to; kept and used again if it exists.

    Raises:
        FileNotFoundError: if there is no such model.
        ModuleNotFoundError: if a package that reads the file is not installed.
        ValueError: if the model is not a causal language model or an encoder of transformers, or is linearized already.
    """
    title, file = Path(name).resolve().name if Path(name).exists() else name, _model_file(Path(name))
    if file is not None:
        if not (folder / "config.json").is_file():
            (convert_gguf if file.suffix == ".gguf" else convert_onnx)(file, folder)
        name = str(folder)
    if is_swapped(name):
        raise ValueError(f"{name} has replaced attention already; name the model that it was made from")
    config = read_configuration(name)
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise ValueError(f"{name}: a {type(config).__name__} has no list of layers (num_hidden_layers)")
    return PretrainedSource(name, _domain(config, name), depth, title)


def find_domain(name: str) -> Domain:
    """Return what kind of model ``name`` is, see :func:`open_source`.

    A GGUF file holds a causal language model, an ONNX file an image encoder.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if the model is not a causal language model or an encoder of texts or images.
    """
    file = _model_file(Path(name))
    if file is not None:
        return "language" if file.suffix == ".gguf" else "image"
    return _domain(read_configuration(name), name)


def _model_file(path: Path) -> Path | None:
    """Return the GGUF or ONNX file that a path names or contains; None if it is a folder of transformers or no path."""
    if path.suffix in CONVERTED:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix in CONVERTED)
    if len(files) > 1:
        raise ValueError(f"{path} has {len(files)} GGUF or ONNX files; name one of them")
    return files[0] if files else None


def _domain(config: Any, name: str) -> Domain:
    """Return what kind of model a configuration describes, by the classes it was saved from and its options."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    classes = config.architectures or []
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder with a decoder ({config.model_type}), which cannot be linearized")
    if any(kind.endswith("ForCausalLM") or kind.endswith("LMHeadModel") for kind in classes):
        return "language"
    if getattr(config, "image_size", None) and getattr(config, "patch_size", None):
        return "image"
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "text"
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "language"
    raise ValueError(
        f"{name} ({json.dumps(classes)}, {config.model_type}) is neither a causal language model nor an encoder of texts or "
        "images"
    )
