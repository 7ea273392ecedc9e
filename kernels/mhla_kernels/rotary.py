"""Rotary position embedding after the feature map: one pass over a token tensor, where the operator cannot map by itself."""

from __future__ import annotations

from torch import Tensor

from mhla_kernels.backend import Backend, check_form_and_backend, choose_backend
from mhla_kernels.features import FeatureMap, turn


def rotary_features(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    feature_map: FeatureMap = "relu",
    interleaved: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Feature map, then rotary position embedding (RoFormer, arXiv 2104.09864), of queries or keys.

    Mapped features are turned in pairs by angles that grow with the position, so they are signed afterwards: for attention
    without a normaliser. Computed in float32; on a GPU one fused kernel.

    Args:
        x: ``[B, N, H, D]``, D even; any strides.
        cos: cosine of the angles, ``[N, D / 2]``, or ``[B, N, D / 2]`` where rows are at different positions. No gradient.
        sin: sine, of the same shape.
        feature_map: ``"relu"``: ``relu(x) + 1e-6``, or ``"identity"``.
        interleaved: whether features 2i and 2i + 1 are a pair (as in RoFormer), instead of i and i + D / 2.
        backend: as for :func:`mhla_kernels.mhla_attention`.

    Returns:
        ``[B, N, H, D]`` in the dtype of ``x``.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [B, N, H, D] with D even")
    batch, tokens, _, width = x.shape
    angles = (tokens, width // 2)
    if cos.shape != sin.shape or cos.shape not in (angles, (batch, *angles)):
        wanted = f"[{tokens}, {width // 2}] or [{batch}, {tokens}, {width // 2}]"
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} must both be {wanted}")
    if feature_map not in ("identity", "relu"):
        raise ValueError(f"feature_map={feature_map!r} is not one of 'identity', 'relu'")
    check_form_and_backend("auto", backend)
    if choose_backend(backend, x, x, x, "parallel") == "triton":
        from mhla_kernels.triton_backend.rotary import turn_fused  # needs triton

        out = turn_fused(x, cos, sin, feature_map == "relu", interleaved, backend == "auto")
        if out is not None:
            return out
    return turn(x, cos, sin, feature_map == "relu", interleaved)
