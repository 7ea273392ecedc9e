"""Sequences that several processes share: which tokens are whose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist
from mhla_kernels.sequence_parallel import share_tokens
from torch import Tensor


@dataclass(frozen=True)
class SequenceShare:
    """The stretch of a sequence that this process holds; the other processes of the group hold the rest, in order.

    Stretches are whole blocks, as evenly many as there are.

    Args:
        group: the processes.
        tokens: N of the whole sequence.
        block_size: tokens in a block.

    Raises:
        ValueError: when there are fewer blocks than processes.
    """

    group: dist.ProcessGroup
    tokens: int
    block_size: int

    def __post_init__(self) -> None:
        if min(self.lengths) == 0:
            raise ValueError(
                f"{self.tokens} tokens in blocks of {self.block_size} are {-(-self.tokens // self.block_size)} blocks, too "
                f"few for {self.processes} processes; lower sequence_parallel_size or block_size, or train on longer ones"
            )

    @property
    def processes(self) -> int:
        """Their number."""
        return dist.get_world_size(self.group)

    @property
    def bounds(self) -> tuple[int, ...]:
        """First token of each process, and N."""
        return share_tokens(self.tokens, self.processes, block_size=self.block_size)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each process."""
        return [end - start for start, end in pairwise(self.bounds)]

    @property
    def start(self) -> int:
        """This process's first token."""
        return self.bounds[dist.get_rank(self.group)]

    @property
    def end(self) -> int:
        """The first token after this process's."""
        return self.bounds[dist.get_rank(self.group) + 1]

    @property
    def weight(self) -> float:
        """Weight of this process's mean: the weighted means averaged over the processes give the mean over all tokens."""
        return (self.end - self.start) * self.processes / self.tokens

    def of(self, whole: Tensor) -> Tensor:
        """This process's tokens of a batch of whole sequences ``[B, N, ...]``."""
        return whole[:, self.start : self.end]

    def agree(self, *batch: Tensor) -> None:
        """Put the first process's numbers in the place of all others', so that all hold parts of the same sequences.

        They are the same but where one process alone skipped a broken sample, or reads other data.
        """
        for tensor in batch:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of every process's ``value``, without a gradient; every process of the group calls it."""
        value = value.detach().clone()
        dist.all_reduce(value, group=self.group)
        return value / self.processes
