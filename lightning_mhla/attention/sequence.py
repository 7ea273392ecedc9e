"""Distribution of the tokens of a sequence over several processes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist
from mhla_kernels.sequence_parallel import share_tokens
from torch import Tensor


@dataclass(frozen=True)
class SequenceShare:
    """Part of each sequence that this process holds, if sequences are distributed over a group of processes.

    The processes hold consecutive parts, in order of rank. Each part consists of complete blocks, and the blocks are
    distributed as evenly as possible.

    Args:
        group: process group.
        tokens: number of tokens of the complete sequence.
        block_size: number of tokens in a block; the last block may be shorter.

    Raises:
        ValueError: if there are fewer blocks than processes.
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
        """Number of processes over which each sequence is distributed."""
        return dist.get_world_size(self.group)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Index of the first token of each process, followed by the number of tokens of the complete sequence."""
        return share_tokens(self.tokens, self.processes, block_size=self.block_size)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens that each process holds, in order of rank."""
        return [end - start for start, end in pairwise(self.bounds)]

    @property
    def start(self) -> int:
        """Index of the first token of this process in the complete sequence."""
        return self.bounds[dist.get_rank(self.group)]

    @property
    def end(self) -> int:
        """Index of the last token of this process in the complete sequence, plus 1."""
        return self.bounds[dist.get_rank(self.group) + 1]

    @property
    def weight(self) -> float:
        """Factor by which to multiply a mean over the tokens of this process, proportional to the number of these tokens.

        If each process multiplies its mean by its factor, the average over the processes is the mean over all tokens.
        """
        return (self.end - self.start) * self.processes / self.tokens

    def of(self, sequences: Tensor) -> Tensor:
        """Return the tokens of this process from a batch of complete sequences ``[B, N, ...]``."""
        return sequences[:, self.start : self.end]

    def agree(self, *batch: Tensor) -> None:
        """Overwrite tensors, in place, with the tensors of the first process of the group.

        All processes then work on the same sequences, even if one of them skipped a broken sample or reads different data. Each
        process of the group must call this method, with tensors of the same shapes.
        """
        for tensor in batch:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def mean(self, value: Tensor) -> Tensor:
        """Average ``value`` over the processes of the group, without gradient. Each process must call this method."""
        value = value.detach().clone()
        dist.all_reduce(value, group=self.group)
        return value / self.processes
