"""Weights to start from: diffusers' Wan, the original one's, a run of this suite, or what the paper's authors published.

The authors' Wan-MHLA has the names of the original Wan, which diffusers' own table translates, and for the attention of a
replaced layer n:

    blocks.n.self_attn.g.weight, .bias              blocks.n.attn1.processor.attention.gate.weight, .bias
    blocks.n.self_attn.g_norm.weight                blocks.n.attn1.processor.attention.norm.weight
    blocks.n.self_attn.block_attn.conv.weight       blocks.n.attn1.processor.attention.mixing.weight
        [M, M, 1, 1]                                    [M, M], rows are query blocks

What only the new attention has, where the source lacks it, starts without effect.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from torch import Tensor

from lightning_mhla import AttentionConfig
from lightning_mhla.attention.mixing import DenseCoefficients
from lightning_mhla.checkpoints.pretrained import Pretrained, read_trained
from lightning_mhla.generative.reading import read_diffusers, read_safely, read_safetensors, read_weights_file
from lightning_mhla.swap import KEEP, SAVED, is_swapped
from lightning_mhla.system.untrusted import read_json
from mhla_tasks.video.model import TransformerConfig, build_transformer

log = logging.getLogger(__name__)

ADDED = ".attn1.processor.attention."
"""In the names of what a swap adds."""

PUBLISHED = {
    ".attn1.g.": f"{ADDED}gate.",
    ".attn1.g_norm.": f"{ADDED}norm.",
    ".attn1.block_attn.conv.": f"{ADDED}mixing.",
}
PUBLISHED_GRID = (3, 5, 10)
"""Blocks along frames, rows and columns in the authors' configuration."""

CONTAINERS = ("state_dict", "model", "module")
"""Entries of a training checkpoint that may hold the weights."""


