"""Loading of pretrained weights from a run, a checkpoint or an exported folder into a new model.

Position embeddings and mixing coefficients are resized to the grid of the new model. Output layers of a different size keep
their initial values. A report lists the tensors that were loaded, resized, newly initialized and left out. The optimizer state
and the progress of training are not loaded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mhla.attention.mixing import MixingCoefficients
from lightning_mhla.checkpoints.io import WholeCheckpointIO, find_checkpoints
from lightning_mhla.checkpoints.sharded import is_sharded
from lightning_mhla.system.untrusted import BROKEN, read_json, reason

log = logging.getLogger(__name__)

COMMON = ("qkv.", "proj.")
"""Name prefixes of the parts that every kind of attention layer has.

Other parts keep their initial values if the pretrained model lacks them or has them in a different size.
"""


@dataclass(frozen=True)
class Pretrained:
    """Weights of a pretrained model, and the hyperparameters that the model was built with.

    Attributes:
        weights: tensors by name.
        options: hyperparameters of the model; empty if unknown.
    """

    weights: dict[str, Tensor]
    options: dict[str, Any]

    @property
    def block_grid(self) -> tuple[int, ...] | None:
        """Number of attention blocks along each axis in the pretrained model, or None if it is unknown."""
        attention = self.options.get("attention")
        first = attention[0] if isinstance(attention, list) and attention else attention
        grid = first.get("block_grid") if isinstance(first, dict) else None
        return tuple(grid) if grid else None


def read_trained(path: str | Path) -> Pretrained | None:
    """Read the network weights of a run or checkpoint, or their moving average if the checkpoint contains it.

    Args:
        path: folder of a run, whose latest complete checkpoint is read; a sharded checkpoint; or a ``.ckpt`` file.

    Returns:
        Weights and hyperparameters of the model, or None if the path is neither a run nor a checkpoint.

    Raises:
        ValueError: if the checkpoint cannot be read safely, or contains no weights of a network.
    """
    local = Path(path)
    exported = (local / "config.json").is_file() or (local / "model_index.json").is_file()
    run = local.is_dir() and not exported and (is_sharded(local) or bool(find_checkpoints(local)))
    if not run and not (local.is_file() and local.suffix == ".ckpt"):
        return None
    content = WholeCheckpointIO().load_checkpoint(local)
    weights = {k.removeprefix("network."): v for k, v in content["state_dict"].items() if k.startswith("network.")}
    if not weights:
        raise ValueError(f"{path} contains no network of this suite")
    return Pretrained(weights, content.get("hyper_parameters") or {})


def read_pretrained(path: str | Path) -> Pretrained:
    """Read pretrained weights from a run, a checkpoint, or a folder with ``config.json`` and safetensors files.

    Args:
        path: folder of a run, whose latest complete checkpoint is read; a sharded checkpoint; a ``.ckpt`` file; or a folder to
            which a model was exported, with ``config.json`` and safetensors files.

    Returns:
        Weights and hyperparameters of the model. If a checkpoint contains a moving average of the weights, the average is
        returned.

    Raises:
        FileNotFoundError: if the path is none of these.
        ValueError: if the files cannot be read safely.
    """
    if (trained := read_trained(path)) is not None:
        return trained
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors")) if (folder / "config.json").is_file() else []
    if not files:
        raise FileNotFoundError(
            f"pretrained {path} is not a run folder, a checkpoint (.ckpt) or an exported folder (config.json and safetensors)"
        )
    try:
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        return Pretrained(weights, read_json(folder / "config.json"))
    except (SafetensorError, OSError, *BROKEN) as error:
        raise ValueError(f"pretrained {path} cannot be read safely ({reason(error)})") from error


@dataclass
class Report:
    """Names of the tensors that were and were not loaded from pretrained weights into a model.

    Attributes:
        taken: tensors that were loaded unchanged.
        resized: tensors that were resized to fit the model.
        initialized: tensors of the model that keep their initial values.
        left: pretrained tensors that the model does not have.
    """

    taken: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    initialized: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        labels = {"taken": "taken", "resized": "resized", "initialized": "newly initialized", "left": "left"}
        return "; ".join(f"{len(names)} {labels[key]}{_some(names, key)}" for key, names in vars(self).items())


def _some(names: Sequence[str], key: str) -> str:
    if key == "taken" or not names:
        return ""
    return f" ({', '.join(names[:3])}{', ..' if len(names) > 3 else ''})"


@torch.no_grad()
def adopt(
    network: nn.Module,
    source: Pretrained,
    path: str,
    *,
    heads: Sequence[str] = (),
    positions: Sequence[str] = (),
) -> Report:
    """Load pretrained weights into a model of the same width and depth, and log which tensors were loaded.

    Args:
        network: model to load the weights into, changed in place.
        source: weights and options of the pretrained model.
        path: path of the weights, for messages.
        heads: name prefixes of output layers, which keep their initial values if the pretrained model lacks them or has them
            in a different size.
        positions: names of position embeddings ``[1, side * side, dim]``, which are resized if the model has a different number
            of tokens.

    Returns:
        Names of the tensors that were loaded, resized, initialized and left out.

    Raises:
        ValueError: if the weights come from a model of a different width or depth, or contain different values for tensors that
            are one shared parameter in this model, such as tied embeddings.
    """
    state, fitted, report = network.state_dict(), {}, Report()
    mixing = {name: module for name, module in network.named_modules() if isinstance(module, MixingCoefficients)}
    wrong: list[str] = []
    for name, tensor in source.weights.items():
        owner, _, leaf = name.rpartition(".")
        if name not in state:
            (report.left if _is_added(name) or name.startswith(tuple(heads)) else wrong).append(name)
        # Equal shapes do not suffice for mixing coefficients: 2 x 8 and 4 x 4 blocks both have 16 x 16.
        elif state[name].shape == tensor.shape and not _moves(mixing.get(owner), source.block_grid):
            fitted[name] = tensor
            report.taken.append(name)
        elif owner in mixing:
            carried = mixing[owner].carried(leaf, tensor, source.block_grid)
            (report.initialized if carried is None else report.resized).append(name)
            if carried is not None:
                fitted[name] = carried
        elif name in positions:
            fitted[name] = resize_positions(tensor, state[name].shape[1])
            report.resized.append(name)
        elif name.startswith(tuple(heads)) or _is_added(name):
            report.initialized.append(name)
        else:
            wrong.append(f"{name} {list(tensor.shape)} for {list(state[name].shape)}")
    # Several names of one parameter: loading would silently keep the last value.
    shared = _shared_names(network)
    for names in {group for name, group in shared.items() if name in fitted}:
        first, *others = (name for name in names if name in fitted)
        if different := next((name for name in others if not torch.equal(fitted[first], fitted[name])), None):
            raise ValueError(
                f"pretrained {path} has different weights {first} and {different}, which this model shares; build it with "
                "separate ones (--model.shape.tie_embeddings=false for a language model)"
            )
    # Exported files store a shared parameter under one of its names only.
    through_shared = [
        name for name in state if name not in source.weights and fitted.keys() & set(shared.get(name, ()))
    ]
    report.taken += through_shared
    missing = [name for name in state if name not in source.weights and name not in through_shared]
    lacking = [name for name in missing if not _is_added(name) and not name.startswith(tuple(heads))]
    report.initialized += [name for name in missing if name not in lacking]
    if wrong or lacking:
        parts = [*wrong, *(f"{name} is missing" for name in lacking)]
        raise ValueError(
            f"pretrained {path} is from a model of a different shape: {'; '.join(parts[:3])} ({len(parts)} tensors in all); "
            "set width, depth, heads and patches as it was trained"
        )
    # Not strict, because tensors that keep their initial values are missing. Other missing tensors are errors above.
    network.load_state_dict(fitted, strict=False)
    log.info("started from %s: %s", path, report)
    return report


def _shared_names(network: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map the name of each parameter that has several names, such as tied embeddings, to all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


def _is_added(name: str) -> bool:
    return ".attn." in name and not name.split(".attn.")[-1].startswith(COMMON)


def _moves(module: MixingCoefficients | None, block_grid: tuple[int, ...] | None) -> bool:
    """Return whether a layer's block grid and that of the pretrained model differ in size, such as 2 x 8 and 4 x 4 blocks.

    Only grids with the same number of axes are compared. Otherwise, and if either grid is unknown, the result is False.

    Args:
        module: mixing coefficients of the layer; None if the layer has none.
        block_grid: number of blocks along each axis in the pretrained model; None if unknown.
    """
    grid = getattr(module, "grid", None)
    return grid is not None and block_grid is not None and tuple(grid) != block_grid and len(grid) == len(block_grid)


def resize_positions(position: Tensor, tokens: int) -> Tensor:
    """Resize learned position embeddings from one square grid to another by bicubic interpolation.

    Args:
        position: embeddings ``[1, N, dim]`` of N tokens, where N is a square number.
        tokens: number of tokens of the new grid, a square number.

    Returns:
        Embeddings ``[1, tokens, dim]`` with the dtype of ``position``.

    Raises:
        ValueError: if either grid is not square.
    """
    old, new = math.isqrt(position.shape[1]), math.isqrt(tokens)
    if old * old != position.shape[1] or new * new != tokens:
        raise ValueError(
            f"positions of {position.shape[1]} tokens cannot be resized to {tokens}: both numbers must be squares"
        )
    # [1, N, dim] to [1, dim, old, old], in float32 for the weighted sums of the interpolation.
    grid = position.float().transpose(1, 2).unflatten(-1, (old, old))
    grid = F.interpolate(grid, (new, new), mode="bicubic", antialias=new < old, align_corners=False)
    return grid.flatten(2).transpose(1, 2).to(position.dtype)
