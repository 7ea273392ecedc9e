"""Identification of pretrained models to linearize, in folders, GGUF or ONNX files, on the Hugging Face Hub, or in timm."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_mhla.swap import is_swapped
from lightning_mhla.swap.networks import read_configuration
from lightning_mhla.swap.timm_networks import build_timm, read_timm_description, timm_name
from lightning_mhla.training.encoders import Pooling
from lightning_mhla.vision.preprocessing import Preprocessing
from mhla_tasks.language.lengths import longest_text, position_table
from mhla_tasks.tools.linearize.conversion import convert_gguf, convert_onnx, read_gguf_configuration

Domain = Literal["language", "text", "image"]

CONVERTED = (".gguf", ".onnx")
"""Suffixes of files that are converted to folders that transformers loads."""


UNSPECIFIC = {"model", "models", "checkpoint", "original", "weights", "onnx", "gguf", "snapshot"}
"""Names of folders that do not identify a model."""


@dataclass(frozen=True)
class TimmImages:
    """Image format that a timm encoder expects.

    Attributes:
        preprocessing: image size, crop and normalization, according to timm's data configuration.
        patch: side of a patch in pixels; for patches that are not square, the least common multiple of both sides.
        pooling: vector that serves as the embedding of an image: ``"head"`` for the input of the classifier, ``"first"`` for
            the vector of the first token, or ``"mean"`` for the mean over all tokens.
        crop_mode: crop mode in timm's data configuration: ``"center"``, ``"squash"`` or ``"border"``. :class:`Preprocessing`
            supports only ``"center"``.
        interpolation: interpolation in timm's data configuration, such as ``"bicubic"``. :class:`Preprocessing` supports only
            ``"bicubic"``.
    """

    preprocessing: Preprocessing
    patch: int
    pooling: Pooling
    crop_mode: str
    interpolation: str

    @property
    def differences(self) -> str:
        """Text that describes how the resizing of held-out images differs from timm's; empty if there is no difference."""
        pairs = (("crop_mode", "center", self.crop_mode), ("interpolation", "bicubic", self.interpolation))
        return ", ".join(f"{name}={ours} in place of timm's {timms}" for name, ours, timms in pairs if ours != timms)


@dataclass(frozen=True)
class PretrainedSource:
    """Description of a pretrained model of transformers or timm that can be linearized, without its weights.

    Attributes:
        path: path of the model's folder, or name of the model on the Hugging Face Hub or in timm.
        domain: ``"language"`` for a causal language model, ``"text"`` or ``"image"`` for an encoder.
        depth: number of layers.
        name: name of the model for messages and reports; for a model in a folder, or a file that was converted, the last part
            of its path.
        images: image format of a timm encoder; None for a model of transformers.
    """

    path: str
    domain: Domain
    depth: int
    name: str
    images: TimmImages | None = None


def open_source(name: str, folder: Path, reuse: bool = False) -> PretrainedSource:
    """Identify a pretrained model. A GGUF or ONNX file is first converted to a folder that transformers loads.

    Args:
        name: path of a folder with a model in the format of transformers or timm, of a ``.gguf`` or ``.onnx`` file, or of a
            folder with one such file. Also the name of a model on the Hugging Face Hub, or ``timm:`` followed by the name of a
            timm encoder.
        folder: folder to write a converted model to.
        reuse: whether to use a model that was converted from the same file earlier, if ``folder`` contains one.

    Returns:
        Description of the model, without its weights.

    Raises:
        FileNotFoundError: if there is no such model.
        ModuleNotFoundError: if the package that reads GGUF or ONNX files is not installed.
        ValueError: if the model is none of the supported kinds (causal language models and encoders of transformers, vision
            transformers of timm), or its attention was already replaced.
    """
    title, file = _title(name), _model_file(Path(name))
    if file is not None:
        if not (reuse and (folder / "config.json").is_file()):
            (convert_gguf if file.suffix == ".gguf" else convert_onnx)(file, folder)
        name = str(folder)
    if is_swapped(name):
        raise ValueError(f"{name} has replaced attention already; name the model that it was made from")
    if timm_name(name) is not None:
        return _open_timm(name, title)
    config = read_configuration(name)
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise ValueError(f"{name}: a {type(config).__name__} has no list of layers (num_hidden_layers)")
    return PretrainedSource(name, _domain(config, name), depth, title)


def _title(name: str) -> str:
    """Return the name of a model for its report, such as ``smollm2`` for the folder ``models/smollm2``.

    If the last part of the path, such as ``checkpoint``, does not identify a model, the name of the parent folder is added.

    Args:
        name: path of the model; or its name on the Hugging Face Hub or in timm, which is returned unchanged.
    """
    if not Path(name).exists():
        return name
    path = Path(name).resolve()
    return f"{path.parent.name}/{path.name}" if path.name.lower() in UNSPECIFIC else path.name


