"""Attention kinds behind one interface; a new kind is a new file with one class, imported here."""

from lightning_mhla.attention.base import (
    Attention,
    AttentionConfig,
    attention_per_layer,
    build_attention,
    layout_for,
    next_positions,
)
from lightning_mhla.attention.linear import LinearAttention
from lightning_mhla.attention.mhla import MHLA
from lightning_mhla.attention.softmax import SoftmaxAttention

__all__ = [
    "MHLA",
    "Attention",
    "AttentionConfig",
    "LinearAttention",
    "SoftmaxAttention",
    "attention_per_layer",
    "build_attention",
    "layout_for",
    "next_positions",
]
