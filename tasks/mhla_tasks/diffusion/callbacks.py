"""Samples and their metrics during training, under the names that configurations of this domain use.

Their option ``sampling`` takes a mapping with the options of :class:`mhla_tasks.diffusion.sampling.SamplingConfig`.
"""

from lightning_mhla.generative.drawing import SampleGrid
from lightning_mhla.generative.fidelity import GenerationMetrics

__all__ = ["GenerationMetrics", "SampleGrid"]
