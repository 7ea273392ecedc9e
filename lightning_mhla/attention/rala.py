"""Rank-augmented linear attention (RALA) and magnitude-aware linear attention (MALA), for images."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from mhla_kernels.attention import without_autocast
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.base import Attention
from lightning_mhla.attention.config import MIXING_OPTIONS, AttentionConfig
from lightning_mhla.attention.features import apply_features
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.lepe import hide_rows
from lightning_mhla.attention.linear import LinearAttention
from lightning_mhla.attention.order import GivenOrder
from lightning_mhla.attention.summaries import EPS

FIXED = ("normalize", "feature_map", "normalize_before_rotary", "key_weighting", "output_norm")
"""Options of :class:`AttentionConfig` that the kinds rala and mala ignore, because their values are fixed."""


class RankAugmentedLinearAttention(LinearAttention, kind="rala"):
    """Rank-augmented linear attention (RALA, arXiv 2411.07635).

    This is linear attention with the feature map ``elu(x) + 1``. Each key is scaled by N times its softmax weight for the mean
    query, where N is the number of tokens. The normalizer is computed from queries and keys before rotary embedding, and adds
    1e-6 to the mean of a query's attention weights, not to their sum. The RAVLT model combines this layer with the options
    ``lepe: 5``, ``gate: true``, ``gate_activation: identity`` and ``rotary: true``. The constructor takes the arguments of
    :class:`Attention`.

    Raises:
        ValueError: if the layer is causal, or for the same reasons as in :class:`Attention`.
    """

    unused: ClassVar[tuple[str, ...]] = (*MIXING_OPTIONS, *FIXED)
    fixed: ClassVar[dict[str, Any]] = {
        "normalize": True,
        "feature_map": "elu",
        "normalize_before_rotary": True,
        "key_weighting": True,
    }
    block_causal = False

    def __init__(self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig, **options: Any) -> None:
        if options.get("causal"):
            raise ValueError("attention kind 'rala' sees every token; choose another for causal attention")
        super().__init__(dim, heads, layout, config, **options)

    @override
    def normalizer_eps(self, inputs: AttentionInputs) -> float:
        return EPS * inputs.q.shape[1]  # the operator adds it to the sum of N weights, RALA to their mean


class MagnitudeAwareLinearAttention(Attention, kind="mala"):
    """Magnitude-aware linear attention (MALA, arXiv 2507.00698).

    The feature map of queries and keys is ``elu(x) + 1``. The output for token t is
    ``y_t = mean_j(s_tj v_j) (1 + 1 / (z_t + 1e-6)) - z_t mean_j(v_j)``, with means over all tokens j,
    ``z_t = Dk^-0.5 q_t . mean_j(k_j)`` and ``s_tj = Dk^-0.5 rot(q_t) . rot(k_j)``, where ``rot`` is rotary embedding and ``Dk``
    is the width of a key. As with softmax, the attention weights of a query become sharper as its magnitude grows. Without
    rotary embedding, they sum to 1. The constructor takes the arguments of :class:`Attention`.

    Raises:
        ValueError: if the layer is causal, or for the same reasons as in :class:`Attention`.
    """

    Order = GivenOrder
    handles = ("key_mask", "rotary")
    unused = (*MIXING_OPTIONS, *FIXED)

    def __init__(self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig, **options: Any) -> None:
        super().__init__(dim, heads, layout, config, **options)
        if self.causal:
            raise ValueError("attention kind 'mala' sees every token; choose another for causal attention")

    @override
    def attend(self, inputs: AttentionInputs) -> Tensor:
        with without_autocast(inputs.q.device.type):
            return self._attend(inputs)

    def _attend(self, inputs: AttentionInputs) -> Tensor:
        mask = inputs.key_mask
        q, k, _ = apply_features(inputs.q, inputs.k, "elu")
        turned_q, turned_k = (q, k) if inputs.rotary is None else (inputs.rotary.turn(q), inputs.rotary.turn(k))
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, turned_q, turned_k, v = (hide_rows(x, mask).to(wide) for x in (q, k, turned_q, turned_k, inputs.v))
        count = (
            k.new_full((1, 1, 1), k.shape[1]) if mask is None else mask.sum(1, dtype=wide).clamp(min=1)[:, None, None]
        )
        scale = self.key_width**-0.5
        # both terms of y are linear in the values, so a [Dk, Dv] summary of all tokens replaces the [N, N] scores
        # Shapes: z is [B, N, H, 1], the summary is [B, H, Dk, Dv].
        z = scale * torch.einsum("bnhd,bhd->bnh", q, k.sum(1) / count)[..., None]
        summary = torch.einsum("bnhd,bnhe->bhde", turned_k, v) * scale / count[..., None]
        out = torch.einsum("bnhd,bhde->bnhe", turned_q, summary) * (1 + 1 / (z + EPS)) - z * (v.sum(1) / count)[:, None]
        return hide_rows(out.to(inputs.v.dtype), mask)

    @override
    def operator_flops(self, tokens: int) -> float:
        return 4.0 * self.heads * tokens * self.key_width * self.value_width
