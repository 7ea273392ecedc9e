"""One call of the fused operator: its arguments as the registered operator takes them, and what the launchers ask of them."""

from __future__ import annotations

from functools import cached_property, lru_cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.triton_backend import config
from mhla_kernels.triton_backend.tables import BlockTables, make_tables, span_of_tile

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@lru_cache
def chip_of(device: torch.device) -> int:
    """Compute capability times ten; the interpreter passes for a Hopper."""
    if device.type != "cuda":
        return config.HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class Arguments(NamedTuple):
    """Arguments of ``torch.ops.mhla.attention``, in its order: tensors first, then numbers.

    Attributes:
        q: ``[B, N, H, K]``, any strides, like all token tensors.
        k: ``[B, N, H, K]``.
        v: ``[B, N, H, V]``.
        coefficients: float32 tensors of the mixing, ``[1, ...]`` or ``[H, ...]``; a scale is multiplied into the first
            one. In the spanning form the tensors of a :class:`mhla_kernels.mixing.span.Span`.
        key_mask: ``[B, N]`` bool.
        cu_seqlens: packed sequences, ``[S + 1]`` on the device.
        table: see :class:`BlockTables`, like the next one.
        sequences: see there.
        token_row: ``[N]`` int32, the row of each token's block in the matrix of coefficients; parallel and spanning form.
        largest: tokens in the largest block; in the spanning form those of a chunk, which takes the block's place.
        block_size: tokens in a block, in the spanning form.
        block_offsets: first token of each block and N, for uneven blocks.
        causal: see :func:`mhla_kernels.mhla_attention`, like the next one.
        normalize: see there.
        relu: whether the feature map is ``"relu"``.
        eps: see :func:`mhla_kernels.mhla_attention`.
        form: ``"parallel"``, ``"chunked"`` or ``"spanning"``.
        mixer: key of :data:`mhla_kernels.triton_backend.mixers.MIXERS`.
        guard: the kind of kernels, where the PyTorch form takes their place if they fail; empty where they raise.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    coefficients: list[Tensor]
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    table: Tensor
    sequences: Tensor
    token_row: Tensor | None
    largest: int
    block_size: int
    block_offsets: list[int] | None
    causal: bool
    normalize: bool
    relu: bool
    eps: float
    form: str
    mixer: str
    guard: str


class Call:
    """A checked call, with the sizes and tables that kernels are launched with.

    Args:
        arguments: arguments of the operator.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.q, self.k, self.v, self.coefficients = arguments[:4]
        offsets = None if arguments.block_offsets is None else tuple(arguments.block_offsets)
        table, packed = arguments.table, arguments.cu_seqlens is not None
        self.tables = BlockTables(
            self.q.shape[1], table.shape[1], arguments.largest, offsets, packed, table, arguments.sequences
        )
        self.token_row, self.key_mask = arguments.token_row, arguments.key_mask
        self.causal, self.normalize, self.relu = arguments.causal, arguments.normalize, arguments.relu
        self.chunked = arguments.form == "chunked"
        self.terms = self.coefficients[1].shape[1] if arguments.form == "spanning" else 0
        """Running sums between chunks; 0 in the other forms."""
        self.pairs: tuple[Tensor, int, int, int] | None = None
        """Coefficients for token pairs, once the attend kernel has asked for them."""
        if self.terms:
            matrix = self.coefficients[0]
            h, i, j = matrix.stride()
            self.pairs = matrix, 0 if len(matrix) == 1 else h, i, j

    @property
    def rows(self) -> int:
        """B * H, a part of the first dimension of every grid."""
        return self.q.shape[0] * self.q.shape[2]

    @property
    def heads(self) -> int:
        """H."""
        return self.q.shape[2]

    @property
    def key_width(self) -> int:
        """K."""
        return self.q.shape[-1]

    @property
    def value_width(self) -> int:
        """V."""
        return self.v.shape[-1]

    @property
    def summary_width(self) -> int:
        """Numbers in a summary with its normaliser."""
        return self.key_width * (self.value_width + 1)

    @property
    def chip(self) -> int:
        """Compute capability times ten."""
        return chip_of(self.q.device)

    def schedule(self, tiles: config.Tiles) -> dict[str, int]:
        """Launch options for a kernel with such tiles."""
        warps, stages = tiles.warps, tiles.stages
        if config.overlaps_chained_products(self.chip):
            stages = 1
        return {"num_warps": warps, "num_stages": stages, **config.register_limit(self.chip, warps)}

    @cached_property
    def pieces(self) -> tuple[int, int]:
        """Pieces of a block, and tokens in one; a chunk is one piece."""
        if self.terms:
            return 1, self.tables.largest
        longest = config.PIECE if self.causal else config.SPLIT
        pieces = -(-self.tables.largest // longest)
        return pieces, -(-self.tables.largest // pieces)

    @cached_property
    def mask_bytes(self) -> Tensor:
        """The key mask, or anything where there is none."""
        return self.q if self.key_mask is None else self.key_mask.contiguous().view(torch.uint8)

    def span(self, tile: int) -> int:
        """Blocks that a tile of so many tokens touches at most, counted from the start of its sequence or chunk."""
        return span_of_tile(tile, self.arguments.block_size) if self.terms else self.tables.span(tile)

    def tile_table(self, rows: int) -> tuple[Tensor, int]:
        """Tiles of ``rows`` tokens from the start of each sequence: their table (packed), anything (else); their number."""
        if self.arguments.cu_seqlens is None:
            return self.tables.table, triton.cdiv(self.tables.tokens, rows)
        table = make_tables(self.tables.tokens, self.q.device, rows, None, self.arguments.cu_seqlens).table
        return table, table.shape[1]


def sum_at(values: Tensor, index: Tensor, size: int) -> Tensor:
    """``[R, size]`` sums of the columns of ``values`` ``[R, n]`` by ``index``, in a fixed order; beyond ``size`` are zeros."""
    out = values.new_zeros(size + 1, values.shape[0])
    out.index_put_((index.long().clamp(max=size),), values.T, accumulate=True)
    return out[:size].T


def alignment(*tensors: Tensor) -> int:
    """Numbers that every row of every head starts at a multiple of, at most 8: what a 16-byte load of bfloat16 wants."""
    return gcd(8, *(stride for x in tensors for stride in x.stride()[:3]))


def strides(aligned: int, *tensors: Tensor) -> list[int]:
    """Strides of the tensors, the first three in units of ``aligned`` numbers, so that the compiler knows of it."""
    return [number for x in tensors for number in (*(stride // aligned for stride in x.stride()[:3]), x.stride(3))]
