"""Loading of pretrained Wan weights, including the Wan-MHLA weights that the authors of the MHLA paper published.

The Wan-MHLA weights use the names of the original Wan, which diffusers can convert. The replaced attention of layer n adds
these parameters, named as published (left) and as in this package (right):

    blocks.n.self_attn.g.weight, .bias              blocks.n.attn1.processor.attention.gate.weight, .bias
    blocks.n.self_attn.g_norm.weight                blocks.n.attn1.processor.attention.norm.weight
    blocks.n.self_attn.block_attn.conv.weight       blocks.n.attn1.processor.attention.mixing.weight
        [M, M, 1, 1]                                    [M, M], rows are query blocks

M is the number of attention blocks. Parts of the new attention that the published weights do not contain start without effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from torch import Tensor

from lightning_mhla import AttentionConfig
from lightning_mhla.generative.flow import TIMESTEPS
from lightning_mhla.swap import KEEP
from mhla_tasks.captioned.host import ADDED, Host, build_transformer, euler_scheduler, load_weights, read_weights
from mhla_tasks.video.model import WanTransformerConfig

PUBLISHED = {
    ".attn1.g.": f"{ADDED}gate.",
    ".attn1.g_norm.": f"{ADDED}norm.",
    ".attn1.block_attn.conv.": f"{ADDED}mixing.",
}
PUBLISHED_GRID = (3, 5, 10)
"""Number of blocks along frames, rows and columns in the authors' configuration."""


def published_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the weights of the original Wan, or of Wan-MHLA as published by the MHLA authors, to diffusers' names.

    Args:
        state: weights by published name.

    Returns:
        The weights by diffusers' names; weights that MHLA adds have the names that this package uses.

    Raises:
        ValueError: if the weights belong to a variant of the authors' attention that this package does not support.
    """
    converted: dict[str, Tensor] = {}
    for name, tensor in convert_wan_transformer_to_diffusers(dict(state)).items():
        for published, our_name in PUBLISHED.items():
            name = name.replace(published, our_name)
        if name.endswith(f"{ADDED}mixing.weight"):
            tensor = tensor.flatten(1)
        if ".attn1.lepe." in name:
            raise ValueError(
                f"{name}: a convolution that is added after the gate is not supported; lepe is added before it"
            )
        converted[name] = tensor
    return converted


def _unipc(shift: float) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        num_train_timesteps=TIMESTEPS, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


WAN = Host(
    WanTransformer3DModel,
    WanPipeline,
    "a Wan transformer",
    "blocks.0.",
    lambda state: any(".self_attn." in name for name in state),
    published_names,
    {"unipc": _unipc, "euler": euler_scheduler},
    {"height": 16, "width": 16, "num_frames": 1},
)


def load_published(path: str, block_grid: tuple[int, ...] = PUBLISHED_GRID) -> Any:
    """Load the Wan-MHLA transformer that the authors of the MHLA paper published, with sizes derived from the weights.

    Args:
        path: path of the file that the authors published.
        block_grid: number of attention blocks along frames, rows and columns. The weights determine only the product of the
            three numbers.

    Returns:
        The diffusers ``WanTransformer3DModel`` with replaced attention, in evaluation mode.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if the file does not contain a Wan-MHLA transformer, or its number of attention blocks is not the product of
            ``block_grid``.
    """
    state = read_weights(path, WAN)
    mixing = {
        int(re.findall(r"\d+", name)[0]): t for name, t in state.items() if name.endswith(f"{ADDED}mixing.weight")
    }
    norms = [tensor for name, tensor in state.items() if name.endswith(f"{ADDED}norm.weight")]
    if not mixing or not norms:
        raise ValueError(f"{path} is not a Wan-MHLA: it has no mixing coefficients (block_attn.conv.weight)")
    blocks = len(next(iter(mixing.values())))
    if blocks != prod(block_grid):
        raise ValueError(f"{path} has {blocks} blocks, not the {prod(block_grid)} of block_grid {list(block_grid)}")
    patches = state["patch_embedding.weight"]
    patch = tuple(patches.shape[2:])
    depth = 1 + max(int(re.findall(r"\d+", name)[0]) for name in state if name.startswith("blocks."))
    shape = WanTransformerConfig(
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
    model = build_transformer(WAN, shape, attention, ["mhla" if index in mixing else KEEP for index in range(depth)])
    load_weights(model, path, WAN)
    return model.eval()
