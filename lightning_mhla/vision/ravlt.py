"""Conversion of RAVLT's published weights (github.com/qhfan/RALA) to the parameter names and shapes of a VLT."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import torch
from torch import Tensor

from lightning_mhla.checkpoints.pretrained import Pretrained
from lightning_mhla.system.untrusted import BROKEN, reason

NAMES = (
    (r"^patch_embed\.proj\.", "stem."),
    (r"^layers\.", "stages."),
    (r"\.downsample\.reduction\.", ".downsample.0."),
    (r"\.downsample\.norm\.", ".downsample.1."),
    (r"\.(norm[12])\.norm\.", r".\1."),
    (r"\.pos\.", ".position."),
    (r"\.ffn\.dwconv\.", ".mlp.conv."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn\.lepe\.", ".mixer.attn.lepe.conv."),
    (r"\.attn\.(qkvo|proj)\.", r".mixer.attn.\1."),
    (r"\.gamma_([12])$", r".scale\1"),
)
"""Patterns in RAVLT's parameter names and their replacements in a VLT, applied in this order."""
LINEAR = re.compile(r"(\.attn\.(qkv|gate|proj)|\.mlp\.fc[12]|^head)\.weight$")
"""Pattern for the VLT names of weights that belong to linear layers in a VLT and to 1 x 1 convolutions in RAVLT."""


def read_ravlt(path: str | Path) -> Pretrained | None:
    """Read published weights of RAVLT (arXiv 2411.07635), and convert them for a :class:`lightning_mhla.vision.VLT`.

    Args:
        path: file that RAVLT's training script or ``torch.save(model.state_dict(), ...)`` wrote.

    Returns:
        Weights by parameter name of a VLT, without hyperparameters; None for a file that does not end in .pth or .pt.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file cannot be read without running code, or contains weights of a different model.
    """
    if Path(path).suffix not in (".pth", ".pt"):
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(f"pretrained {path}: the file does not exist")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, *BROKEN) as error:
        raise ValueError(f"pretrained {path} cannot be read safely ({reason(error)})") from error
    for key in ("model", "state_dict", "model_ema"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or "patch_embed.proj.0.weight" not in content:
        raise ValueError(f"pretrained {path} does not contain weights of RAVLT")
    return Pretrained(from_ravlt(content), {})


def from_ravlt(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert RAVLT's weights to the parameter names and shapes of a :class:`lightning_mhla.vision.VLT`.

    The VLT must have the attention options ``gate: true`` and ``lepe: 5``.

    Args:
        weights: tensors by parameter name of RAVLT.

    Returns:
        Tensors by parameter name of a VLT.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".RoPE." in name:  # a VLT computes angles from the size of the image
            continue
        # the convolution that halves the map ends a stage in RAVLT, and begins the next one in a VLT
        if stage := re.match(r"layers\.(\d+)\.downsample\.", name):
            name = f"layers.{int(stage[1]) + 1}.downsample.{name[stage.end() :]}"
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        if stem := re.match(r"stem\.(\d+)\.", name):  # the first layer of a VLT's stem is the check of the image
            name = f"stem.{int(stem[1]) + 1}.{name[stem.end() :]}"
        if ".attn.qkvo." in name:
            # RAVLT projects queries, keys, values and gate with one layer, in this order.
            width = 3 * len(tensor) // 4
            named[name.replace("qkvo", "qkv")], named[name.replace("qkvo", "gate")] = tensor[:width], tensor[width:]
        else:
            named[name] = tensor.flatten() if name.endswith((".scale1", ".scale2")) else tensor
    return {name: x.flatten(1) if LINEAR.search(name) else x for name, x in named.items()}
