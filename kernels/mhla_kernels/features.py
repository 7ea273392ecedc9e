"""Feature map of attention, masking of tokens, and rotary position embedding of mapped features, in PyTorch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FeatureMap = Literal["identity", "relu"]

FEATURE_MAP_FLOOR = 1e-6
"""Number that the feature map adds to ``relu(x)``, so that no sum of weights is zero (from the paper's public code)."""


def map_features(
    q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the feature map to queries and keys, and set masked queries, keys and values to zero.

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, Hkv, Dk]``; in cross-attention, their number may differ from N.
        v: values, ``[B, N, Hkv, Dv]``, as many as keys.
        feature_map: ``"identity"``, or ``"relu"`` for ``relu(x) + 1e-6``.
        query_mask: ``[B, N]`` bool, False for masked queries, which may hold any value, NaN included; None masks no query.
        key_mask: bool mask of keys and values with the first two axes of ``k``, False for masked ones, which may hold any
            value; None masks no key.

    Returns:
        Queries, keys and values, in the shapes of ``q``, ``k`` and ``v``.
    """
    return map_tokens(q, feature_map, query_mask), map_tokens(k, feature_map, key_mask), hide(v, key_mask)


def map_tokens(x: Tensor, feature_map: FeatureMap, mask: Tensor | None) -> Tensor:
    """Apply the feature map to queries or keys, and set the masked ones to zero.

    Args:
        x: queries or keys, ``[B, N, H, D]``.
        feature_map: ``"identity"``, or ``"relu"`` for ``relu(x) + 1e-6``.
        mask: ``[B, N]`` bool, False for masked tokens, which may hold any value, NaN included; None masks no token.
    """
    return hide(rectify(x) if feature_map == "relu" else x, mask)


def rectify(x: Tensor) -> Tensor:
    """Return ``relu(x) + 1e-6``."""
    return x.relu() + FEATURE_MAP_FLOOR


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return a copy of tokens in which masked tokens are zero, or the tokens themselves if there is no mask.

    Args:
        x: tokens, ``[B, N, H, D]``.
        mask: ``[B, N]`` bool, False for masked tokens, which may hold any value; None to return ``x`` itself.
    """
    # masked_fill, not a product with the mask: zero times NaN would be NaN
    return x if mask is None else x.masked_fill(~mask[..., None, None], 0)


def turn(x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool) -> Tensor:
    """Apply the feature map to queries or keys, then rotary position embedding, in PyTorch.

    Rotary position embedding rotates each pair of features by an angle that depends on the token's position.

    Args:
        x: queries or keys, ``[B, N, H, D]``.
        cos: cosine of the angles, ``[N, D / 2]`` or ``[B, N, D / 2]``; gets no gradient.
        sin: sine of the angles, in the same shape; gets no gradient.
        relu: whether ``relu(x) + 1e-6`` is applied before the rotation.
        interleaved: whether features 2i and 2i + 1 are a pair, instead of i and i + D / 2.

    Returns:
        ``[B, N, H, D]`` in the dtype of ``x``; computed in float32 (float64 for float64 inputs).
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mapped = x.to(dtype)
    if relu:
        mapped = rectify(mapped)
    # Every feature times the cosine, plus the other one of its pair times the signed sine. This takes half the time of
    # computing the two features of a pair by themselves, which are strided views in both passes.
    shape, axis = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    partners = mapped.unflatten(-1, shape).roll(1, axis).flatten(-2)
    # [N, 1, D] or [B, N, 1, D]: the angles get an axis of length 1 for the heads.
    cos, sin = (angle.detach().to(dtype).unsqueeze(-2) for angle in (cos, sin))
    cos, sin = torch.stack([cos, cos], axis).flatten(-2), torch.stack([-sin, sin], axis).flatten(-2)
    return torch.addcmul(mapped * cos, partners, sin).to(x.dtype)
