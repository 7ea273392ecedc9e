"""The feature map that the operator applies itself, and what masked tokens become."""

from __future__ import annotations

from typing import Literal

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
