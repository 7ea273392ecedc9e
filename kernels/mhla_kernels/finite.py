"""Replacement of sums that overflowed, where an infinite later sum would reach an earlier token."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max * 2.0**-20
"""Replacement for a float32 sum that overflowed; a million of them can be added without overflow."""


def finite_(sums: Tensor) -> Tensor:
    """Replace sums that are infinite or NaN by finite numbers, in place and without an effect on gradients.

    Causal coefficients are applied as a matrix with zeros above its diagonal, and zero times infinity would make earlier
    tokens NaN. The overflow remains visible in the outputs of the token that caused it.
    """
    with torch.no_grad():
        return sums.nan_to_num_(LARGEST, LARGEST, -LARGEST)
