"""Weights to start from: diffusers' SANA, NVlabs' own file, or a run of this suite.

NVlabs' names follow diffusers' own table. Their file names positions and the empty caption too, which diffusers computes
and encodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from diffusers import SanaTransformer2DModel
from diffusers.loaders.single_file_utils import convert_sana_transformer_to_diffusers
from torch import Tensor

from mhla_tasks.captioned import pretrained
from mhla_tasks.captioned.pretrained import Host
from mhla_tasks.text_to_image.model import TransformerConfig

UNUSED = ("pos_embed", "y_embedder.y_embedding")
"""Entries of NVlabs' files that diffusers' table expects and drops."""


def published_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """NVlabs' weights by diffusers' names."""
    present = dict(state)
    for name in UNUSED:
        present.setdefault(name, Tensor())
    return convert_sana_transformer_to_diffusers(present)


SANA = Host(
    SanaTransformer2DModel,
    "a SANA transformer",
    "transformer_blocks.0.",
    lambda state: any(".attn.qkv." in name for name in state),
    published_names,
)


def load_weights(model: SanaTransformer2DModel, path: str) -> None:
    """Give ``model`` the weights at ``path``; see :func:`mhla_tasks.captioned.pretrained.load_weights`."""
    pretrained.load_weights(model, path, SANA)


def read_transformer(shape: TransformerConfig, path: str) -> SanaTransformer2DModel:
    """The original transformer with the weights at ``path``; errors as of :func:`load_weights`."""
    model = SanaTransformer2DModel(**asdict(shape))
    load_weights(model, path)
    return model
