"""Assignment of tokens to blocks. The last block may be short, blocks may differ in size, and sequences may be packed.

Every block has the same number of slots (token positions). A slot without a token holds zeros. Packed sequences share one
batch row.

Shape letters: B batch, N tokens, H heads, D width of a head, M blocks, C slots of a block, S packed sequences.
"""

# Longer than other modules because equal, uneven and packed blocks share the layout and its checks.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mhla_kernels.torch_private import FakeTensor, is_traced

Table = TypeVar("Table")


def on_device(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Convert integers to an int64 tensor on ``device``, without waiting for pending work on the device."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if host.device.type == "cpu" and device.type == "cuda" and is_real(host.device):
        host = host.pin_memory()  # only copies from pinned memory are asynchronous
    return host.to(device=device, dtype=torch.int64, non_blocking=True)


def is_real(device: torch.device) -> bool:
    """Return whether a new tensor on ``device`` is an ordinary tensor, not a fake one; False while torch compiles a graph."""
    return not torch.compiler.is_compiling() and type(torch.empty(0, device=device)) is Tensor


MOST = 64
"""Largest number of index tables that :func:`keep` caches; tables that a CUDA graph reads do not count."""
_kept: OrderedDict[tuple[Any, ...], dict[int, Any]] = OrderedDict()
_of_graphs: dict[tuple[Any, ...], Any] = {}


def keep(make: Callable[..., Table], device: torch.device, *sizes: Any) -> Table:
    """Make a table of indices on a device with ``make(device, *sizes)``, or return it from a cache.

    The cache saves time because every layer needs the same tables at every step.

    Each CUDA stream has its own cached tables. Otherwise, one stream could read a table before another stream has written it.
    During the capture of a CUDA graph, a table that any stream has cached is used, because all earlier work is finished when
    capture starts. Such a table stays cached for the life of the process, because the graph reads its memory. While torch
    traces, the cache is not used.

    Args:
        make: function that makes the table, which must depend on nothing but ``device`` and ``sizes``.
        device: device of the table.
        sizes: remaining arguments of ``make``; they must be hashable.

    Returns:
        The table. Callers share it and must not change it.
    """
    if not is_real(device):
        return make(device, *sizes)
    key, stream = (make, device, *sizes), 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        if torch.cuda.is_current_stream_capturing():
            if key not in _of_graphs and key in _kept:
                _of_graphs[key] = next(iter(_kept[key].values()))
            return _of_graphs[key] if key in _of_graphs else make(device, *sizes)
    by_stream = _kept.setdefault(key, {})
    _kept.move_to_end(key)
    if stream not in by_stream:
        # a table made during validation is used in training too, where inference tensors are not allowed
        with torch.inference_mode(False):
            by_stream[stream] = make(device, *sizes)
        if len(_kept) > MOST:
            _kept.popitem(last=False)
    table: Table = by_stream[stream]
    return table


def is_dynamic(size: int) -> bool:
    """Return whether a size is symbolic in ``torch.export`` or ``torch.compile``. Code must not branch on a symbolic size."""
    if isinstance(size, torch.SymInt):
        return True
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # here, since it loads torch's compiler

    return not has_static_value(size)  # Dynamo shows symbolic sizes as plain integers


def divide_up(number: int, size: int) -> int:
    """Return ``number / size``, rounded up.

    ``-(-number // size)`` is avoided, because graphs that contain it with a symbolic size fail their own guards (torch 2.15).
    """
    return (number + size - 1) // size


def blocks_of_sequences(bounds: Tensor, block_size: int) -> Tensor:
    """Return the number of blocks in each of S packed sequences, ``[S]`` integers.

    Args:
        bounds: index of the first token of each sequence, followed by the number of tokens, ``[S + 1]`` integers.
        block_size: tokens in a block; the last block of a sequence may be shorter.
    """
    return (bounds.diff() + block_size - 1) // block_size


def are_readable(bounds: Tensor) -> bool:
    """Return whether the bounds of packed sequences can be read without waiting for a device or breaking a graph."""
    return bounds.device.type == "cpu" and not is_traced() and not isinstance(bounds, FakeTensor)


def at_most(number: int, most: int) -> int:
    """Return the smaller of ``number`` and ``most``.

    ``min`` is not called, because graphs that contain it with a symbolic number fail their own guards (torch 2.15).
    """
    return most if number > most else number


def surely_equal(one: int, two: int) -> bool:
    """Return whether two sizes are equal; during compilation, whether they are equal for every size that the graph accepts.

    A plain ``one == two`` would add a guard to the graph, which would then accept only sizes that satisfy it. PyTorch would
    compile a second graph for all others.
    """
    if not torch.compiler.is_compiling():
        return one == two
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # here, since it loads torch's compiler

    return statically_known_true(one == two)


def count_blocks(tokens: int, block_size: int) -> int:
    """Return the number of blocks that ``tokens`` tokens need, or an upper bound if the number of tokens is symbolic.

    The bound exceeds the true number by at most 2. It is at least 2, because ``torch.export`` turns sizes of 0 and 1 into
    constants.
    """
    if not is_dynamic(tokens):
        return divide_up(tokens, block_size)
    if not isinstance(tokens, torch.SymInt) and surely_equal(tokens % block_size, 0):
        return tokens // block_size  # such as an image of symbolic size with a fixed number of blocks
    return tokens // block_size + 2


class TokenLayout(NamedTuple):
    """Sizes and offsets that describe how the tokens of a batch row are divided into blocks.

    There are three cases: blocks of equal size, blocks of uneven size, and packed sequences, each divided into blocks of equal
    size. The last block of a sequence may be shorter than the others. :meth:`partition` makes the index tables that put tokens
    in block order.

    Attributes:
        tokens: number of tokens N in a row.
        block_size: tokens in a block; 0 for uneven blocks.
        block_offsets: index of the first token of each uneven block, followed by N; None for equal blocks.
        cu_seqlens: index of the first token of each of S packed sequences, followed by N, ``[S + 1]``; None if the row is one
            sequence.
    """

    tokens: int
    block_size: int
    block_offsets: tuple[int, ...] | None = None
    cu_seqlens: Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Whether the number of tokens is symbolic, as in a graph that ``torch.export`` or ``torch.compile`` traces."""
        return is_dynamic(self.tokens)

    @property
    def blocks(self) -> int:
        """Number of blocks M; for packed sequences, an upper bound on the total over all sequences."""
        if self.block_offsets is not None:
            return len(self.block_offsets) - 1
        blocks = divide_up(self.tokens, self.block_size)
        # every sequence but the last can end in one more block that is not full
        return blocks if self.cu_seqlens is None else blocks + len(self.cu_seqlens) - 2

    @property
    def most_blocks(self) -> int:
        """Number of blocks in the sequence, or an upper bound if the number of tokens is symbolic.

        For packed sequences, the number is an upper bound on the number of blocks in any one of them.
        """
        return self.blocks if self.block_offsets is not None else count_blocks(self.tokens, self.block_size)

    @property
    def largest(self) -> int:
        """Number of tokens in the largest block; for packed sequences, an upper bound."""
        if self.block_offsets is not None:
            return max(end - start for start, end in pairwise(self.block_offsets))
        return at_most(self.block_size, self.tokens)

    def in_chunks(self, blocks: int) -> TokenLayout:
        """Return a layout with larger blocks (chunks), each of which joins ``blocks`` consecutive blocks of this layout."""
        return self._replace(block_size=at_most(blocks * self.block_size, self.tokens))

    def token_blocks(self, device: torch.device) -> TokenBlocks:
        """Return the index of each token's block and of its packed sequence, computed without waiting for the device."""
        position = torch.arange(self.tokens, device=device)
        if self.block_offsets is not None:
            return TokenBlocks(keep(_uneven_blocks, device, self.block_offsets))
        if self.cu_seqlens is None:
            return TokenBlocks(position // self.block_size)
        bounds = on_device(self.cu_seqlens, device)
        # right=True counts ends up to and including a position: the token at the end of a sequence is the first of the next.
        sequence = torch.searchsorted(bounds[1:].contiguous(), position, right=True)
        return TokenBlocks((position - bounds[sequence]) // self.block_size, sequence)

    def partition(self, device: torch.device) -> BlockPartition:
        """Return the assignment of tokens to slots in the blocks, computed without waiting for the device."""
        if self.block_offsets is not None:
            return keep(_uneven_partition, device, self.block_offsets)
        if self.cu_seqlens is not None:
            return _packed_partition(self, self.cu_seqlens, device)
        if self.is_open:
            return BlockPartition(self.tokens, count_blocks(self.tokens, self.block_size), self.block_size)
        slots = at_most(self.tokens, self.block_size)
        return BlockPartition(self.tokens, divide_up(self.tokens, slots) if slots else 0, slots)


@dataclass(frozen=True)
class TokenBlocks:
    """Indices of the block and of the packed sequence that contain each token.

    Attributes:
        block: ``[N]`` int64, index of the block, counted from the start of the token's own sequence. In packed
            cross-attention, blocks are counted over all sequences.
        sequence: ``[N]`` int64, index of the packed sequence; None if the row is one sequence.
    """

    block: Tensor
    sequence: Tensor | None = None

    @property
    def order(self) -> Tensor:
        """Number by which the blocks of the tokens can be ordered, first by sequence and then by block, ``[N]`` int64."""
        return self.block if self.sequence is None else self.sequence * len(self.block) + self.block


class BlockPartition(NamedTuple):
    """Assignment of the tokens of a batch row to M blocks of C slots each; a slot without a token holds zeros.

    Attributes:
        tokens: number of tokens N.
        blocks: number of blocks M; possibly an upper bound for packed sequences or a symbolic number of tokens.
        slots: number of slots in a block, C, at least the size of the largest block.
        slot: ``[N]`` int64, index of each token's slot, counted over all blocks; None if token t is in slot t for every t.
        local: ``[M]`` int64, index of each block within its packed sequence; None if the row is one sequence.
        owner: ``[M]`` int64, index of each block's packed sequence, or S for an unused block, where S is the number of
            sequences. None if the row is one sequence.
        sequences: for each non-empty packed sequence, the index of its first block and the index after its last block. None if
            the row is one sequence, or if the boundaries of the sequences are on an accelerator or are traced, and are
            therefore not read.
    """

    tokens: int
    blocks: int
    slots: int
    slot: Tensor | None = None
    local: Tensor | None = None
    owner: Tensor | None = None
    sequences: tuple[tuple[int, int], ...] | None = None

    def split(self, x: Tensor) -> Tensor:
        """Arrange tokens ``[B, N, H, D]`` in M blocks of C slots, ``[B, H, M, C, D]``, with zeros in slots without a token."""
        batch, tokens, heads, width = x.shape
        if self.is_open:
            slot = torch.arange(self.blocks, device=x.device)[:, None] * self.slots
            slot = slot + torch.arange(self.slots, device=x.device)  # export cannot prove the division in a reshape
            x = torch.where((slot < tokens)[..., None, None], x[:, slot.clamp(max=tokens - 1)], 0)
            return x.permute(0, 3, 1, 2, 4)
        capacity = self.blocks * self.slots
        if self.slot is not None:
            x = x.new_zeros(batch, capacity, heads, width).index_copy(1, self.slot, x)
        elif not surely_equal(capacity, tokens):
            x = F.pad(x, (0, 0, 0, 0, 0, capacity - tokens))
        return x.reshape(batch, self.blocks, self.slots, heads, width).permute(0, 3, 1, 2, 4).contiguous()

    def merge(self, x: Tensor) -> Tensor:
        """Reverse :meth:`split`: take the tokens ``[B, N, H, D]`` out of M blocks of C slots, ``[B, H, M, C, D]``."""
        batch, heads, blocks, slots, width = x.shape
        if self.is_open:
            token = torch.arange(self.tokens, device=x.device)
            return x[:, :, token // slots, token % slots].transpose(1, 2)
        x = x.permute(0, 2, 3, 1, 4).reshape(batch, blocks * slots, heads, width)
        if self.slot is not None:
            return x.index_select(1, self.slot)
        return x[:, : self.tokens]

    @property
    def is_open(self) -> bool:
        """Whether the number of tokens is symbolic, as in a graph that torch traces, and token t is in slot t for every t."""
        return self.slot is None and is_dynamic(self.tokens)

    def expand_mixing(self, mixing: Tensor) -> Tensor:
        """Expand mixing coefficients that cover the longest sequence to all M blocks of the partition.

        The n blocks of a packed sequence get the first n rows and columns. Coefficients between different sequences are zero.
        Without packing, the result is the first M rows and columns. If M is a symbolic upper bound, and the coefficients cover
        fewer blocks, the last row and column are repeated for the remaining blocks, which have no tokens.

        Args:
            mixing: coefficients for m blocks, ``[..., m, m]``, where m is at least the number of blocks in any sequence.

        Returns:
            Coefficients, ``[..., M, M]``.
        """
        if self.local is None or self.owner is None:
            if is_dynamic(self.blocks):  # blocks after the last token are empty, so their coefficients do not matter
                index = torch.arange(self.blocks, device=mixing.device).clamp(max=mixing.shape[-1] - 1)
                return mixing[..., index[:, None], index[None, :]]
            return mixing if mixing.shape[-1] == self.blocks else mixing[..., : self.blocks, : self.blocks]
        # An unused block may have an index beyond the matrix. Its slots are empty, so any coefficient will do.
        local = self.local.clamp(max=mixing.shape[-1] - 1)
        together = self.owner[:, None] == self.owner[None, :]
        return mixing[..., local[:, None], local[None, :]] * together


def _packed_partition(layout: TokenLayout, cu_seqlens: Tensor, device: torch.device) -> BlockPartition:
    """Return the assignment of packed tokens to blocks, in which no block contains tokens of two sequences.

    If ``cu_seqlens`` is on an accelerator or is traced, its values are not read. The number of blocks is then the upper bound
    ``N // block_size + S`` for S sequences with N tokens in total.

    Args:
        layout: sizes of the packed sequences and of their blocks.
        cu_seqlens: index of the first token of each sequence, followed by N, ``[S + 1]``.
        device: device of the index tensors in the result.
    """
    tokens, block_size = layout.tokens, layout.block_size
    slots = at_most(tokens, block_size)
    bounds = on_device(cu_seqlens, device)
    counts = blocks_of_sequences(bounds, block_size)
    ends = counts.cumsum(0)
    sequences = None
    if are_readable(cu_seqlens):
        block_bounds = [0, *blocks_of_sequences(cu_seqlens.to(torch.int64), block_size).cumsum(0).tolist()]
        sequences = tuple((first, last) for first, last in pairwise(block_bounds) if last > first)
    # Where the bounds are not read: each sequence adds at most one block that is not full.
    blocks = sequences[-1][1] if sequences else tokens // block_size + counts.numel()
    index = torch.arange(blocks, device=device)
    # [M] block indices; blocks after the last used one get the owner S.
    owner = torch.searchsorted(ends, index, right=True)
    starts = F.pad(ends, (1, 0))
    local = index - starts[owner]
    where = layout.token_blocks(device)
    assert where.sequence is not None
    # [N] position of each token in its sequence
    within = torch.arange(tokens, device=device) - bounds[where.sequence]
    slot = (starts[where.sequence] + where.block) * slots + within % block_size
    return BlockPartition(tokens, blocks, slots, slot, local, owner, sequences)


def _uneven_blocks(device: torch.device, offsets: tuple[int, ...]) -> Tensor:
    """Return the index of the block that contains each token, ``[N]`` int64. Exported graphs store this tensor as a constant.

    Args:
        device: device of the result.
        offsets: index of the first token of each block, followed by N.
    """
    sizes = [end - start for start, end in pairwise(offsets)]
    return on_device([block for block, size in enumerate(sizes) for _ in range(size)], device)


def _uneven_partition(device: torch.device, offsets: tuple[int, ...]) -> BlockPartition:
    sizes = [end - start for start, end in pairwise(offsets)]
    slots = max(sizes)
    slot = [block * slots + within for block, size in enumerate(sizes) for within in range(size)]
    return BlockPartition(offsets[-1], len(sizes), slots, on_device(slot, device))
