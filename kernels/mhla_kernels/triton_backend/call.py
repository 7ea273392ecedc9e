"""One call of the fused operator: its arguments, and the sizes, tables and options that the launchers derive from them."""

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
    """Compute capability of a device times ten; :data:`config.HOPPER` for the interpreter on a CPU."""
    if device.type != "cuda":
        return config.HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class Arguments(NamedTuple):
    """Arguments of ``torch.ops.mhla.attention``, in its order: tensors first, then numbers and options.

    Attributes:
        q: queries, ``[B, N, H, K]``, float32 or bfloat16, any strides.
        k: keys, ``[B, N, H, K]``, as q.
        v: values, ``[B, N, H, V]``, as q.
        coefficients: float32 tensors of the mixing, ``[1, ...]`` or ``[H, ...]``; in the spanning form those of a
            :class:`mhla_kernels.mixing.span.Span`. A scale is multiplied into the first one (spanning: the first two).
        key_mask: ``[B, N]`` bool, False for hidden tokens; None if all are visible.
        cu_seqlens: first token of each packed sequence, and N: ``[S + 1]`` on the device; None without packing.
        table: block table, ``[7, M]`` int32, see :class:`BlockTables`.
        sequences: first block and number of blocks of each sequence, ``[2, S]`` int32.
        token_row: row of each token's block in the matrix of coefficients, ``[N]`` int32; None in the chunked form.
        largest: tokens in the largest block. In the spanning form chunks take the place of blocks.
        block_size: tokens in a block, used in the spanning form; 0 for uneven blocks.
        block_offsets: first token of each block and N, for uneven blocks; None for blocks of one size.
        causal: whether token t attends to tokens ``j <= t`` only.
        normalize: whether outputs are divided by the normaliser.
        relu: whether the feature map is ``"relu"``, applied by the kernels.
        eps: added to the normaliser.
        form: ``"parallel"``, ``"chunked"`` or ``"spanning"``.
        mixer: key of :data:`mhla_kernels.triton_backend.mixers.MIXERS`.
        guard: name of the kind of kernels that the PyTorch form replaces if they fail; empty to raise their errors.
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
    """Checked arguments of one call, with the sizes, tables and options that kernels are launched with.

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
        """Number of running sums between chunks in the spanning form; 0 in the other forms."""
        self.pairs: tuple[Tensor, int, int, int] | None = None
        """Coefficients for token pairs with their strides along heads, query blocks and key blocks; None until first used."""
        if self.terms:
            matrix = self.coefficients[0]
            h, i, j = matrix.stride()
            self.pairs = matrix, 0 if len(matrix) == 1 else h, i, j

    @property
    def rows(self) -> int:
        """Number of pairs of batch row and head, B * H; a factor of the first grid dimension of every kernel."""
        return self.q.shape[0] * self.q.shape[2]

    @property
    def heads(self) -> int:
        """Number of heads, H."""
        return self.q.shape[2]

    @property
    def key_width(self) -> int:
        """Width of a key, K."""
        return self.q.shape[-1]

    @property
    def value_width(self) -> int:
        """Width of a value, V."""
        return self.v.shape[-1]

    @property
    def summary_width(self) -> int:
        """Numbers in a summary: K * V of the key-value products and K of the sum of keys."""
        return self.key_width * (self.value_width + 1)

    @property
    def chip(self) -> int:
        """Compute capability of the device times ten."""
        return chip_of(self.q.device)

    def schedule(self, tiles: config.Tiles) -> dict[str, int]:
        """Launch options (warps, stages, registers) of a kernel with these tiles on this device."""
        warps, stages = tiles.warps, tiles.stages
        if config.overlaps_chained_products(self.chip):
            stages = 1
        return {"num_warps": warps, "num_stages": stages, **config.register_limit(self.chip, warps)}

    @cached_property
    def pieces(self) -> tuple[int, int]:
        """Number of pieces of a block, and tokens in a piece. A chunk of the spanning form is one piece."""
        if self.terms:
            return 1, self.tables.largest
        longest = config.PIECE if self.causal else config.SPLIT
        pieces = -(-self.tables.largest // longest)
        return pieces, -(-self.tables.largest // pieces)

    @cached_property
    def mask_bytes(self) -> Tensor:
        """The key mask as bytes; an unrelated tensor, which kernels do not read, if there is no mask."""
        return self.q if self.key_mask is None else self.key_mask.contiguous().view(torch.uint8)

    def span(self, tile: int) -> int:
        """Largest number of blocks that a tile of ``tile`` tokens touches; tiles start where a sequence or chunk starts."""
        return span_of_tile(tile, self.arguments.block_size) if self.terms else self.tables.span(tile)

    def tile_table(self, rows: int) -> tuple[Tensor, int]:
        """Tiles of ``rows`` tokens, counted from the start of each sequence.

        Returns:
            The table of the tiles for packed sequences (otherwise a table that kernels do not read), and their number.
        """
        if self.arguments.cu_seqlens is None:
            return self.tables.table, triton.cdiv(self.tables.tokens, rows)
        table = make_tables(self.tables.tokens, self.q.device, rows, None, self.arguments.cu_seqlens).table
        return table, table.shape[1]


def sum_at(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum the columns of ``values`` that share an index, in a fixed order.

    Args:
        values: ``[R, n]``.
        index: ``[n]`` integers; columns with an index of ``size`` or more are dropped (they hold zeros).
        size: number of sums.

    Returns:
        ``[R, size]``.
    """
    # index_put_ sorts the indices and adds in that order; index_add_ would add by atomics, in any order
    out = values.new_zeros(size + 1, values.shape[0])
    out.index_put_((index.long().clamp(max=size),), values.T, accumulate=True)
    return out[:size].T


def alignment(*tensors: Tensor) -> int:
    """Largest common divisor, at most 8, of the batch, token and head strides of the tensors, in elements.

    8 elements are the 16 bytes of the widest load of bfloat16.
    """
    return gcd(8, *(stride for x in tensors for stride in x.stride()[:3]))


def strides(aligned: int, *tensors: Tensor) -> list[int]:
    """Strides of the tensors as kernel arguments, four for each tensor.

    Batch, token and head strides are divided by ``aligned``. A kernel multiplies them by it again, as a compile-time
    constant, from which the compiler derives the alignment. The stride of the features stays in elements.
    """
    return [number for x in tensors for number in (*(stride // aligned for stride in x.stride()[:3]), x.stride(3))]
