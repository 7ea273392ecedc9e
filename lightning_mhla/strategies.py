"""Strategies that Lightning has all but the last step of."""

from __future__ import annotations

from lightning import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy


class FullyShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all processes: Lightning's ModelParallelStrategy with every process in the data-parallel dimension.

    Works on GPUs (NCCL) and CPUs (gloo), on any number of nodes.

    Args:
        save_distributed_checkpoint: write a folder of shards, one file for each process, instead of one file.
    """

    def __init__(self, save_distributed_checkpoint: bool = True) -> None:
        super().__init__(
            data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint
        )

    def setup_environment(self) -> None:
        """Size the data-parallel dimension, which is known only now."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def shards_weights(trainer: Trainer) -> bool:
    """Whether no process holds all weights."""
    return isinstance(trainer.strategy, ModelParallelStrategy | FSDPStrategy)
