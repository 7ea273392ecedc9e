"""Trainer strategies under the short import path for configurations, ``lightning_mhla.strategies.FullyShardedStrategy``."""

from lightning_mhla.training.strategies import FullyShardedStrategy

__all__ = ["FullyShardedStrategy"]
