"""Feature maps of queries and keys."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from lightning_mhla.attention.config import Features
from lightning_mhla.attention.positions import Rotary


def apply_features(
    q: Tensor, k: Tensor, features: Features, rotary: Rotary | None = None
) -> tuple[Tensor, Tensor, Literal["identity", "relu"]]:
    """Queries and keys after feature map and rotary, and what is left to the operator (relu costs nothing there)."""
    rest: Literal["identity", "relu"] = "identity"
    if features == "elu":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    elif features == "softplus":
        q, k = F.softplus(q), F.softplus(k)
    elif features == "sana":
        q, k = F.relu(q), F.relu(k)
    else:
        rest = features
    if rotary is None:
        return q, k, rest
    return rotary.turn(q, rest), rotary.turn(k, rest), "identity"
