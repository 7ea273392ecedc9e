"""Strategies for the trainer, by the path that configurations name them by."""

from lightning_mhla.training.strategies import FullyShardedStrategy

__all__ = ["FullyShardedStrategy"]
