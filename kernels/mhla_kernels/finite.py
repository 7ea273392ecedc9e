"""Replacement of overflowed sums with finite numbers, so that an overflow at a later token does not affect earlier tokens."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max * 2.0**-20
"""Replacement for a float32 sum that overflowed; a million of them can be added without overflow."""


def finite_(sums: Tensor) -> Tensor:
    """Replace infinite and NaN values with large finite numbers, in place. Gradients pass through unchanged.

    In causal attention, a matrix with zeros above its diagonal is applied to these sums. Zero times infinity would make the
    outputs of earlier tokens NaN. The overflow remains visible in the outputs of the token that caused it.

    Args:
        sums: sums over the tokens of each block, in any shape.

    Returns:
        The tensor ``sums`` itself.
    """
    with torch.no_grad():
        return sums.nan_to_num_(LARGEST, LARGEST, -LARGEST)