def _open_timm(name: str, title: str) -> PretrainedSource:
    """Describe a timm vision transformer for linearization without reading its weights.

    Args:
        name: folder or name of the model.
        title: name of the model in the report.
    """
    from timm import data as timm_data  # imports all of timm's models

    model = build_timm(read_timm_description(name), "meta")
    config = timm_data.resolve_data_config(model=model)
    channels, *sides = config["input_size"]
    preprocessing = Preprocessing(min(sides), channels, config["crop_pct"], config["mean"], config["std"])
    pooling_without_head: Pooling = "first" if model.num_prefix_tokens else "mean"
    images = TimmImages(
        preprocessing,
        patch=math.lcm(*model.patch_embed.patch_size),  # patches need not be square
        pooling="head" if model.global_pool else pooling_without_head,
        crop_mode=config["crop_mode"],
        interpolation=config["interpolation"],
    )
    return PretrainedSource(name, "image", len(model.blocks), title, images)


def image_side(name: str, length: int | None = None) -> int | None:
    """Return the side in pixels of the training images for a timm encoder; None for other models.

    Args:
        name: path or name of the model, see :func:`open_source`.
        length: side that the user chose; None for the size in timm's data configuration, rounded down to complete patches.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if timm cannot build the model, its attention cannot be replaced, or ``length`` is not a multiple of the
            patch size.
    """
    images = None if timm_name(name) is None else _open_timm(name, name).images
    if images is None:
        return None
    patch, side = images.patch, images.preprocessing.image_size if length is None else length
    below = side - side % patch
    if length is not None and (below != length or length <= 0):
        multiples = [str(multiple) for multiple in (below, below + patch) if multiple > 0] or [str(patch)]
        raise ValueError(
            f"--length={length} is not a multiple of {patch}, the patch size of {name}; use {' or '.join(multiples)}"
        )
    return below


def sample_length(name: str, domain: Domain, default: int, length: int | None = None) -> int:
    """Choose the default length of a training sample for a model, and check the length that the user chose.

    Args:
        name: path or name of the model, see :func:`open_source`.
        domain: kind of the model.
        default: default length for models of this kind, in tokens or in pixels of an image's side.
        length: length that the user chose, in the same unit; None if the user chose none.

    Returns:
        Default length, in tokens or in pixels of an image's side. For models of text, it is ``default`` or the maximum number
        of tokens that the model was built for, whichever is smaller. For image encoders of transformers, it is ``default``. For
        a timm encoder, it is ``length``; if this is None, it is the image size in timm's data configuration, rounded down to
        complete patches.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if the model does not support samples of ``length``.
    """
    if domain == "image":
        return image_side(name, length) or default
    from transformers import AutoModel

    file = _model_file(Path(name))
    config = read_configuration(name) if file is None else read_gguf_configuration(file)
    with torch.device("meta"):  # the size of its tables is known without weights
        network = AutoModel.from_config(config, trust_remote_code=False)
    trained = longest_text(network)
    # Rotary positions of a language model have no end, so the length that its configuration names does not limit others.
    limit = position_table(network) if domain == "language" else trained
    if length is not None and limit is not None and length > limit:
        raise ValueError(
            f"--length={length} is above the {limit} tokens that {name} allows; use --length={limit} or less"
        )
    return default if trained is None else min(default, trained)


def find_domain(name: str) -> Domain:
    """Return the kind of a pretrained model: ``"language"``, ``"text"`` or ``"image"``.

    A GGUF file always contains a causal language model, and an ONNX file an image encoder.

    Args:
        name: path or name of the model, see :func:`open_source`.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if the model is not a causal language model or an encoder of texts or images.
    """
    file = _model_file(Path(name))
    if file is not None:
        return "language" if file.suffix == ".gguf" else "image"
    return "image" if timm_name(name) is not None else _domain(read_configuration(name), name)


def _model_file(path: Path) -> Path | None:
    """Return the GGUF or ONNX file that a path names, or that the folder at this path contains; None if there is no such file.

    Raises:
        FileNotFoundError: if the path has the suffix of such a file, but does not exist.
        ValueError: if the folder contains several such files.
    """
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
    """Return the kind of the model that a transformers configuration describes.

    Args:
        config: the configuration, a ``PretrainedConfig``.
        name: name of the model, for error messages.

    Raises:
        ValueError: if the model is not a causal language model or an encoder of texts or images.
    """
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
    # Checked first, because transformers also lists encoders such as BERT among the causal language models.
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "text"
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "language"
    raise ValueError(
        f"{name} ({json.dumps(classes)}, {config.model_type}) is neither a causal language model nor an encoder of texts or "
        "images"
    )
