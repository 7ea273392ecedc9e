"""FID and related metrics: feature networks, scores of sets of images, and a callback."""

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
