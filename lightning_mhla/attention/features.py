"""Feature maps of queries and keys."""

from __future__ import annotations

from typing import Literal

import torch
from mhla_kernels.attention import without_autocast
from mhla_kernels.features import FEATURE_MAP_FLOOR
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mhla.attention.config import Features
from lightning_mhla.attention.positions import Rotary

LARGEST_EXPONENT = 30.0
"""Largest exponent of the learned features of keys: exp of it is 1e13, and a million such terms fit into float32."""


class LearnedFeatures(nn.Module):
    """Learned feature map ``exp([W x, -W x])`` (Hedgehog, arXiv 2402.04347, section 4.2).

    Each head has a matrix W for queries and one for keys. To avoid overflow, the features of a query are divided by the largest
    one, whose logarithm is returned too. Exponents of keys are clamped at :data:`LARGEST_EXPONENT`; gradients ignore the clamp,
    so that training can reduce the exponents again.

    W starts as ``Dk ** -0.25`` times the identity. An attention weight is then a sum over the Dk features i, each of which adds
    ``exp(Dk ** -0.25 (q_i + k_i))`` and its inverse. The weight is largest where q and k are large in the same feature.

    Args:
        heads: number of query heads.
        width: width of a key.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(heads, width, width))
        self.key = nn.Parameter(torch.empty(heads, width, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the query and key matrices of every head to ``Dk ** -0.25`` times the identity."""
        width = self.query.shape[-1]
        for weight in (self.query, self.key):
            weight.copy_(torch.eye(width, device=weight.device) * width**-0.25)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the features of queries and keys, both ``[B, N, H, Dk]``.

        Returns:
            Features of queries ``[B, N, H, 2 Dk]`` divided by the largest one, the logarithm ``[B, N, H]`` of that divisor,
            and features of keys ``[B, N, H, 2 Dk]``; float32, or float64 for float64 inputs.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        with without_autocast(q.device.type):
            q, k = (
                torch.einsum("bnhd,hde->bnhe", x.to(wide), weight.to(wide))
                for x, weight in ((q, self.query), (k, self.key))
            )
        exponents, keys = torch.cat([q, -q], -1), torch.cat([k, -k], -1)
        largest = exponents.amax(-1)
        keys = keys.clamp(max=LARGEST_EXPONENT).detach() + (keys - keys.detach())
        return (exponents - largest[..., None]).exp(), largest, keys.exp()


def elu_plus_one(x: Tensor) -> Tensor:
    """Compute ``elu(x) + 1``, which is ``x + 1`` above 0 and ``exp(x)`` below, to the full precision of the dtype.

    ``F.elu(x) + 1`` would round ``exp(x)`` to the spacing of numbers near 1, and thus to 0 below -17 in float32 and below -6
    in bfloat16.
    """
    # masked first, so that a large x makes neither an infinite exponential nor NaN of its gradient; clamp has none at 0
    return F.relu(x) + x.masked_fill(x > 0, 0).exp()


def apply_features(
    q: Tensor,
    k: Tensor,
    features: Features,
    rotary: Rotary | None = None,
    key_weighting: bool = False,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Literal["identity", "relu"]]:
    """Apply a feature map, key weighting and rotary embedding to queries and keys.

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        features: name of the feature map.
        rotary: rotary angles of the tokens; None for no rotation.
        key_weighting: whether to scale the keys by :func:`weighted_keys`.
        key_mask: ``[B, N]`` bool, False for hidden tokens; None without a mask.

    Returns:
        Queries, keys, and the feature map that the operator still has to apply: ``"relu"``, which the operator computes at no
        extra cost, or ``"identity"``.
    """
    remaining_map: Literal["identity", "relu"] = "identity"
    if features == "elu":
        q, k = elu_plus_one(q), elu_plus_one(k)
    elif features == "softplus":
        q, k = F.softplus(q), F.softplus(k)
    elif features == "sana":
        q, k = F.relu(q), F.relu(k)
    elif features == "relu" and key_weighting:
        q, k = F.relu(q) + FEATURE_MAP_FLOOR, F.relu(k) + FEATURE_MAP_FLOOR
    elif features == "relu":
        remaining_map = "relu"
    if key_weighting:
        k = weighted_keys(q, k, key_mask)
    if rotary is None:
        return q, k, remaining_map
    return rotary.turn(q, remaining_map), rotary.turn(k, remaining_map), "identity"


def weighted_keys(q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Scale each key by N times its softmax weight for the mean query (RALA, arXiv 2411.07635).

    The result is ``N softmax_j(Dk^-0.5 mean_t(q_t) . k_j) k_j``.

    Args:
        q: mapped queries ``[B, N, H, Dk]``.
        k: mapped keys ``[B, N, H, Dk]``.
        key_mask: ``[B, N]`` bool, False for hidden tokens, which count neither for the mean nor for N.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if key_mask is None:
        mean, count = q.mean(1, dtype=wide), k.new_tensor(k.shape[1], dtype=wide)
    else:
        count = key_mask.sum(1, dtype=wide).clamp(min=1)[:, None, None]
        mean = (q * key_mask[..., None, None]).sum(1, dtype=wide) / count
    with without_autocast(q.device.type):
        scores = torch.einsum("bhd,bnhd->bnh", mean, k.to(wide)) * k.shape[-1] ** -0.5
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[..., None], torch.finfo(wide).min)
    return k * (scores.softmax(1) * count).to(k.dtype)[..., None]
