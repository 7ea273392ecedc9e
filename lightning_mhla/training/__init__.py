"""The LightningModule that domains derive from, its optimiser, and strategies."""

from lightning_mhla.training.module import TrainingModule
from lightning_mhla.training.optim import OptimizerConfig

__all__ = ["OptimizerConfig", "TrainingModule"]
