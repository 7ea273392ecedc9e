"""Loading of pretrained DiT weights into a DiT with any kind of attention.

The weights may use diffusers' names, the original names or this package's names. All weights of a softmax model are used,
including the projections of queries, keys, values and outputs. Parts that only the new attention has start without effect: the
``lepe`` convolution adds nothing, and the gate is 1. Mixing coefficients keep their initial values.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mhla.attention import Attention
from lightning_mhla.checkpoints.pretrained import Pretrained, adopt, read_trained
from lightning_mhla.generative.reading import read_diffusers, read_safely, read_safetensors, read_weights_file
from lightning_mhla.system.untrusted import read_json
from mhla_tasks.diffusion.model import DiT

BLOCKS = r"^(?:transformer_)?blocks\.(\d+)\."
"""Pattern of the prefix of the names of a block's weights, both in diffusers and in the original DiT."""

RENAMED = {
    "pos_embed.proj.": "patches.proj.",
    "x_embedder.proj.": "patches.proj.",
    "t_embedder.mlp.0.": "time.linear_1.",
    "t_embedder.mlp.2.": "time.linear_2.",
    "y_embedder.embedding_table.": "label.",
    "proj_out_1.": "modulation.1.",
    "final_layer.adaLN_modulation.1.": "modulation.1.",
    "proj_out_2.": "head.",
    "final_layer.linear.": "head.",
}
"""Prefixes of the names of weights outside the blocks, in diffusers or the original DiT, and the prefixes in this package."""
RENAMED_IN_BLOCKS = {
    "norm1.linear.": "modulation.1.",
    "adaLN_modulation.1.": "modulation.1.",
    "attn1.to_out.0.": "attn.proj.",
    "attn.proj.": "attn.proj.",
    "attn.qkv.": "attn.qkv.",
    "ff.net.0.proj.": "mlp.fc1.",
    "ff.net.2.": "mlp.fc2.",
    "mlp.fc1.": "mlp.fc1.",
    "mlp.fc2.": "mlp.fc2.",
}
"""Prefixes of the names of a block's weights, in diffusers or the original DiT, and the prefixes in this package."""
EMBEDDINGS = {
    "norm1.emb.timestep_embedder.": "time.",
    "norm1.emb.class_embedder.embedding_table.": "label.",
}
"""Prefixes of the names of the embeddings, which diffusers stores in every block, and the prefixes in this package."""


def convert_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the weights of a DiT from the names of diffusers or of the original DiT to the names in this package.

    Args:
        state: weights by name. Weights that already have this package's names are returned unchanged.

    Returns:
        The weights by their names in :class:`DiT`.

    Raises:
        ValueError: if the weights are not those of a DiT, or if the blocks have different copies of the timestep and class
            embeddings, which diffusers stores in every block.
    """
    if "backbone.blocks.0.attn.qkv.weight" in state:
        return dict(state)
    converted: dict[str, Tensor] = {}
    thirds: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in state.items():
        if name == "pos_embed" or name.endswith("pos_embed.pos_embed"):
            continue  # positions are not learned; DiT computes them
        block = re.match(BLOCKS, name)
        inside = name[block.end() :] if block else name
        projection = re.match(r"attn1\.to_([qkv])\.(weight|bias)$", inside)
        if block and projection:
            # diffusers has separate projections; DiT has one matrix of queries, keys and values, concatenated below.
            thirds.setdefault(f"backbone.blocks.{block[1]}.attn.qkv.{projection[2]}", {})[projection[1]] = tensor
            continue
        table = {**EMBEDDINGS, **RENAMED_IN_BLOCKS} if block else RENAMED
        start = next((start for start in table if inside.startswith(start)), None)
        if start is None:
            unknown.append(name)
            continue
        prefix = f"backbone.blocks.{block[1]}." if block and start not in EMBEDDINGS else ""
        target = prefix + table[start] + inside[len(start) :]
        if target in converted and not torch.equal(converted[target], tensor):
            raise ValueError(
                f"{name} differs from the first block's: a DiT has one embedding of timestep and class, of which "
                "diffusers' layout keeps equal copies in all blocks; untrained diffusers models do not"
            )
        converted[target] = tensor
    if unknown or not converted:
        raise ValueError(f"these are not the weights of a DiT: {', '.join(unknown[:3]) or 'no tensors'} ..")
    converted |= {name: torch.cat([parts[letter] for letter in "qkv"]) for name, parts in thirds.items()}
    return converted


def read_state(path: str) -> dict[str, Tensor]:
    """Read the weights of a DiT from a file, a folder or the Hugging Face Hub, without running code from the source.

    Args:
        path: source of the weights, one of these:

            * ``.pt`` or ``.safetensors`` file;
            * folder that ``DiT.save_pretrained`` or a diffusers model or pipeline wrote;
            * name on the Hugging Face Hub, such as ``facebook/DiT-XL-2-256``.

    Returns:
        The weights by their names in the source.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if the source cannot be read safely, or holds more than weights.
    """
    from diffusers import DiTTransformer2DModel

    local = Path(path)
    with read_safely(path):
        if local.is_file():  # DiT's train.py saves its options as a Namespace
            return read_weights_file(local, ("ema",), (argparse.Namespace,))
        for folder in (local, local / "transformer"):
            config = folder / "config.json"
            if config.is_file() and read_json(config).get("_class_name") == DiT.__name__:
                return read_safetensors(folder)
        if (local / "model.safetensors").is_file():  # export of an early version
            return read_weights_file(local / "model.safetensors")
    return read_diffusers(path, DiTTransformer2DModel, "a DiT", "pretrained ")


def _options(path: str) -> dict[str, Any]:
    """Read the constructor arguments of an exported DiT from its ``config.json``; return an empty dict if it is missing."""
    files = (Path(path) / name for name in ("config.json", "transformer/config.json"))
    return next((read_json(file) for file in files if file.is_file()), {})


def load_pretrained(network: DiT, path: str) -> None:
    """Load pretrained weights into a DiT: those of a run, a checkpoint or an export, or published DiT weights.

    If the number of classes differs, the class embedding keeps its random initialization. If the grid of MHLA blocks differs,
    the mixing coefficients are resized to the new grid.

    Args:
        network: DiT, changed in place.
        path: path of a run folder (its latest checkpoint), a checkpoint, an exported folder or a weights file, or a name on
            the Hugging Face Hub.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if the weights are not those of a DiT with this width and depth.
    """
    source = read_trained(path) or Pretrained(convert_state(read_state(path)), _options(path))
    for name, module in network.named_modules():
        # A gate that the source does not have starts at 1, where it has no effect.
        if isinstance(module, Attention) and not (module.gate is not None and f"{name}.gate.weight" in source.weights):
            module.open_gate()
    adopt(network, source, path, heads=("label.",))
