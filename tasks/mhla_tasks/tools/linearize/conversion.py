"""Conversion of language models in GGUF files, and of DINOv2 in ONNX files, to folders that transformers loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lightning_mhla.system.files import rebuilt_folder
from lightning_mhla.system.untrusted import BROKEN, reason

RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
"""Former parts of DINOv2's parameter names in transformers, as in older ONNX files, each with the current part."""

HEAD_WIDTH = 64
"""Width of an attention head in all published sizes of DINOv2 (arXiv 2304.07193, table 17)."""


def convert_gguf(file: Path, folder: Path) -> None:
    """Convert a causal language model and its tokenizer from a GGUF file to a folder that transformers loads.

    Weights are stored in float32; quantized weights are dequantized. The folder is written atomically.

    Args:
        file: path of the GGUF file.
        folder: folder to write.

    Raises:
        ModuleNotFoundError: if the package gguf is not installed.
        ValueError: if transformers cannot read the file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _reading_gguf(file):
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, trust_remote_code=False)
    # The weights are dequantized, but transformers does not save a model whose configuration says otherwise.
    model.config.__dict__.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    with rebuilt_folder(folder) as aside:
        plain.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def read_gguf_configuration(file: Path) -> Any:
    """Read the configuration of a language model in a GGUF file, a ``PreTrainedConfig``, without reading its weights.

    Args:
        file: path of the GGUF file.

    Raises:
        ModuleNotFoundError: if the package gguf is not installed.
        ValueError: if transformers cannot read the file.
    """
    from transformers import AutoConfig

    with _reading_gguf(file):
        return AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, trust_remote_code=False)


@contextmanager
def _reading_gguf(file: Path) -> Iterator[None]:
    """Context manager that converts the errors with which transformers rejects a GGUF file to a ValueError.

    Raises:
        ModuleNotFoundError: if the package gguf is not installed.
        ValueError: if transformers cannot read the file.
    """
    if find_spec("gguf") is None:
        raise ModuleNotFoundError("reading a GGUF file needs the package gguf: pip install gguf")
    try:
        yield
    except (OSError, *BROKEN) as error:
        raise ValueError(f"transformers cannot read {file} ({reason(error)})") from error


def convert_onnx(file: Path, folder: Path) -> None:
    """Convert a DINOv2 model (without registers) from an ONNX file to a folder that transformers loads, in float32.

    The model in the file must have been exported from transformers. If it is part of a larger model, the other parts, such as a
    classifier, are left out. The folder is written atomically.

    Args:
        file: path of the ONNX file.
        folder: folder to write.

    Raises:
        ModuleNotFoundError: if the package onnx is not installed.
        ValueError: if the file is not a valid ONNX file, or does not contain such a model.
    """
    from transformers import Dinov2Config, Dinov2Model

    weights = _onnx_weights(file)
    mark = "embeddings.patch_embeddings.projection.weight"
    prefix = next((name.removesuffix(mark) for name in weights if name.endswith(mark)), None)
    state = {
        _present_name(name.removeprefix(prefix)): weight
        for name, weight in weights.items()
        if prefix is not None and name.startswith(prefix)
    }
    layers = {int(match[1]) for name in state if (match := re.match(r"encoder\.layer\.(\d+)\.", name))}
    if not layers or "embeddings.cls_token" not in state or "encoder.layer.0.layer_scale1.lambda1" not in state:
        raise ValueError(
            f"{file} contains no DINOv2 that transformers exported; of ONNX files, only these can be converted"
        )
    width, channels, patch, _ = state[mark].shape
    # the position of the class token and those of the patches are constants without a name of the model
    tables = [
        x for name, x in weights.items() if not name.startswith(str(prefix)) and x.dim() == 3 and x.shape[-1] == width
    ]
    positions = state.get("embeddings.position_embeddings")
    if positions is None and sorted(x.shape[1] > 1 for x in tables) == [False, True]:
        positions = torch.cat(sorted(tables, key=lambda x: x.shape[1]), 1)
    side = 0 if positions is None else round((positions.shape[1] - 1) ** 0.5)
    if positions is None or side**2 + 1 != positions.shape[1]:
        raise ValueError(f"{file} has no position embeddings of a square of patches beside a class token")
    state["embeddings.position_embeddings"] = positions
    mlp_bias = state.get("encoder.layer.0.mlp.fc1.bias")
    if mlp_bias is None:
        raise ValueError(f"{file} has a gated MLP, as DINOv2's largest size; only the other sizes can be converted")
    config = Dinov2Config(
        hidden_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=width // HEAD_WIDTH,
        num_channels=channels,
        mlp_ratio=mlp_bias.shape[0] // width,
        image_size=side * patch,
        patch_size=patch,
    )
    model = Dinov2Model(config).eval()
    missing = sorted(model.state_dict().keys() - state.keys() - {"embeddings.mask_token"})
    if missing:
        raise ValueError(f"{file} lacks {missing[0]} and {len(missing) - 1} more weights of a DINOv2")
    # Only pretraining masks patches, so the exported graph does not use this weight.
    state["embeddings.mask_token"] = state.get("embeddings.mask_token", torch.zeros(1, width))
    try:
        model.load_state_dict({name: state[name] for name in model.state_dict()})
    except RuntimeError as error:
        raise ValueError(f"{file}: {str(error).splitlines()[-1].strip()}") from error
    with rebuilt_folder(folder) as aside:
        model.save_pretrained(aside)


def _present_name(name: str) -> str:
    for former, present in RENAMED.items():
        name = name.replace(former, present)
    return name


def _onnx_weights(file: Path) -> dict[str, torch.Tensor]:
    """Read the float32 and float16 weights of an ONNX file as a mapping from name to float32 tensor.

    PyTorch's exporter replaces the names of some matrices with numbers. Such a matrix gets the name of the operation that uses
    it, and is transposed as in ``nn.Linear``.

    Raises:
        ModuleNotFoundError: if the package onnx is not installed.
        ValueError: if the file is not a valid ONNX file, or lacks some of its weights.
    """
    if find_spec("onnx") is None:
        raise ModuleNotFoundError("reading an ONNX file needs the package onnx: pip install onnx")
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        graph = onnx.load(str(file)).graph
    except (DecodeError, OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ValueError(f"{file} is not an ONNX file with all of its weights ({str(error)[:200]})") from error
    weights = {
        tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()).float()
        for tensor in graph.initializer
        if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    }
    for node in graph.node:
        matrix = next((name for name in node.input if name.startswith("onnx::MatMul") and name in weights), None)
        if node.op_type == "MatMul" and matrix is not None:
            name = node.name.strip("/").replace("/", ".").removesuffix(".MatMul")
            # MatMul computes x @ matrix; nn.Linear stores the transpose.
            weights[f"{name}.weight"] = weights.pop(matrix).T.contiguous()
    return weights
