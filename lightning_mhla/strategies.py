"""Strategies for the Trainer that configurations can name by a short path, ``lightning_mhla.strategies.NAME``."""

from lightning_mhla.training.strategies import FullyShardedStrategy

__all__ = ["FullyShardedStrategy"]
