"""Class-to-image diffusion: DiT with mhla, linear or softmax attention."""

from lightning_mhla.generative.fidelity import (
    DigitFeatures,
    FeatureNetwork,
    InceptionFeatures,
    RandomFeatures,
)
from mhla_tasks.diffusion.callbacks import GenerationMetrics, SampleGrid
from mhla_tasks.diffusion.data import DigitImages, ImageShards, LatentShards
from mhla_tasks.diffusion.model import DiT
from mhla_tasks.diffusion.module import ClassToImage
from mhla_tasks.diffusion.pipeline import DiTPipeline

__all__ = [
    "ClassToImage",
    "DiT",
    "DiTPipeline",
    "DigitFeatures",
    "DigitImages",
    "FeatureNetwork",
    "GenerationMetrics",
    "ImageShards",
    "InceptionFeatures",
    "LatentShards",
    "RandomFeatures",
    "SampleGrid",
]
