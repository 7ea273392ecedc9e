"""Pretrained models to linearize: folders of transformers, names on the hub, and GGUF files, which are converted first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lightning_mhla.swap import is_swapped
from lightning_mhla.swap.networks import read_configuration
from lightning_mhla.system.files import rebuilt_folder

Domain = Literal["language", "text", "image"]


@dataclass(frozen=True)
class PretrainedSource:
    """Pretrained model of transformers.

    Attributes:
        path: folder of the model, or its name on the Hugging Face Hub.
        domain: ``"language"`` for a causal language model, ``"text"`` or ``"image"`` for an encoder.
        depth: number of layers.
    """

    path: str
    domain: Domain
    depth: int


def open_source(name: str, folder: Path) -> PretrainedSource:
    """Open a pretrained model, after converting it to a folder of transformers if it is a GGUF file.

    Args:
        name: folder of transformers, name on the Hugging Face Hub, ``.gguf`` file, or folder with one ``.gguf`` file.
        folder: folder to write a converted model to; kept and used again if it exists.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if the model is not a causal language model or an encoder of transformers, or is linearized already.
    """
    gguf = _gguf_file(Path(name))
    if gguf is not None:
        if not (folder / "config.json").is_file():
            convert_gguf(gguf, folder)
        name = str(folder)
    if is_swapped(name):
        raise ValueError(f"{name} has replaced attention already; name the model that it was made from")
    config = read_configuration(name)
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise ValueError(f"{name}: a {type(config).__name__} has no list of layers (num_hidden_layers)")
    return PretrainedSource(name, _domain(config, name), depth)


def find_domain(name: str) -> Domain:
    """Return what kind of model ``name`` is, see :func:`open_source`; a GGUF file holds a causal language model.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if the model is not a causal language model or an encoder of texts or images.
    """
    return "language" if _gguf_file(Path(name)) is not None else _domain(read_configuration(name), name)


def _gguf_file(path: Path) -> Path | None:
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{path} has {len(files)} GGUF files; name one of them")
    return files[0] if files else None


def convert_gguf(file: Path, folder: Path) -> None:
    """Convert a GGUF file of a causal language model to a folder of transformers: float32 weights and the tokenizer.

    Quantized weights are dequantized. The folder appears when it is complete.

    Raises:
        ModuleNotFoundError: if the package gguf is not installed.
        ValueError: if transformers cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if find_spec("gguf") is None:
        raise ModuleNotFoundError("reading a GGUF file needs the package gguf: pip install gguf")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"transformers cannot read {file} ({str(error).splitlines()[0][:200]})") from error
    # The weights are dequantized, but transformers does not save a model whose configuration says otherwise.
    model.config.__dict__.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    with rebuilt_folder(folder) as aside:
        plain.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


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
