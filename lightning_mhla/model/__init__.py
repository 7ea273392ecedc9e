"""Transformer backbone for images, video and text, its published sizes, and its state during generation."""

from lightning_mhla.model.backbone import Backbone
from lightning_mhla.model.block import Block
from lightning_mhla.model.cache import GenerationCache
from lightning_mhla.model.sizes import Shape, model_shape

__all__ = ["Backbone", "Block", "GenerationCache", "Shape", "model_shape"]
