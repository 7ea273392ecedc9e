"""Checks that numeric options are finite and within their bounds, so that a wrong value is an error before training starts.

A check that raises an error for ``value < 0`` accepts NaN, because a comparison with NaN is false. The checks here therefore
accept a value only if comparisons show that it is within its bounds.
"""

from __future__ import annotations

import math
from numbers import Integral

LARGEST_SEED = 2**63 - 1
"""Largest seed that fits into a tensor of a batch."""


def check_range(
    group: str = "",
    /,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    **options: float | None,
) -> None:
    """Check that options are finite numbers within bounds.

    Args:
        group: name of the group of options, for error messages, with a dot at its end, such as ``flow.``.
        least: smallest allowed value; None for no such bound.
        above: number that values must exceed; None for no such bound.
        most: largest allowed value; None for no such bound.
        below: number that values must stay below; None for no such bound.
        options: value of each option; None is not checked.

    Raises:
        ValueError: if a value is NaN, infinite or out of bounds.
    """
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    for name, value in options.items():
        if value is None:
            continue
        inside = (
            math.isfinite(value)
            and (least is None or value >= least)
            and (above is None or value > above)
            and (most is None or value <= most)
            and (below is None or value < below)
        )
        if not inside:
            words = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
            if most is None and below is None and not math.isfinite(value):
                words.append("finite")
            raise ValueError(f"{group}{name}={value} must be {' and '.join(words)}")


def check_seed(**options: int | None) -> None:
    """Check that seeds are between 0 and :data:`LARGEST_SEED`, which is 2**63 - 1.

    Args:
        options: value of each seed; None is not checked.

    Raises:
        ValueError: if a seed is not an integer, or is out of bounds.
    """
    for name, value in options.items():
        if not isinstance(value, Integral | None):
            raise ValueError(f"{name}={value} must be an integer")
    check_range(least=0, most=LARGEST_SEED, **options)