def published_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the original Wan, or of the authors' Wan-MHLA, by our names; see the module's description.

    Raises:
        ValueError: for weights of the authors' other attentions, which are none of ours.
    """
    converted: dict[str, Tensor] = {}
    for name, tensor in convert_wan_transformer_to_diffusers(dict(state)).items():
        for theirs, ours in PUBLISHED.items():
            name = name.replace(theirs, ours)
        if name.endswith(f"{ADDED}mixing.weight"):
            tensor = tensor.flatten(1)
        if ".attn1.lepe." in name:
            raise ValueError(f"{name}: a convolution that is added after the gate is not what lepe is here")
        converted[name] = tensor
    return converted


def read_weights(path: str) -> dict[str, Tensor]:
    """Weights of a Wan transformer by our names; nothing in the files is executed.

    Args:
        path: a checkpoint of ``VideoDiffusion`` (its averaged weights, where it has them); a ``.pt``, ``.pth`` or
            ``.safetensors`` file with the original or the authors' names; a folder that ``save_pretrained`` wrote, of a
            transformer or a pipeline; or a name on the hub.

    Raises:
        FileNotFoundError: when there is nothing at the path.
        ValueError: when it cannot be read safely, or holds other weights.
    """
    local = Path(path)
    with read_safely(path):
        if (trained := read_trained(path)) is not None:
            state = trained.weights
        elif local.is_file():
            state = read_weights_file(local, CONTAINERS, mixed=True)
        elif swapped := [folder for folder in (local, local / "transformer") if is_swapped(folder)]:
            state = read_safetensors(swapped[0])
        else:
            return read_diffusers(path, WanTransformer3DModel, "a Wan transformer")
    state = {name.removeprefix("network."): tensor for name, tensor in state.items()}
    if any(".lora_A." in name for name in state):
        raise ValueError(
            f"{path} holds LoRA adapters beside the weights; put them together first: lightning export {path} FOLDER"
        )
    if not any(name.startswith("blocks.0.") for name in state):
        raise ValueError(f"{path} holds no weights of a Wan transformer (no blocks.0)")
    return published_names(state) if any(".self_attn." in name for name in state) else state


def load_weights(model: WanTransformer3DModel, path: str) -> None:
    """Give ``model`` the weights at ``path``; see :func:`read_weights`.

    Raises:
        FileNotFoundError: when there is nothing at the path.
        ValueError: when they are of a model of another shape, or with other attention.
    """
    own, blocks = model.state_dict(), _blocks_of(path)
    state = {_inside_adapter(name, own): tensor for name, tensor in read_weights(path).items()}
    mixing = {
        f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, DenseCoefficients)
    }
    resized = [name for name in mixing if name in state and blocks not in (None, mixing[name].grid)]
    for name in resized:
        carried = mixing[name].carried("weight", state[name], blocks)
        state[name] = state[name] if carried is None else carried
    wrong = [
        f"{n} {list(t.shape)} for {list(own[n].shape)}"
        for n, t in state.items()
        if n in own and t.shape != own[n].shape
    ]
    foreign = sorted(set(state) - set(own))
    if wrong or foreign:
        raise ValueError(
            f"the weights of {path} are of another shape or attention: {'; '.join([*wrong, *foreign][:3])}; set "
            "transformer, attention and layer_kinds as they were trained"
        )
    added = [name for name in own if name not in state]
    missing = [name for name in added if ADDED not in name and ".lora_" not in name]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing[:3])} ({len(missing)} tensors)")
    model.load_state_dict(state, strict=False)
    taken = len(state) - len(resized)
    log.info(
        "started from %s: %d tensors taken, %d resized, %d newly initialised", path, taken, len(resized), len(added)
    )


def read_transformer(shape: TransformerConfig, path: str) -> WanTransformer3DModel:
    """The softmax transformer with the weights at ``path``; errors as of :func:`load_weights`."""
    model = WanTransformer3DModel(**asdict(shape))
    load_weights(model, path)
    return model


def _blocks_of(path: str) -> tuple[int, ...] | None:
    """Blocks along each axis that the mixing coefficients at ``path`` are for; None where it has none, or does not say."""
    if (trained := read_trained(path)) is not None:
        return trained.block_grid
    folder = next((folder for folder in (Path(path), Path(path) / "transformer") if is_swapped(folder)), None)
    saved: Any = {} if folder is None else read_json(folder / "config.json")[SAVED]
    return Pretrained({}, saved).block_grid


def _inside_adapter(name: str, own: Mapping[str, Tensor]) -> str:
    """The name of a weight that LoRA adapts."""
    parent, _, leaf = name.rpartition(".")
    adapted = f"{parent}.base_layer.{leaf}"
    return adapted if adapted in own else name


def load_published(path: str, block_grid: tuple[int, ...] = PUBLISHED_GRID) -> Any:
    """The authors' Wan-MHLA as a swapped transformer, in evaluation mode; its shape is read off the weights.

    Args:
        path: their file.
        block_grid: blocks along frames, rows and columns: their number alone is in the weights.

    Raises:
        FileNotFoundError: when there is nothing at the path.
        ValueError: when the file holds something else, or another number of blocks.
    """
    state = read_weights(path)
    mixing = {
        int(re.findall(r"\d+", name)[0]): t for name, t in state.items() if name.endswith(f"{ADDED}mixing.weight")
    }
    norms = [tensor for name, tensor in state.items() if name.endswith(f"{ADDED}norm.weight")]
    if not mixing or not norms:
        raise ValueError(f"{path} is no Wan-MHLA: no mixing coefficients in it (block_attn.conv.weight)")
    blocks = len(next(iter(mixing.values())))
    if blocks != prod(block_grid):
        raise ValueError(f"{path} has {blocks} blocks, not the {prod(block_grid)} of block_grid {list(block_grid)}")
    patches = state["patch_embedding.weight"]
    patch = tuple(patches.shape[2:])
    depth = 1 + max(int(re.findall(r"\d+", name)[0]) for name in state if name.startswith("blocks."))
    shape = TransformerConfig(
        patch_size=(patch[0], patch[1], patch[2]),
        num_attention_heads=len(patches) // len(norms[0]),
        attention_head_dim=len(norms[0]),
        in_channels=patches.shape[1],
        out_channels=len(state["proj_out.weight"]) // prod(patch),
        text_dim=state["condition_embedder.text_embedder.linear_1.weight"].shape[1],
        freq_dim=state["condition_embedder.time_embedder.linear_1.weight"].shape[1],
        ffn_dim=len(state["blocks.0.ffn.net.0.proj.weight"]),
        num_layers=depth,
    )
    gated = any(f"{ADDED}gate." in name for name in state)
    attention = AttentionConfig(block_grid=list(block_grid), normalize=False, gate=gated)
    model = build_transformer(shape, attention, ["mhla" if index in mixing else KEEP for index in range(depth)])
    load_weights(model, path)
    return model.eval()
