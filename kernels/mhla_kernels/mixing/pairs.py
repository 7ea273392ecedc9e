"""Pairs of a query block and a key block in cross-attention, and the distances between their positions on a common axis.

Shape letters: Mq query blocks, Mk key blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BlockPairs(NamedTuple):
    """Query blocks and key blocks between which cross-attention needs mixing coefficients.

    On each side, the blocks of all packed sequences form one list. Coefficients between blocks of different sequences are not
    used, so a :class:`mhla_kernels.mixing.Mixing` may return any finite numbers for them.

    Attributes:
        query_blocks: number of query blocks Mq, in all sequences together.
        key_blocks: number of key blocks Mk, in all sequences together.
        stretch: number of key blocks per query block, ``Mk / Mq``. For packed sequences, a tensor ``[Mq]`` with this ratio for
            the sequence of each query block.
        query_index: ``[Mq]`` int64, index of each query block within its packed sequence; None if the row is one sequence.
        key_index: ``[Mk]`` int64, index of each key block within its packed sequence; None if the row is one sequence.
    """

    query_blocks: int
    key_blocks: int
    stretch: float | Tensor
    query_index: Tensor | None = None
    key_index: Tensor | None = None

    def distance(self, like: Tensor) -> Tensor:
        """Compute the distances between the centers of query blocks and key blocks, ``[Mq, Mk]``, in units of key blocks.

        Both sequences cover the same axis. The center of query block i is at ``(i + 1/2) Mk / Mq``, and the center of key block
        j is at ``j + 1/2``. With as many query blocks as key blocks, the distance is ``|i - j|``.

        Args:
            like: tensor that gives the dtype and the device.
        """
        query, key = self.query_index, self.key_index
        query = torch.arange(self.query_blocks, device=like.device) if query is None else query
        key = torch.arange(self.key_blocks, device=like.device) if key is None else key
        centers = (query.to(like.dtype) + 0.5) * self.stretch
        return (centers[:, None] - (key.to(like.dtype) + 0.5)).abs()
