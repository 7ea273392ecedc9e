"""Samples and their metrics during training, whose sampling options are checked where a configuration is read.

The shared classes take any options of sampling, since every domain has its own. Parameters are written out here, because an
error about an unknown option can name the nearest one only for classes without ``**kwargs``.
"""

from __future__ import annotations

from typing_extensions import override

from lightning_mhla.generative import drawing, fidelity
from mhla_tasks.diffusion.sampling import SamplingConfig


class ClassSampleGrid(drawing.SampleGrid):
    """Draw a grid of samples, balanced over the classes, with the weights that validation uses; it needs no features.

    Args:
        samples: number of samples; a hundred at most, ten of each class where there are ten classes or fewer.
        sampling: sampler options; null for the model's own.
        every_n_steps: optimizer steps between two grids; null for none on the way.
        at_end: whether the last weights draw one.
        batch_size: samples that each process draws together.
        seed: seed of the noise.
        name: name of the pictures; two callbacks need two names.
    """

    def __init__(
        self,
        samples: int = 100,
        sampling: SamplingConfig | None = None,
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
        """Key of this callback's state in checkpoints, by the name that configurations use."""
        return f"SampleGrid{{{self.name}}}"


class ClassGenerationMetrics(fidelity.GenerationMetrics):
    """Draw samples, balanced over the classes, with the weights that validation uses, and score them.

    Args:
        samples: number of samples; published figures use 50,000.
        reference: train or validate, for that part of the data (50,000 images of it at most, spread evenly); a folder of
            images; or an .npz of ADM's evaluator.
        features: network whose features are compared.
        sampling: sampler options; null for the model's own.
        every_n_steps: optimizer steps between two evaluations; null for none on the way.
        at_end: whether the last weights are scored.
        batch_size: samples that each process draws together.
        seed: seed of the noise.
        name: name of the metrics; two callbacks need two names.
    """

    def __init__(
        self,
        samples: int = 50_000,
        reference: str = "train",
        features: fidelity.FeatureNetwork | None = None,
        sampling: SamplingConfig | None = None,
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
        """Key of this callback's state in checkpoints, by the name that configurations use."""
        return f"GenerationMetrics{{{self.name}}}"


SampleGrid, GenerationMetrics = ClassSampleGrid, ClassGenerationMetrics
"""The names that configurations use."""
