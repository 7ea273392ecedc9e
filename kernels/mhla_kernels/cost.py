"""Which form is cheaper, from the shape alone: never by timing at run time."""

from __future__ import annotations

from typing import Literal

from mhla_kernels.chunked import TILE

PAIR_COST = 64
"""What one token pair costs beside its products (scaling, masking, row sum), in units of one multiply-add."""


def cheapest_form(
    blocks: int, slots: int, key_width: int, value_width: int, causal: bool
) -> Literal["parallel", "chunked"]:
    """The cheaper PyTorch form for M ``blocks`` of C ``slots``, counted in multiply-adds for one batch row and head."""
    tokens = blocks * slots
    pair = key_width + value_width + PAIR_COST
    summary = key_width * value_width
    chunked = 2 * tokens * summary + blocks * blocks * summary
    if causal:
        chunked += tokens * min(slots, TILE) * pair
    return "parallel" if tokens * tokens * pair <= chunked else "chunked"
