"""Base class of the LightningModules that train networks, with its optimizers, compilation and strategies."""

from lightning_mhla.training.module import TrainingModule
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.training.options import TrainingOptions

__all__ = ["OptimizerConfig", "TrainingModule", "TrainingOptions"]
