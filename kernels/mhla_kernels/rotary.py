"""Rotary position embedding of queries and keys after the feature map, as a public function."""

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
    """Apply the feature map, then rotary position embedding (RoFormer, arXiv 2104.09864), to queries or keys.

    Pairs of mapped features are rotated by angles that depend on the token's position. The results can be negative, so they are
    for attention without a normalizer (``normalize=False``). They are computed in float32 (float64 for float64 inputs). With
    the Triton backend, one fused kernel computes them.

    Args:
        x: queries or keys, ``[B, N, H, D]``, for B batch rows, N tokens and H heads of even width D; any strides.
        cos: cosine of the angles, ``[N, D / 2]``, or ``[B, N, D / 2]`` where the rows are at different positions. Gets no
            gradient.
        sin: sine of the angles, in the same shape. Gets no gradient.
        feature_map: ``"relu"`` for ``relu(x) + 1e-6``, or ``"identity"``.
        interleaved: whether features 2i and 2i + 1 are a pair (as in RoFormer), instead of i and i + D / 2.
        backend: ``"torch"``, ``"triton"``, or ``"auto"``: Triton wherever it can run on a GPU.

    Returns:
        ``[B, N, H, D]`` in the dtype of ``x``.

    Raises:
        ValueError: if the shapes do not fit together, an option is unknown, or ``backend="triton"`` cannot run the call.
    """
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [B, N, H, D] with D even")
    batch, tokens, _, width = x.shape
    angles = (tokens, width // 2)
    if cos.shape != sin.shape or cos.shape not in (angles, (batch, *angles)):
        shapes = f"[{tokens}, {width // 2}] or [{batch}, {tokens}, {width // 2}]"
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} must both be {shapes}")
    if feature_map not in ("identity", "relu"):
        raise ValueError(f"feature_map={feature_map!r} is not one of 'identity', 'relu'")
    check_form_and_backend("auto", backend)
    if choose_backend(backend, x, x, x, "parallel") == "triton":
        from mhla_kernels.triton_backend.rotary import turn_fused  # needs triton

        out = turn_fused(x, cos, sin, feature_map == "relu", interleaved, backend == "auto")
        if out is not None:
            return out
    return turn(x, cos, sin, feature_map == "relu", interleaved)
