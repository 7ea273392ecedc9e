"""Vision models: the vision transformer (ViT, DeiT) and the hierarchical vision transformer (VLT)."""

from lightning_mhla.vision.stages import StageConfig
from lightning_mhla.vision.vit import VisionTransformer
from lightning_mhla.vision.vlt import VLT

__all__ = ["VLT", "StageConfig", "VisionTransformer"]
