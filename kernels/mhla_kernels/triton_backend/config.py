"""Tile sizes of the Triton kernels, which set how many tokens and features one program processes.

The sizes depend on the dtype, the widths and the chip, but not on the sequence length, so that a new length needs no new
compilation. Kernels that mix by a matrix are an exception. Their tiles depend on the number of blocks, in up to four steps, and
``trial.block_counts`` must have a number of blocks for each step. On Hopper, the sizes are the fastest ones measured
(``benchmarks.tiles``). On other chips, they are chosen so that ``make resources`` shows no register spills for bfloat16 at
common widths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import triton

PIECE = 256
"""Maximum number of tokens in a piece of a block, in the causal form. One program summarizes a piece and scores its pairs."""

SPLIT = 2048
"""Maximum number of tokens in a piece, without causality. There, pieces only distribute a long block over programs."""


def power_of_two(number: int) -> int:
    """Round a number up to a power of two, and to at least 16, the smallest size that Triton's matrix products support."""
    return max(16, 1 << (number - 1).bit_length())


MANY = 32
"""Number of blocks above which mixing uses larger tiles, see :func:`mix_tiles`."""

PROGRAMS = 528
"""Number of programs that small grids are split into: four for each multiprocessor of an H100 or H200."""

HOPPER = 90
"""Compute capability of Hopper times ten, as in ``sm_90``.

Tiles were timed on this chip only. Other chips get tiles that do not spill registers.
"""

LITTLE_SHARED_MEMORY = (86, 89, 120, 121)
"""Compute capabilities times ten of the chips with 99 KB of shared memory for a thread block.

Source: CUDA C++ Programming Guide, table 27.
"""


def overlaps_chained_products(chip: int) -> bool:
    """Return whether the installed Triton miscompiles pipelined loops with chained matrix products on a GPU.

    On datacenter Blackwell, Triton before 3.9 puts products that share an accumulator into different stages of a loop
    (triton-lang/triton #10821, fixed by #10988). On these GPUs, kernels run such loops with a single stage.

    Args:
        chip: compute capability of the GPU times ten.
    """
    return chip // 10 == 10 and tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2]) < (3, 9)


