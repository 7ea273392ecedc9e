"""Rounding and counting for tables, reports and messages, so that the same number looks the same everywhere."""

from __future__ import annotations

import math

DIGITS = 4
"""Number of significant digits of a number that has no spread (standard deviation)."""

MOST_DIGITS = 6
"""Maximum number of significant digits of a mean, however small its spread is."""

SMALLEST = 1e-4
"""Absolute value below which a mean and its spread are written with exponents."""


def rounded(value: float | None) -> str:
    """Format a number as an integer if it has over four digits before the point, otherwise with four significant digits.

    Examples are ``123,456``, ``1,235``, ``92.13``, ``0.1235`` and ``1.235e-05``. Zeros at the end of a fraction are left out.
    Numbers from 1e15 on also have four significant digits, with an exponent.

    Args:
        value: number to round. None, NaN and infinities become ``not finite``.
    """
    if value is None or not math.isfinite(value):
        return "not finite"
    if 10**DIGITS - 0.5 <= abs(value) < 1e15:  # the format g would write an exponent
        return f"{value:,.0f}"
    return f"{value + 0.0:,.{DIGITS}g}"  # adding zero turns -0.0 into 0.0


def rounded_with_spread(mean: float, spread: float) -> tuple[str, str]:
    """Round a mean and its spread (standard deviation) to matching precision, such as ``0.9213`` and ``0.0042``.

    The spread has two significant digits. The mean ends at the same decimal place, or earlier if it would otherwise have more
    than six significant digits. Digits before the decimal point are never replaced by zeros. A spread of zero is ``0``, and
    its mean is formatted by :func:`rounded`. If both numbers are below 0.0001, they are written with exponents.

    Args:
        mean: finite mean.
        spread: standard deviation, finite and not negative.

    Returns:
        The mean and the spread as text.

    Raises:
        ValueError: if a number is not finite, or if the spread is negative.
    """
    if not math.isfinite(mean) or not math.isfinite(spread) or spread < 0:
        raise ValueError(
            f"a mean of {mean} with a spread of {spread} cannot be rounded: both must be finite, the spread not < 0"
        )
    if not spread:
        return rounded(mean), "0"
    two_digits = float(f"{spread:.1e}")  # first, because 0.0996 becomes 0.10, whose last place is a different one
    places = 1 - _exponent(two_digits)
    most_places = places if not mean else MOST_DIGITS - 1 - _exponent(mean)
    shown_places = min(places, most_places)
    if max(abs(mean), spread) < SMALLEST:
        return (f"{mean:.{max(shown_places + _exponent(mean), 0)}e}" if mean else "0"), f"{spread:.1e}"
    mean_text = f"{mean:,.{max(shown_places, 0)}f}"
    if not float(mean_text.replace(",", "")):
        mean_text = mean_text.removeprefix("-")
    is_aligned = places == shown_places or places <= 0
    return mean_text, f"{spread:,.{max(places, 0)}f}" if is_aligned else f"{spread:.2g}"


def _exponent(value: float) -> int:
    """Return the decimal exponent of the first significant digit of a nonzero number, such as 3 for 1234."""
    return math.floor(math.log10(abs(value)))


def plural(count: int, noun: str, many: str = "") -> str:
    """Format a count with its noun, such as ``1 layer`` or ``1,200 layers``.

    Args:
        count: number of things.
        noun: singular of the noun.
        many: plural of the noun; empty for the singular with an ``s``.
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {many or noun + 's'}"


def metric_text(name: str, value: float | None) -> str:
    """Format a metric as :func:`rounded` does, but with more digits for a cosine similarity close to 1.

    A cosine similarity between 0.999 and 1 is shown with enough decimal places for two significant digits of its distance from
    1, such as ``0.9999967``. A cosine similarity below 1 is therefore never shown as ``1``.

    Args:
        name: name of the metric. A name that ends in ``cosine``, such as ``val/cosine``, is that of a cosine similarity.
        value: value of the metric. None, NaN and infinities become ``not finite``.
    """
    if value is None or not name.endswith("cosine") or not 0.999 < value < 1:
        return rounded(value)
    return f"{value:.{1 - _exponent(1 - value)}f}".rstrip("0")


def duration(seconds: float) -> str:
    """Format a duration in its two largest units, such as ``2 d 3 h`` or ``4 min 05 s``, or in seconds below one minute.

    Args:
        seconds: duration in seconds.
    """
    minutes, leftover = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return (
        f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {leftover:02d} s" if minutes else f"{leftover} s"
    )
