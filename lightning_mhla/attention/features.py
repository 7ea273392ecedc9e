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
"""Largest exponent of the learned features of keys. A sum of a million terms ``exp(30)``, each about 1e13, fits float32."""


class LearnedFeatures(nn.Module):
    """Learned feature map ``exp([W x, -W x])`` of a query or key x (Hedgehog, arXiv 2402.04347, section 4.2).

    Each head has one matrix W for queries and one for keys. To avoid overflow, the features of each query are divided by the
    largest of them, and the forward pass also returns the logarithm of this divisor. Exponents of keys are clamped to ±30.
    Gradients ignore the clamp, so that training can bring larger exponents back into this range.

    W starts as ``Dk ** -0.25`` times the identity matrix, where Dk is the width of a key. The attention weight of a query q and
    a key k is then the sum of ``exp(s_i) + exp(-s_i)`` over their components i, with ``s_i = Dk ** -0.25 * (q_i + k_i)``.

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
        """Set the query and key matrices of every head to ``Dk ** -0.25`` times the identity, for keys of width Dk."""
        width = self.query.shape[-1]
        for weight in (self.query, self.key):
            weight.copy_(torch.eye(width, device=weight.device) * width**-0.25)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the features of queries and keys.

        Args:
            q: queries, ``[B, N, H, Dk]``.
            k: keys, ``[B, N, H, Dk]``.

        Returns:
            Three tensors in float32 (float64 for float64 inputs): the features of the queries, ``[B, N, H, 2 Dk]``, divided by
            the largest feature of each query; the logarithm of this divisor, ``[B, N, H]``; and the features of the keys,
            ``[B, N, H, 2 Dk]``.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        with without_autocast(q.device.type):
            q, k = (
                torch.einsum("bnhd,hde->bnhe", x.to(wide), weight.to(wide))
                for x, weight in ((q, self.query), (k, self.key))
            )
        # The features are exp(q) and exp(-q), so the largest exponent is the largest absolute value.
        largest = q.abs().amax(-1, keepdim=True)
        # The value is clamped, and the gradient is that of the identity.
        k = k.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).detach() + (k - k.detach())
        # in place, because these are the largest tensors of a layer
        f, g = torch.cat([q - largest, -largest - q], -1).exp_(), torch.cat([k, -k], -1).exp_()
        return f, largest[..., 0], g


def elu_plus_one(x: Tensor) -> Tensor:
    """Compute ``elu(x) + 1``, which is ``x + 1`` for positive x and ``exp(x)`` otherwise, in the full precision of the dtype.

    ``F.elu(x) + 1`` loses precision where ``exp(x)`` is small. It returns 0 for x below -17 in float32, and below -6 in
    bfloat16.
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
    """Apply a feature map to queries and keys, optionally followed by key weighting and rotary embedding.

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        features: name of the feature map, such as ``"elu"``. The learned feature map is not applied here; see
            :class:`LearnedFeatures`.
        rotary: rotary angles of the tokens; None for no rotation.
        key_weighting: whether to scale each key by its softmax weight for the mean query; see :func:`weighted_keys`.
        key_mask: ``[B, N]`` bool, False for hidden tokens, which key weighting leaves out; None if no token is hidden.

    Returns:
        Queries and keys of the same shapes, and the feature map that the caller still has to apply to them. This map is
        ``"relu"`` for ``features="relu"`` with neither key weighting nor rotary embedding, because the attention kernel applies
        it at no extra cost. Otherwise, it is ``"identity"``.
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

    The weights are ``softmax_j(Dk ** -0.5 * mean_t(q_t) . k_j)`` over the N tokens j.

    Args:
        q: queries after the feature map, ``[B, N, H, Dk]``.
        k: keys after the feature map, ``[B, N, H, Dk]``.
        key_mask: ``[B, N]`` bool, False for hidden tokens, which are excluded from the mean, the softmax and the count N; None
            if no token is hidden.

    Returns:
        Scaled keys, ``[B, N, H, Dk]``.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if key_mask is None:
        mean, count = q.mean(1, dtype=wide), k.new_tensor(k.shape[1], dtype=wide)
    else:
        # A row without visible tokens would be 0 / 0. For the same reason, hidden scores are finite below, not -inf.
        count = key_mask.sum(1, dtype=wide).clamp(min=1)[:, None, None]
        mean = (q * key_mask[..., None, None]).sum(1, dtype=wide) / count
    with without_autocast(q.device.type):
        scores = torch.einsum("bhd,bnhd->bnh", mean, k.to(wide)) * k.shape[-1] ** -0.5
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[..., None], torch.finfo(wide).min)
    return k * (scores.softmax(1) * count).to(k.dtype)[..., None]
