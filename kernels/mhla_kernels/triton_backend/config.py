"""Tile sizes: how many tokens, keys and values a program works on, from dtype and widths alone.

Chosen so that ``make resources`` shows no spills for bfloat16 at the widths people use. No length enters a compile key,
but for mixing, which has one kind of tiles for few blocks and one for many.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import triton

PIECE = 256
"""Longest run of tokens of a block that is summarised, and whose pairs are scored, at once in the causal form."""

SPLIT = 2048
"""The same without causality, where a piece only spreads the summary of a long block over more programs."""


def power_of_two(number: int) -> int:
    """The next power of two, at least 16: the least that a matrix product takes."""
    return max(16, 1 << (number - 1).bit_length())


PROGRAMS = 528
"""Four for each multiprocessor of an H100 or H200: what small grids are spread to."""

HOPPER = 90
"""The chip whose tiles are the largest that do not spill, as in ``sm_90``; others get smaller ones where those would."""

LITTLE_SHARED_MEMORY = (86, 89, 120, 121)
"""Chips with 99 KB for a block (CUDA C++ Programming Guide, table 27)."""


def overlaps_chained_products(chip: int) -> bool:
    """Whether this Triton puts products that share an accumulator into different stages of a loop, which computes wrong.

    On datacenter Blackwell before 3.9 (triton-lang/triton #10821, mended by #10988): one stage there.
    """
    return chip // 10 == 10 and tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2]) < (3, 9)


def register_limit(chip: int, warps: int) -> dict[str, int]:
    """Launch option for a chip, its compute capability times ten.

    Left alone, the compiler holds some kernels to 128 or 168 registers a thread on chips other than Hopper and spills a few
    bytes for it (``make resources``); this gives it all that the register file has for the block.
    """
    return {} if chip == HOPPER else {"maxnreg": min(255, 65536 // (32 * warps))}


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a program is scheduled; derived classes say how much it works on."""

    warps: int = 4
    stages: int = 1


@dataclass(frozen=True, kw_only=True)
class AttendTiles(Tiles):
    """``rows`` x ``columns`` token pairs, contracted width in slices of ``slice``, ``outputs`` wide."""

    rows: int
    columns: int
    slice: int
    outputs: int = 0


def attend_tiles(
    dtype: torch.dtype,
    x_width: int,
    out_width: int,
    whole: bool,
    parallel: bool,
    chip: int,
    short: bool = False,
    summaries: bool = False,
) -> AttendTiles:
    """For the attend kernel; ``whole`` when a program needs the full output width (the normalised gradient of q).

    ``parallel``: its pairs are weighed by a matrix. ``short``: in tiles of fewer rows, since it holds more for each.
    ``summaries``: it reads summaries too. Otherwise features fit into one slice, so that the loop over columns loads its rows
    once, and its columns ahead.
    """
    x_width, out_width = power_of_two(x_width), power_of_two(out_width)
    if dtype == torch.bfloat16:
        outputs = out_width if whole else min(out_width, 128)
        rows = 64 if outputs <= 128 else 32
        columns = 32 if whole or (parallel and outputs > 64) or (chip != HOPPER and outputs <= 64) else rows
        if parallel and ((whole and outputs > 64) or short):
            rows = columns = 32
        warps = 4 if outputs <= 64 else 8
        small = summaries or (whole and chip == HOPPER)  # or they spill
        slice_ = min(x_width, 64 if small else 128)
        if summaries and outputs > 128 and chip in LITTLE_SHARED_MEMORY:
            slice_ = 32  # or its stages do not fit, with Triton 3.8
        return AttendTiles(rows=rows, columns=columns, slice=slice_, outputs=outputs, warps=warps, stages=2)
    outputs = out_width if whole else min(out_width, 64)
    rows = 32 if outputs <= 64 else 16
    return AttendTiles(rows=rows, columns=rows, slice=min(x_width, 32), outputs=outputs)


def pair_tiles(dtype: torch.dtype, chip: int) -> AttendTiles:
    """For the gradient of mixing in the parallel form, which has no outputs."""
    if dtype == torch.bfloat16:
        return AttendTiles(rows=64, columns=32, slice=64, warps=4 if chip == HOPPER else 8, stages=2)
    return AttendTiles(rows=32, columns=32, slice=32)


@dataclass(frozen=True, kw_only=True)
class SummaryTiles(Tiles):
    """``tokens`` at a time into ``keys`` x ``values`` of the summary."""

    tokens: int
    keys: int
    values: int


def summary_tiles(dtype: torch.dtype, key_width: int, value_width: int) -> SummaryTiles:
    """For the summaries kernel."""
    if dtype == torch.bfloat16:
        keys, values = min(power_of_two(key_width), 128), min(power_of_two(value_width), 128)
        tokens = 64 if keys * values < 128 * 128 else 32
        return SummaryTiles(tokens=tokens, keys=keys, values=values, warps=8, stages=2)
    keys, values = min(power_of_two(key_width), 64), min(power_of_two(value_width), 64)
    return SummaryTiles(tokens=32, keys=keys, values=values)


@dataclass(frozen=True, kw_only=True)
class MixTiles(Tiles):
    """``rows`` query blocks x ``columns`` numbers of a summary, ``terms`` key blocks at a time."""

    rows: int
    terms: int
    columns: int


def mix_tiles(dtype: torch.dtype, blocks: int) -> MixTiles:
    """For mixing and its gradient; short tiles for few blocks, two kinds in all."""
    few = blocks <= 32
    if dtype == torch.bfloat16:
        return (
            MixTiles(rows=16, terms=16, columns=256, stages=2)
            if few
            else MixTiles(rows=64, terms=32, columns=128, warps=8, stages=2)
        )
    return MixTiles(rows=16, terms=16, columns=128) if few else MixTiles(rows=32, terms=32, columns=64)


def mixing_gradient_parts(tiles: int, width: int) -> int:
    """Parts of a summary's numbers for as many programs as fill a GPU, each with enough to do."""
    return max(1, min(PROGRAMS // tiles, width // 1024))


def mixing_gradient_columns(chip: int) -> int:
    """Numbers of a summary that the gradient of mixing takes at a time."""
    return 64 if chip in (HOPPER, 100) else 32


@dataclass(frozen=True, kw_only=True)
class ScanTiles(Tiles):
    """``terms`` running sums (padded) of ``columns`` numbers of a summary."""

    terms: int
    columns: int


def scan_tiles(terms: int) -> ScanTiles:
    """For exponential mixing."""
    padded = 1 << (terms - 1).bit_length()
    return ScanTiles(terms=padded, columns=max(64, min(256, 2048 // padded)), stages=2)
