"""Loading of pretrained SANA weights from diffusers, from NVlabs' original file, or from a training run of this package.

diffusers converts the names in NVlabs' file to its own names. NVlabs' file also contains position embeddings and the embedding
of the empty caption, which are not used because diffusers computes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from diffusers import SanaPipeline, SanaTransformer2DModel
from diffusers.loaders.single_file_utils import convert_sana_transformer_to_diffusers
from torch import Tensor

from lightning_mhla.generative.solvers import flow_solver
from mhla_tasks.captioned.host import Host, euler_scheduler

UNUSED = ("pos_embed", "y_embedder.y_embedding")
"""Entries of NVlabs' files that diffusers' conversion expects but does not use."""


def published_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert SANA weights from the names in NVlabs' original release to diffusers' names.

    Args:
        state: weights by their names in NVlabs' release.

    Returns:
        The weights by diffusers' names.
    """
    present = dict(state)
    for name in UNUSED:
        present.setdefault(name, Tensor())
    return convert_sana_transformer_to_diffusers(present)


SANA = Host(
    SanaTransformer2DModel,
    SanaPipeline,
    "a SANA transformer",
    "transformer_blocks.0.",
    lambda state: any(".attn.qkv." in name for name in state),
    published_names,
    {"dpm": flow_solver, "euler": euler_scheduler},
    # Embeddings replace the prompts. Binning would change the size to one that SANA was trained on.
    {"height": 32, "width": 32, "prompt": None, "negative_prompt": None, "use_resolution_binning": False},
)
