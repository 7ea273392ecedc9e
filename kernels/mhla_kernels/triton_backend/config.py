"""Tile sizes: how many tokens, keys and values a program works on, from dtype and widths alone.

Chosen so that ``make resources`` shows no spills for bfloat16 at the widths people use, and so that two programs or more
fit on a multiprocessor; no length enters here, so none enters a compile key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_WIDTH = 256
"""Widest key or value that the kernels take."""

PIECE = 256
"""Longest run of tokens of a block that is summarised, and whose pairs are scored, at once in the causal form."""

SPLIT = 2048
"""The same without causality, where a piece only spreads the summary of a long block over more programs."""


def power_of_two(number: int) -> int:
    """The next power of two, at least 16: the least that a matrix product takes."""
    return max(16, 1 << (number - 1).bit_length())


def register_limit(capability: int, warps: int) -> dict[str, int]:
    """Launch option for a chip, compute capability as in ``sm_90``.

    Left alone, the compiler holds some kernels to 128 or 168 registers a thread on chips other than Hopper and spills a few
    bytes for it (``make resources``); this gives it all that the register file has for the block.
    """
    return {} if capability // 10 == 9 else {"maxnreg": min(255, 65536 // (32 * warps))}


@dataclass(frozen=True)
class AttendTiles:
    """``rows`` x ``columns`` token pairs, contracted width in slices of ``slice``, ``outputs`` wide."""

    rows: int
    columns: int
    slice: int
    outputs: int
    warps: int
    stages: int


def attend_tiles(dtype: torch.dtype, x_width: int, out_width: int, whole: bool) -> AttendTiles:
    """For the attend kernel; ``whole`` when a program needs the full output width (the normalised gradient of q)."""
    x_width, out_width = power_of_two(x_width), power_of_two(out_width)
    if dtype == torch.bfloat16:
        outputs = out_width if whole else min(out_width, 128)
        rows = 64 if outputs <= 128 else 32
        columns = 32 if whole else rows
        return AttendTiles(rows, columns, min(x_width, 64), outputs, 4 if outputs <= 64 else 8, 2)
    outputs = out_width if whole else min(out_width, 64)
    rows = 32 if outputs <= 64 else 16
    return AttendTiles(rows, rows, min(x_width, 32), outputs, 4, 1)


def pair_tiles(dtype: torch.dtype) -> AttendTiles:
    """For the gradient of mixing in the parallel form, which has no outputs."""
    if dtype == torch.bfloat16:
        return AttendTiles(64, 32, 64, 0, 4, 2)
    return AttendTiles(32, 32, 32, 0, 4, 1)


@dataclass(frozen=True)
class SummaryTiles:
    """``tokens`` at a time into ``keys`` x ``values`` of the summary."""

    tokens: int
    keys: int
    values: int
    warps: int
    stages: int


def summary_tiles(dtype: torch.dtype, key_width: int, value_width: int) -> SummaryTiles:
    """For the summaries kernel."""
    if dtype == torch.bfloat16:
        keys, values = min(power_of_two(key_width), 128), min(power_of_two(value_width), 128)
        return SummaryTiles(64 if keys * values < 128 * 128 else 32, keys, values, 8, 2)
    return SummaryTiles(32, min(power_of_two(key_width), 64), min(power_of_two(value_width), 64), 4, 1)


@dataclass(frozen=True)
class MixTiles:
    """``rows`` query blocks x ``columns`` numbers of a summary, ``terms`` key blocks at a time."""

    rows: int
    terms: int
    columns: int
    warps: int
    stages: int


def mix_tiles(dtype: torch.dtype, blocks: int) -> MixTiles:
    """For mixing and its gradient; short tiles for few blocks, two kinds in all."""
    few = blocks <= 32
    if dtype == torch.bfloat16:
        return MixTiles(16, 16, 256, 4, 2) if few else MixTiles(64, 32, 128, 8, 2)
    return MixTiles(16, 16, 128, 4, 1) if few else MixTiles(32, 32, 64, 4, 1)


@dataclass(frozen=True)
class ScanTiles:
    """``terms`` running sums (padded) of ``columns`` numbers of a summary."""

    terms: int
    columns: int


def scan_tiles(terms: int) -> ScanTiles:
    """For exponential mixing."""
    padded = 1 << (terms - 1).bit_length()
    return ScanTiles(padded, max(64, min(256, 2048 // padded)))
