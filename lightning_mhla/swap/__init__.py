"""Replacement of self-attention and cross-attention in pretrained diffusers, timm and transformers models.

:func:`swap_attention` replaces the attention, and :func:`load_swapped` loads a model that was saved afterwards.
"""

from lightning_mhla.swap.diffusers import SwappedAttention, attention_layers
from lightning_mhla.swap.diffusers_cross import read_texts_once
from lightning_mhla.swap.host import SAVED
from lightning_mhla.swap.layers import KEEP, REPLACE
from lightning_mhla.swap.swapping import (
    is_swapped,
    load_swapped,
    resize_blocks,
    swap_attention,
    swap_saved,
    swapped_layers,
)
from lightning_mhla.swap.timm_folders import save_swapped
from lightning_mhla.swap.transfer import LayerCosts, layer_costs, original_attention, transfer_loss

__all__ = [
    "KEEP",
    "REPLACE",
    "SAVED",
    "LayerCosts",
    "SwappedAttention",
    "attention_layers",
    "is_swapped",
    "layer_costs",
    "load_swapped",
    "original_attention",
    "read_texts_once",
    "resize_blocks",
    "save_swapped",
    "swap_attention",
    "swap_saved",
    "swapped_layers",
    "transfer_loss",
]
