"""Callbacks of class-to-image diffusion that draw and score samples during training.

Their base classes in ``lightning_mhla.generative`` accept sampler options of any type. The subclasses here accept
:class:`DiTSamplingConfig` only, so that the options are checked when a configuration is read. Their constructors list all
parameters instead of ``**kwargs``, so that an error about an unknown option can suggest the nearest one.
"""

from __future__ import annotations

from typing_extensions import override

from lightning_mhla.generative import drawing, fidelity
from mhla_tasks.diffusion.sampling import DiTSamplingConfig


class ClassSampleGrid(drawing.SampleGrid):
    """Callback that draws samples during training, cycling through the classes, and shows them in a grid.

    The grid is saved as a picture in the subfolder ``pictures`` of the log folder, and written to TensorBoard. Samples are
    drawn with the moving average of the weights if training maintains one, otherwise with the current weights.

    Args:
        samples: number of samples. The picture shows at most 100 of them, and at most 10 per class if there are 10 classes or
            fewer.
        sampling: sampler options; null to use the model's own options.
        every_n_steps: number of optimizer steps between two grids; null for no grids during training.
        at_end: whether to draw a grid at the end of training.
        batch_size: number of samples that each process draws at once.
        seed: random seed for the noise that sampling starts from.
        name: name of the picture, which must be unique among the callbacks.

    Raises:
        ValueError: if ``samples``, ``batch_size`` or ``every_n_steps`` is below 1, or ``name`` is not a valid file name.
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
        """Key of this callback's state in checkpoints, such as ``SampleGrid{samples}`` for the option ``name=samples``."""
        return f"SampleGrid{{{self.name}}}"


class ClassGenerationMetrics(fidelity.GenerationMetrics):
    """Callback that draws samples during training, cycling through the classes, and scores them against real images.

    The metrics are FID, sFID, Inception Score, KID, precision and recall, as far as the network and the reference allow; see
    :class:`lightning_mhla.generative.fidelity.GenerationMetrics`. Samples are drawn with the moving average of the weights if
    training maintains one, otherwise with the current weights.

    Args:
        samples: number of samples; published results use 50,000.
        reference: real images to compare with. "train" or "validate" selects that split of the data (at most 50,000 images,
            evenly spaced). Otherwise, it is the path of a folder of images, or of an .npz file in the format of ADM's
            evaluator.
        features: network whose features are compared; null for Inception-v3.
        sampling: sampler options; null to use the model's own options.
        every_n_steps: number of optimizer steps between two evaluations; null for no evaluations during training.
        at_end: whether to evaluate the weights at the end of training.
        batch_size: number of samples that each process draws at once.
        seed: random seed for the noise that sampling starts from.
        name: prefix of the names of the metrics. It must be unique among the callbacks.

    Raises:
        ValueError: if ``samples``, ``batch_size`` or ``every_n_steps`` is below 1, or ``name`` is not a valid file name.
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
        """Key of this callback's state in checkpoints, such as ``GenerationMetrics{fid}`` for the option ``name=fid``."""
        return f"GenerationMetrics{{{self.name}}}"


SampleGrid, GenerationMetrics = ClassSampleGrid, ClassGenerationMetrics
"""Names of the callbacks in configurations."""
