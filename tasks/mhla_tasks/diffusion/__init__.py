"""Class-to-image diffusion with the transformers DiT and DiG, for any kind of attention."""

from lightning_mhla.generative.fidelity import (
    DigitFeatures,
    FeatureNetwork,
    InceptionFeatures,
    MnistFeatures,
    RandomFeatures,
)
from mhla_tasks.diffusion.callbacks import GenerationMetrics, SampleGrid
from mhla_tasks.diffusion.data import DigitImages, ImageShards, LatentShards, MnistImages
from mhla_tasks.diffusion.model import DiT
from mhla_tasks.diffusion.module import ClassToImage, DiTShape
from mhla_tasks.diffusion.pipeline import DiTPipeline

__all__ = [
    "ClassToImage",
    "DiT",
    "DiTPipeline",
    "DiTShape",
    "DigitFeatures",
    "DigitImages",
    "FeatureNetwork",
    "GenerationMetrics",
    "ImageShards",
    "InceptionFeatures",
    "LatentShards",
    "MnistFeatures",
    "MnistImages",
    "RandomFeatures",
    "SampleGrid",
]
