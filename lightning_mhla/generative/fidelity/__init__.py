"""FID and related metrics of generated images: feature networks, metrics, and a callback that computes them during training."""

from lightning_mhla.generative.fidelity.callback import GenerationMetrics
from lightning_mhla.generative.fidelity.features import (
    DigitFeatures,
    FeatureNetwork,
    InceptionFeatures,
    MnistFeatures,
    RandomFeatures,
)

__all__ = [
    "DigitFeatures",
    "FeatureNetwork",
    "GenerationMetrics",
    "InceptionFeatures",
    "MnistFeatures",
    "RandomFeatures",
]
