"""Partition of queries and keys into blocks, and the pairs of blocks that cross-attention mixes.

Shape letters: Mq query blocks, Mk key blocks, S packed pairs of a query sequence and a key sequence.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mhla_kernels.blocks import (
    BlockPartition,
    TokenBlocks,
    TokenLayout,
    are_readable,
    blocks_of_sequences,
    divide_up,
    on_device,
)
from mhla_kernels.mixing import BlockPairs, Mixing

Range = tuple[int, int]
"""Index of the first item, and the index after the last one."""


class CrossLayout(NamedTuple):
    """Partitions of the queries and of the keys into blocks.

    Attributes:
        queries: layout of the queries.
        keys: layout of the keys. Both layouts are packed with the same number of sequences, or neither is.
    """

    queries: TokenLayout
    keys: TokenLayout

    @property
    def is_open(self) -> bool:
        """Whether the number of queries or keys is symbolic, as in a graph that torch traces."""
        return self.queries.is_open or self.keys.is_open

    @property
    def is_packed(self) -> bool:
        """Whether the rows hold packed sequences."""
        return self.queries.cu_seqlens is not None

    @property
    def sequences(self) -> list[tuple[Range, Range]] | None:
        """Range of queries and range of keys for each packed sequence.

        A range consists of the index of the first token and the index after the last one. The property is None if the rows are
        not packed, or if the bounds are on an accelerator or traced and are therefore not read.
        """
        bounds = self.queries.cu_seqlens, self.keys.cu_seqlens
        if any(x is None or not are_readable(x) for x in bounds):
            return None
        queries, keys = (list(pairwise(x.tolist())) for x in bounds if x is not None)
        return list(zip(queries, keys, strict=True))

    def partition(self, device: torch.device) -> CrossPartition:
        """Make the index tables that put queries and keys into blocks, without waiting for the device."""
        return CrossPartition(self, self.queries.partition(device), self.keys.partition(device))


class CrossPartition(NamedTuple):
    """Assignment of the queries to Mq blocks and of the keys to Mk blocks.

    All blocks of one side, queries or keys, have the same number of slots (token positions).

    Attributes:
        layout: sizes of the blocks.
        queries: assignment of the queries to Mq blocks.
        keys: assignment of the keys to Mk blocks.
    """

    layout: CrossLayout
    queries: BlockPartition
    keys: BlockPartition

    @property
    def together(self) -> Tensor | None:
        """Mask ``[Mq, Mk]`` bool, True for a query block and a key block of the same packed sequence; None without packing."""
        queries, keys = self.queries.owner, self.keys.owner
        return None if queries is None or keys is None else queries[:, None] == keys

    def block_sequences(self) -> list[tuple[Range, Range]] | None:
        """Return the range of query blocks and the range of key blocks for each packed sequence.

        A range consists of the index of the first block and the index after the last one. The result is None if the rows are
        not packed, or if their bounds are on an accelerator or traced.
        """
        sequences = self.layout.sequences
        if sequences is None:
            return None
        sizes = self.layout.queries.block_size, self.layout.keys.block_size
        ranges = []
        for side, size in enumerate(sizes):
            counts = (divide_up(pair[side][1] - pair[side][0], size) for pair in sequences)
            ranges.append(list(pairwise(accumulate(counts, initial=0))))
        return list(zip(*ranges, strict=True))

    def matrix(self, mixing: Mixing) -> Tensor:
        """Return the coefficients between all query blocks and all key blocks, zero between different packed sequences.

        Args:
            mixing: mixing coefficients of the call.

        Returns:
            ``[Mq, Mk]`` or ``[H, Mq, Mk]``.
        """
        queries, keys = self.queries, self.keys
        if queries.owner is None or keys.owner is None:
            # without queries, there are no distances to scale
            rows_of_queries = self.layout.queries.blocks if self.layout.is_open else self.layout.queries.blocks or 1
            pairs = BlockPairs(queries.blocks, keys.blocks, self.layout.keys.blocks / rows_of_queries)
            if self.layout.is_open:  # the numbers of blocks are upper bounds: a mixing may cover fewer
                device = next(iter(mixing.tensors.values())).device
                rows, columns = torch.arange(queries.blocks, device=device), torch.arange(keys.blocks, device=device)
                pairs = pairs._replace(query_index=rows, key_index=columns)
            return mixing.cross_matrix(pairs)
        per_query = self._counts(self.layout.queries, queries), self._counts(self.layout.keys, queries)
        stretch = per_query[1] / per_query[0].clamp(min=1)
        matrix = mixing.cross_matrix(BlockPairs(queries.blocks, keys.blocks, stretch, queries.local, keys.local))
        # not a product with zeros: the gradient of a coefficient that is not used may be infinite
        together = self.together
        assert together is not None
        return matrix.masked_fill(~together, 0)

    @staticmethod
    def _counts(layout: TokenLayout, blocks: BlockPartition) -> Tensor:
        """Return, for each of M blocks, the number of query blocks or key blocks in its packed sequence, ``[M]`` int64.

        Args:
            layout: layout of the queries, to count query blocks, or of the keys, to count key blocks.
            blocks: assignment of queries or keys to the M blocks.
        """
        assert layout.cu_seqlens is not None
        assert blocks.owner is not None
        bounds = on_device(layout.cu_seqlens, blocks.owner.device)
        counts = blocks_of_sequences(bounds, layout.block_size)
        # Unused blocks have the owner S; any count will do for them.
        return counts[blocks.owner.clamp(max=len(counts) - 1)]

    def token_blocks(self, device: torch.device) -> tuple[TokenBlocks, TokenBlocks]:
        """Return the index of each query's block and of its packed sequence, then the same for each key.

        Blocks are counted over all sequences, as in :meth:`matrix`.
        """
        places = []
        for layout, blocks in ((self.layout.queries, self.queries), (self.layout.keys, self.keys)):
            where = layout.token_blocks(device)
            # token_blocks counts from the start of each sequence, but the rows of `matrix` are the blocks of all sequences.
            if blocks.slot is not None and layout.cu_seqlens is not None:
                where = TokenBlocks(blocks.slot // blocks.slots, where.sequence)
            places.append(where)
        return places[0], places[1]
