"""Sums that overflow are kept among the finite numbers where a later one would reach an earlier token."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max * 2.0**-20
"""Replacement for a float32 sum that overflowed; a million of them can be added up."""


def finite_(sums: Tensor) -> Tensor:
    """Replace, in place, sums that overflowed by a large finite number; gradients do not see it.

    Causal coefficients are applied as a matrix with zeros above its diagonal, and there a zero times infinity would make NaN
    of tokens that come before. The token that overflowed still shows it, in its own row.
    """
    with torch.no_grad():
        return sums.nan_to_num_(LARGEST, LARGEST, -LARGEST)
