"""Attention layers: one class for each kind of self-attention and of cross-attention.

Self-attention layers have the interface of :class:`Attention`, and cross-attention layers that of :class:`CrossAttention`. To
add a kind to this package, define its class in a new module and import the class here.
"""

from lightning_mhla.attention.base import Attention, build_attention
from lightning_mhla.attention.config import AttentionConfig, CrossAttentionConfig, attention_per_layer, layout_for
from lightning_mhla.attention.cross import CrossAttention
from lightning_mhla.attention.cross_inputs import ContextSummaries, CrossProjections
from lightning_mhla.attention.cross_kinds import (
    LinearCrossAttention,
    MHLACrossAttention,
    SoftmaxCrossAttention,
    build_cross_attention,
)
from lightning_mhla.attention.gated_conv import GatedConvolution
from lightning_mhla.attention.gated_deltanet import GatedDeltaNet
from lightning_mhla.attention.gla import GatedLinearAttention
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.layout import BlockLayout, LayoutTables
from lightning_mhla.attention.linear import LinearAttention
from lightning_mhla.attention.mamba2 import Mamba2
from lightning_mhla.attention.mhla import MHLA
from lightning_mhla.attention.order import BlockOrder, GivenOrder, RasterOrder
from lightning_mhla.attention.projections import Projections
from lightning_mhla.attention.rala import MagnitudeAwareLinearAttention, RankAugmentedLinearAttention
from lightning_mhla.attention.retention import Retention
from lightning_mhla.attention.softmax import SoftmaxAttention
from lightning_mhla.attention.windowed import WindowedMHLA
from lightning_mhla.recurrence import gated_delta_rule, gated_linear_attention, retention, state_space_dual

__all__ = [
    "MHLA",
    "Attention",
    "AttentionConfig",
    "AttentionInputs",
    "BlockLayout",
    "BlockOrder",
    "ContextSummaries",
    "CrossAttention",
    "CrossAttentionConfig",
    "CrossProjections",
    "GatedConvolution",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GivenOrder",
    "LayoutTables",
    "LinearAttention",
    "LinearCrossAttention",
    "MHLACrossAttention",
    "MagnitudeAwareLinearAttention",
    "Mamba2",
    "Projections",
    "RankAugmentedLinearAttention",
    "RasterOrder",
    "Retention",
    "SoftmaxAttention",
    "SoftmaxCrossAttention",
    "WindowedMHLA",
    "attention_per_layer",
    "build_attention",
    "build_cross_attention",
    "gated_delta_rule",
    "gated_linear_attention",
    "layout_for",
    "retention",
    "state_space_dual",
]
