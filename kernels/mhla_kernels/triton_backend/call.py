"""Arguments of one call of the Triton attention operator, and the sizes, tables and options derived from them."""

from __future__ import annotations

from functools import cached_property, lru_cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.triton_backend import config
from mhla_kernels.triton_backend.tables import BlockTables, make_tables, span_of_tile

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@lru_cache
def chip_of(device: torch.device) -> int:
    """Return the compute capability of a GPU times ten, for example 90 for Hopper.

    A CPU, on which Triton's interpreter runs the kernels, counts as 90.
    """
    if device.type != "cuda":
        return config.HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class Arguments(NamedTuple):
    """Arguments of ``torch.ops.mhla.attention``, in the order of its parameters. Tensors come before numbers and options.

    Attributes:
        q: queries, ``[B, N, H, K]``, float32 or bfloat16, any strides.
        k: keys, ``[B, N, H, K]``, in the dtype of q, any strides.
        v: values, ``[B, N, H, V]``, in the dtype of q, any strides.
        coefficients: float32 tensors that define the mixing coefficients, which weight each key block for each query block,
            ``[1, ...]`` or ``[H, ...]``. In the spanning form, these are the tensors of a
            :class:`mhla_kernels.mixing.span.Span`. The scale of the outputs is multiplied into the first tensor (in the
            spanning form, into the first two).
        tables: lookup tables for tokens and blocks, as :func:`mhla_kernels.triton_backend.tables.kernel_tables` returns them.
        key_mask: ``[B, N]`` bool, False for masked tokens; None if no token is masked.
        cu_seqlens: index of the first token of each of S packed sequences, followed by N, ``[S + 1]`` on the device of q; None
            without packing.
        block_size: tokens in a block; 0 for uneven blocks.
        block_offsets: index of the first token of each uneven block, followed by N; None for blocks of equal size.
        causal: whether token t attends to tokens ``j <= t`` only, or, with ``block_causal``, to its own block and earlier ones.
        relu: whether the kernels apply the feature map ``relu(x) + 1e-6`` to q and k.
        eps: number added to the normalizer; None if outputs are not divided by the normalizer.
        form: algorithm: ``"parallel"`` for products of all token pairs, ``"chunked"`` for sums over each block (summaries), or
            ``"spanning"`` for groups of several blocks (chunks), which are connected by running sums.
        mixer: name of the kernels that apply the coefficients to block summaries: ``"dense"`` or ``"exponential"``.
        guard: name under which the kernels are disabled in this process if they fail; PyTorch then computes the result. If
            empty, errors are raised instead.
        block_causal: whether causal attention hides later blocks only, instead of all later tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    coefficients: list[Tensor]
    tables: list[Tensor]
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    block_size: int
    block_offsets: list[int] | None
    causal: bool
    relu: bool
    eps: float | None
    form: str
    mixer: str
    guard: str
    block_causal: bool = False

    @property
    def layout(self) -> TokenLayout:
        """Partition of the tokens into blocks."""
        offsets = None if self.block_offsets is None else tuple(self.block_offsets)
        return TokenLayout(self.q.shape[1], self.block_size, offsets, self.cu_seqlens)


class Call:
    """Arguments of one call of the Triton attention operator, with the sizes, tables and options for launching its kernels.

    Args:
        arguments: arguments of the operator.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.q, self.k, self.v, self.coefficients = arguments[:4]
        table, sequences, *token_rows = arguments.tables
        spanning, layout = arguments.form == "spanning", arguments.layout
        if spanning:
            layout = layout.in_chunks(self.coefficients[0].shape[-1])
        self.tables = BlockTables(layout, table, sequences)
        self.token_row: Tensor | None = token_rows[0] if token_rows else None
        self.key_mask = arguments.key_mask
        self.causal, self.relu = arguments.causal, arguments.relu
        self.block_causal = arguments.causal and arguments.block_causal
        self.token_causal = arguments.causal and not arguments.block_causal
        # the kernels require a number for eps even if, without a normalizer, they do not read it
        self.normalize, self.eps = arguments.eps is not None, arguments.eps or 0.0
        self.chunked = arguments.form == "chunked"
        self.terms = self.coefficients[1].shape[1] if spanning else 0
        """Number of running sums between chunks in the spanning form; 0 in the other forms."""
        self.pairs: tuple[Tensor, int, int, int] | None = None
        """Coefficients for token pairs with their strides along heads, query blocks and key blocks; None until first used."""
        if spanning:
            matrix = self.coefficients[0]
            h, i, j = matrix.stride()
            self.pairs = matrix, 0 if len(matrix) == 1 else h, i, j

    @property
    def columns(self) -> Call:
        """Call whose tokens are the columns of the matrix of scores, that is, the second tokens of the token pairs.

        In self-attention, it is this call itself. In cross-attention, where this call has the queries or the keys as rows, it
        is the call of the other side.
        """
        # a stored reference would be a cycle, which keeps q, k and v alive until the garbage collector runs
        return self

    @property
    def rows(self) -> int:
        """Number of batch rows times number of heads, B * H. The first dimension of every launch grid is a multiple of it."""
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
        """Number of entries in a block summary: K * V sums of key-value products, then K sums of keys."""
        return self.key_width * (self.value_width + 1)

    @property
    def order(self) -> int:
        """Value of the kernels' constant ``CAUSAL``: 0 to hide nothing, 1 to hide later tokens, 2 to hide later blocks."""
        return self.causal + self.block_causal

    @property
    def isolates_sequences(self) -> bool:
        """Whether the kernels keep infinite and NaN summaries of a packed sequence from reaching other sequences."""
        return False

    @property
    def chip(self) -> int:
        """Compute capability of the GPU times ten, for example 90 for Hopper; 90 on a CPU."""
        return chip_of(self.q.device)

    def schedule(self, tiles: config.Tiles) -> dict[str, int]:
        """Return the options for launching a kernel on this call's device, as keyword arguments.

        The options are the number of warps, the number of stages and, except on Hopper, the limit on registers per thread.

        Args:
            tiles: tile sizes, number of warps and number of stages of the kernel.
        """
        warps, stages = tiles.warps, tiles.stages
        # A loop with one stage has no pipeline, so that none of its products overlap.
        if config.overlaps_chained_products(self.chip):
            stages = 1
        return {"num_warps": warps, "num_stages": stages, **config.register_limit(self.chip, warps)}

    @cached_property
    def pieces(self) -> tuple[int, int]:
        """Number of pieces into which the kernels divide the largest block, and number of tokens in a piece.

        In the spanning form of attention, which processes groups of several blocks (chunks), each chunk is a single piece.
        """
        largest = self.tables.layout.largest
        if self.terms:
            return 1, largest
        longest = config.PIECE if self.token_causal else config.SPLIT
        pieces = -(-largest // longest)
        # Pieces of equal size, instead of full pieces and a short rest.
        return pieces, -(-largest // pieces)

    @cached_property
    def mask_bytes(self) -> Tensor:
        """Key mask as uint8, ``[B, N]``; without a mask, a placeholder tensor that the kernels do not read."""
        return self.q if self.key_mask is None else self.key_mask.contiguous().view(torch.uint8)

    def span(self, tile: int) -> int:
        """Return the largest number of blocks that a tile of ``tile`` tokens overlaps.

        The first tile begins at the first token of a sequence, and each further tile begins where the previous one ends. In the
        spanning form of attention, which processes groups of several blocks (chunks), a tile begins at the start of each chunk.
        """
        return span_of_tile(tile, self.arguments.block_size) if self.terms else self.tables.span(tile)

    def tile_table(self, rows: int) -> tuple[Tensor, int]:
        """Divide each sequence into tiles of ``rows`` tokens.

        Returns:
            A table with a column for each tile, ``[7, tiles]`` int32, and the number of tiles. Its rows have the meaning of the
            rows of ``table`` in :class:`BlockTables`, with tiles in place of blocks. If sequences are not packed, the kernels
            do not need such a table, and the table of the blocks is returned instead.
        """
        if not self.tables.packed:
            return self.tables.table, triton.cdiv(self.tables.tokens, rows)
        table = make_tables(self.tables.layout._replace(block_size=rows), self.q.device).table
        return table, table.shape[1]


def sum_at(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum the columns of ``values`` that have the same index, in a fixed order.

    Args:
        values: numbers to sum, ``[R, n]``.
        index: index of each column, ``[n]`` integers. Columns with an index of ``size`` or more are dropped.
        size: number of sums.

    Returns:
        Sums, ``[R, size]``.
    """
    # index_put_ sorts the indices and adds in that order; index_add_ would add by atomics, in any order
    out = values.new_zeros(size + 1, values.shape[0])
    out.index_put_((index.long().clamp(max=size),), values.T, accumulate=True)
    return out[:size].T


def alignment(*tensors: Tensor) -> int:
    """Return the greatest common divisor of 8 and of the batch, token and head strides of all tensors.

    Strides are in elements. Eight elements are the 16 bytes of the widest load of bfloat16.
    """
    return gcd(8, *(stride for x in tensors for stride in x.stride()[:3]))


def strides(aligned: int, *tensors: Tensor) -> list[int]:
    """Return the strides of the tensors as kernel arguments, four for each tensor.

    The batch, token and head strides are divided by ``aligned``. A kernel multiplies them by this compile-time constant again,
    so that the compiler knows their alignment. The stride of the features is not divided.

    Args:
        aligned: common divisor of the batch, token and head strides, in elements.
        tensors: tensors with four axes.
    """
    return [number for x in tensors for number in (*(stride // aligned for stride in x.stride()[:3]), x.stride(3))]
