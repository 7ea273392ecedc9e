"""Which form is cheaper, from the shape alone: never by timing at run time.

The constants were chosen with ``python -m benchmarks.forms`` (2026-11-21, two cores of an AMD EPYC, torch 2.15.0).
"""

from __future__ import annotations

from typing import Literal

from mhla_kernels.chunked import TILE

PAIR_COST = 64
"""What one token pair costs beside its products (scaling, masking, row sum), in units of one multiply-add."""

SUMMARY_COST = 32
"""What one number of a block summary costs beside its products (writing and reading it), in the same units."""


def cheapest_form(
    blocks: int, slots: int, key_width: int, value_width: int, causal: bool
) -> Literal["parallel", "chunked"]:
    """The cheaper PyTorch form for M ``blocks`` of C ``slots``, counted in multiply-adds for one batch row and head."""
    tokens = blocks * slots
    pair = key_width + value_width + PAIR_COST
    summary = key_width * value_width
    chunked = (2 * tokens + blocks * blocks + SUMMARY_COST * blocks) * summary
    if causal:
        chunked += tokens * min(slots, TILE) * pair
    return "parallel" if tokens * tokens * pair <= chunked else "chunked"
