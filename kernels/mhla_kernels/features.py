"""The feature map that the operator applies itself, what masked tokens become, and rotary embedding of mapped features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FeatureMap = Literal["identity", "relu"]

FEATURE_MAP_FLOOR = 1e-6
"""Added after the rectifier, so that no query meets a normaliser of zero (the paper's public code)."""


def map_features(
    q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys mapped; all three zero where ``key_mask`` hides, whatever they held, NaN included."""
    if feature_map == "relu":
        q, k = q.relu() + FEATURE_MAP_FLOOR, k.relu() + FEATURE_MAP_FLOOR
    if key_mask is not None:
        hidden = ~key_mask[..., None, None]
        q, k, v = (x.masked_fill(hidden, 0) for x in (q, k, v))
    return q, k, v


def turn(x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool) -> Tensor:
    """Features mapped and turned by pairs: :func:`mhla_kernels.rotary_features` in PyTorch."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mapped = x.to(dtype)
    if relu:
        mapped = mapped.relu() + FEATURE_MAP_FLOOR
    pairs = mapped.unflatten(-1, (-1, 2)) if interleaved else mapped.unflatten(-1, (2, -1)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    cos, sin = (angle.detach().to(dtype).unsqueeze(-2) for angle in (cos, sin))
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2).to(x.dtype)
