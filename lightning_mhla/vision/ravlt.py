"""RAVLT's published weights (github.com/qhfan/RALA), by the names of a VLT."""

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
LINEAR = re.compile(r"(\.attn\.(qkv|gate|proj)|\.mlp\.fc[12]|^head)\.weight$")
"""Convolutions of one pixel there, linear layers here."""


def read_ravlt(path: str | Path) -> Pretrained | None:
    """Weights of RAVLT's own file; None for what is none (another ending than .pth and .pt).

    Args:
        path: file, as its training script or ``torch.save(model.state_dict(), ...)`` writes it.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it cannot be read safely, or holds another model.
    """
    if Path(path).suffix not in (".pth", ".pt"):
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(f"pretrained {path}: there is no such file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, *BROKEN) as error:
        raise ValueError(f"pretrained {path} cannot be read safely ({reason(error)})") from error
    for key in ("model", "state_dict", "model_ema"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or "patch_embed.proj.0.weight" not in content:
        raise ValueError(f"pretrained {path} holds no weights of RAVLT")
    return Pretrained(from_ravlt(content), {})


def from_ravlt(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """RAVLT's weights by the names, and in the shapes, of :class:`lightning_mhla.vision.VLT` with a gate and ``lepe: 5``."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".RoPE." in name:  # computed from the size of the image
            continue
        if stage := re.match(r"layers\.(\d+)\.downsample\.", name):  # behind a stage there, before the next one here
            name = f"layers.{int(stage[1]) + 1}.downsample.{name[stage.end() :]}"
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        if stem := re.match(r"stem\.(\d+)\.", name):  # behind the check of the image
            name = f"stem.{int(stem[1]) + 1}.{name[stem.end() :]}"
        if ".attn.qkvo." in name:
            width = 3 * len(tensor) // 4
            found[name.replace("qkvo", "qkv")], found[name.replace("qkvo", "gate")] = tensor[:width], tensor[width:]
        else:
            found[name] = tensor.flatten() if name.endswith((".scale1", ".scale2")) else tensor
    return {name: x.flatten(1) if LINEAR.search(name) else x for name, x in found.items()}