def register_limit(chip: int, warps: int) -> dict[str, int]:
    """Return the launch option that raises a kernel's limit on registers per thread; an empty dict on Hopper.

    On other GPUs, the compiler limits some kernels to 128 or 168 registers per thread, so that they spill a few bytes. The
    option ``maxnreg`` raises the limit to 255 or, for more than eight warps, to an equal share of the 65536 registers.

    Args:
        chip: compute capability of the GPU times ten.
        warps: number of warps of the kernel.
    """
    return {} if chip == HOPPER else {"maxnreg": min(255, 65536 // (32 * warps))}


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Number of warps and number of pipeline stages of a Triton kernel. Derived classes add tile sizes."""

    warps: int = 4
    stages: int = 1


@dataclass(frozen=True, kw_only=True)
class AttendTiles(Tiles):
    """Tile sizes of a Triton kernel that computes scores of token pairs.

    Such kernels compute the outputs, the gradients of q, k and v, or the gradient of the mixing coefficients.

    Attributes:
        rows: number of rows of a score tile, each of which belongs to one token.
        columns: number of columns of a score tile, each of which belongs to one token. These tokens are loaded at once.
        slice: number of features that a matrix product sums over at once.
        outputs: number of output features that one program computes; 0 for the gradient of the mixing coefficients.
    """

    rows: int
    columns: int
    slice: int
    outputs: int = 0


def attend_tiles(
    dtype: torch.dtype,
    x_width: int,
    out_width: int,
    full_width: bool,
    chip: int,
    *,
    summaries: bool = False,
    pairs: bool = True,
    matrix: bool = False,
    fine: bool = False,
    short: bool = False,
) -> AttendTiles:
    """Choose the tile sizes of the kernel that computes outputs or the gradients of q, k and v.

    Rows and columns are axes of the matrix of scores, which has one score for each token pair. If the kernel reads no block
    summaries, each matrix product sums over all features at once where possible. The loop over columns can then keep the rows
    loaded and prefetch the columns.

    Args:
        dtype: dtype of the operands, float32 or bfloat16.
        x_width: number of features that the scores sum over.
        out_width: number of features of the result.
        full_width: whether one program must compute all output features, as for the gradient of q with a normalizer.
        chip: compute capability of the GPU times ten.
        summaries: whether the kernel reads block summaries.
        pairs: whether the kernel scores token pairs.
        matrix: whether token pairs are weighted by a matrix of coefficients between blocks.
        fine: whether 128 consecutive tokens may lie in more than 16 blocks.
        short: whether to use fewer rows, for kernels that need more registers per row. It has an effect only in bfloat16 with
            ``matrix``, and none on Hopper.
    """
    x_width, out_width = power_of_two(x_width), power_of_two(out_width)
    if dtype == torch.bfloat16:
        outputs = out_width if full_width else min(out_width, 128)
        if chip == HOPPER and outputs <= 128:
            return _hopper_tiles(x_width, outputs, summaries, pairs, matrix, fine)
        rows = 64 if outputs <= 128 else 32
        columns = 32 if full_width or (matrix and outputs > 64) or (chip != HOPPER and outputs <= 64) else rows
        if matrix and ((full_width and outputs > 64) or short):
            rows = columns = 32
        small = summaries or (full_width and chip == HOPPER)  # larger slices spill
        slice_ = min(x_width, 64 if small else 128)
        if summaries and outputs > 128 and chip in LITTLE_SHARED_MEMORY:
            slice_ = 32  # the stages of larger slices exceed the shared memory, with Triton 3.8
        # on an H200, with widths of 256: pairs are faster with four warps, summaries alone with eight
        warps = 4 if outputs <= 64 or (chip == HOPPER and pairs) else 8
        return AttendTiles(rows=rows, columns=columns, slice=slice_, outputs=outputs, warps=warps, stages=2)
    outputs = out_width if full_width else min(out_width, 64)
    rows = 32 if outputs <= 64 else 16
    return AttendTiles(rows=rows, columns=rows, slice=min(x_width, 32), outputs=outputs)


def _hopper_tiles(x_width: int, outputs: int, summaries: bool, pairs: bool, matrix: bool, fine: bool) -> AttendTiles:
    """Choose the tiles of :func:`attend_tiles` for bfloat16 and up to 128 output features on Hopper.

    The tiles are the fastest ones that ``benchmarks.tiles`` measured on an H200. Four warps compute the 64 rows of one Hopper
    matrix product. With eight warps, the forward and backward passes together take 1.4 to 2.1 times as long.

    Args:
        x_width: number of features that the scores sum over, a power of two.
        outputs: number of output features of a tile, at most 128.
        summaries: whether the kernel reads block summaries.
        pairs: whether the kernel scores token pairs.
        matrix: whether token pairs are weighted by a matrix of coefficients between blocks.
        fine: whether 128 consecutive tokens may lie in more than 16 blocks.
    """
    if not summaries:
        columns = 128 if max(x_width, outputs) <= 64 and not fine else 64
        return AttendTiles(rows=64, columns=columns, slice=min(x_width, 128), outputs=outputs, stages=3)
    if not pairs:
        return AttendTiles(rows=64, columns=64, slice=min(x_width, 32), outputs=outputs, stages=3)
    stages = 1 if matrix or outputs > 64 else 2
    return AttendTiles(rows=64, columns=64, slice=min(x_width, 64), outputs=outputs, stages=stages)


def pair_tiles(dtype: torch.dtype, chip: int) -> AttendTiles:
    """Return the tile sizes of the kernel that sums over pairs of tokens to compute the gradient of the mixing coefficients.

    Args:
        dtype: dtype of the operands, float32 or bfloat16.
        chip: compute capability of the GPU times ten.
    """
    if dtype == torch.bfloat16:
        return AttendTiles(
            rows=64, columns=64 if chip == HOPPER else 32, slice=64, warps=4 if chip == HOPPER else 8, stages=2
        )
    return AttendTiles(rows=32, columns=32, slice=32)


@dataclass(frozen=True, kw_only=True)
class SummaryTiles(Tiles):
    """Tile sizes of the Triton kernel for block summaries, ``sum_j k_j v_j^T``.

    Attributes:
        tokens: number of tokens j that are loaded and summed over at a time.
        keys: number of rows of a summary (key features) that one program computes.
        values: number of columns of a summary (value features) that one program computes.
    """

    tokens: int
    keys: int
    values: int


def summary_tiles(dtype: torch.dtype, key_width: int, value_width: int, chip: int) -> SummaryTiles:
    """Choose the tile sizes of the Triton kernel that computes block summaries, ``sum_j k_j v_j^T``.

    Args:
        dtype: dtype of the operands, float32 or bfloat16.
        key_width: width of a key.
        value_width: width of a value.
        chip: compute capability of the GPU times ten.
    """
    if dtype == torch.bfloat16:
        keys, values = min(power_of_two(key_width), 128), min(power_of_two(value_width), 128)
        tokens = 64 if keys * values < 128 * 128 else 32
        if chip == HOPPER:  # on an H200, a pass takes up to 1.3 times as long with eight warps (benchmarks.tiles)
            warps = 2 if keys * values <= 32 * 32 else 4
            return SummaryTiles(tokens=tokens, keys=keys, values=values, warps=warps, stages=3)
        return SummaryTiles(tokens=tokens, keys=keys, values=values, warps=8, stages=2)
    keys, values = min(power_of_two(key_width), 64), min(power_of_two(value_width), 64)
    return SummaryTiles(tokens=32, keys=keys, values=values)


@dataclass(frozen=True, kw_only=True)
class MixTiles(Tiles):
    """Tile sizes of the Triton kernel that mixes block summaries by a matrix.

    Attributes:
        rows: number of query blocks in a tile of mixed summaries.
        terms: number of key blocks that are summed over at a time.
        columns: number of summary entries in a tile of mixed summaries.
    """

    rows: int
    terms: int
    columns: int


def mix_tiles(dtype: torch.dtype, blocks: int, chip: int) -> MixTiles:
    """Choose the tile sizes of the Triton kernel that mixes block summaries by a matrix of coefficients.

    Tiles have more rows above 32 blocks and, on Hopper in bfloat16, again above 64 blocks.

    Args:
        dtype: dtype of the operands, float32 or bfloat16.
        blocks: number of blocks; in cross-attention, the larger of the numbers of query blocks and key blocks.
        chip: compute capability of the GPU times ten.
    """
    has_few_blocks = blocks <= MANY
    if dtype == torch.bfloat16:
        if has_few_blocks:
            return MixTiles(rows=16, terms=16, columns=256, stages=2)
        # on an H200, a pass takes up to 1.3 times as long with eight warps (benchmarks.tiles); on other chips, four spill
        if chip == HOPPER:
            return MixTiles(rows=64 if blocks <= 64 else 128, terms=32, columns=128, warps=4, stages=2)
        return MixTiles(rows=64, terms=32, columns=128, warps=8, stages=2)
    return MixTiles(rows=16, terms=16, columns=128) if has_few_blocks else MixTiles(rows=32, terms=32, columns=64)


def mixing_gradient_parts(tiles: int, width: int) -> int:
    """Return the number of parts into which the kernel for the gradient of mixing coefficients splits its sum.

    The sum is over the entries of a block summary. The number is large enough to fill a GPU with programs, unless parts would
    then have fewer than 1024 entries.

    Args:
        tiles: number of programs without the split.
        width: number of entries of a summary.
    """
    return max(1, min(PROGRAMS // tiles, width // 1024))


@dataclass(frozen=True, kw_only=True)
class MixingGradientTiles(Tiles):
    """Tile sizes of the Triton kernel for the gradient of mixing coefficients.

    Attributes:
        rows: number of query blocks in a tile, and also its number of key blocks (tiles are square).
        columns: number of summary entries that are loaded and summed over at a time.
    """

    rows: int
    columns: int


def mixing_gradient_tiles(dtype: torch.dtype, blocks: int, chip: int) -> MixingGradientTiles:
    """Choose the tile sizes of the kernel that computes the gradient of mixing coefficients.

    Args:
        dtype: dtype of the operands, float32 or bfloat16.
        blocks: number of blocks; in cross-attention, the larger of the numbers of query blocks and key blocks.
        chip: compute capability of the GPU times ten.
    """
    columns = 64 if chip in (HOPPER, 100) else 32
    if dtype == torch.bfloat16 and chip == HOPPER:
        rows = min(power_of_two(blocks), 128)
        return MixingGradientTiles(rows=rows, columns=columns, warps=max(2, rows // 16), stages=3)
    mixing = mix_tiles(dtype, blocks, chip)
    return MixingGradientTiles(rows=mixing.rows, columns=columns, warps=mixing.warps, stages=mixing.stages)


@dataclass(frozen=True, kw_only=True)
class ScanTiles(Tiles):
    """Tile sizes of the Triton kernels that keep a running sum over the blocks for each term of exponential mixing.

    Attributes:
        terms: number of terms, rounded up to a power of two.
        columns: number of summary entries in a tile.
    """

    terms: int
    columns: int


def scan_tiles(terms: int, sums: int = 1) -> ScanTiles:
    """Choose the tile sizes of the Triton kernels that keep running sums over the blocks, as in exponential mixing.

    Args:
        terms: number of exponentials that are added to form a mixing coefficient.
        sums: number of running sums that a kernel keeps for each exponential and each entry of a block summary.
    """
    padded = 1 << (terms - 1).bit_length()
    return ScanTiles(terms=padded, columns=max(64, min(1024, 4096 // (padded * sums))), stages=2)
