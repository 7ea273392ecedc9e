"""Callbacks of class-to-image diffusion that draw and score samples during training.

The shared classes accept any sampling options, since every domain has its own; the classes here accept those of
:class:`DiTSamplingConfig` only, which are checked when a configuration is read. Parameters are written out, because an error
about an unknown option can suggest the nearest one only for classes without ``**kwargs``.
"""

from __future__ import annotations

from typing_extensions import override

from lightning_mhla.generative import drawing, fidelity
from mhla_tasks.diffusion.sampling import DiTSamplingConfig


class ClassSampleGrid(drawing.SampleGrid):
    """Callback that draws a grid of samples, balanced over the classes, during training.

    The weights are those that validation uses: their moving average, if the run keeps one.

    Args:
        samples: number of samples; a grid shows at most 100, and at most 10 per class if there are 10 classes or fewer.
        sampling: sampler options; null for those of the model.
        every_n_steps: number of optimizer steps between two grids; null for no grids during training.
        at_end: whether to draw a grid with the final weights.
        batch_size: number of samples that each process draws at once.
        seed: seed of the noise.
        name: name of the pictures, unique among the callbacks.
    """

    def __init__(
        self,
        samples: int = 100,
        sampling: DiTSamplingConfig | None = None,
        every_n_steps: int | None = 10_000,
        at_end: bool = True,
        batch_size: int = 64,
        seed: int = 0,
        name: str = "samples",
    ) -> None:
        super().__init__(samples, sampling, every_n_steps, at_end, batch_size, seed, name)

    @property
    @override
    def state_key(self) -> str:
        """Key of the callback's state in checkpoints: the kind of callback, and its option ``name``."""
        return f"SampleGrid{{{self.name}}}"


class ClassGenerationMetrics(fidelity.GenerationMetrics):
    """Callback that draws samples, balanced over the classes, during training, and scores them against real images.

    The weights are those that validation uses: their moving average, if the run keeps one.

    Args:
        samples: number of samples; published results use 50,000.
        reference: real images to compare with: train or validate for that split of the data (at most 50,000 images, evenly
            spaced), the path of a folder of images, or the path of an .npz file of ADM's evaluator.
        features: network whose features are compared; null for Inception-v3.
        sampling: sampler options; null for those of the model.
        every_n_steps: number of optimizer steps between two evaluations; null for no evaluations during training.
        at_end: whether to evaluate the final weights.
        batch_size: number of samples that each process draws at once.
        seed: seed of the noise.
        name: name of the metrics, unique among the callbacks.
    """

    def __init__(
        self,
        samples: int = 50_000,
        reference: str = "train",
        features: fidelity.FeatureNetwork | None = None,
        sampling: DiTSamplingConfig | None = None,
        every_n_steps: int | None = 50_000,
        at_end: bool = True,
        batch_size: int = 64,
        seed: int = 0,
        name: str = "generation",
    ) -> None:
        super().__init__(samples, reference, features, sampling, every_n_steps, at_end, batch_size, seed, name)

    @property
    @override
    def state_key(self) -> str:
        """Key of the callback's state in checkpoints: the kind of callback, and its option ``name``."""
        return f"GenerationMetrics{{{self.name}}}"


SampleGrid, GenerationMetrics = ClassSampleGrid, ClassGenerationMetrics
"""Names of the callbacks in configurations."""
