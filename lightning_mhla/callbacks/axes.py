"""Axes of SVG plots: positions of values in pixels, and labeled ticks at round values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

FEWEST, BEST = 3, 5
"""Smallest and preferred number of ticks of an axis."""
SMALLEST_RANGE = 1e-8
"""Smallest range of an axis, relative to its values. Smaller differences are rounding errors of metrics in single precision."""
LARGEST = 308
"""Exponent from which powers of ten have no ticks, because five times such a power may be too large for a float."""
CHARACTER = 7
"""Approximate width in pixels of a character of a tick label."""

Tick = tuple[float, str]


class Axis:
    """Axis of a plot, which converts values to pixel positions.

    If the smallest and the largest value are equal, or almost equal, the range of the axis is widened around them.

    Args:
        low: smallest value to plot.
        high: largest value to plot.
        start: pixel position of the end with the smallest value.
        end: pixel position of the end with the largest value.
        logarithmic: whether the axis is logarithmic, which requires positive values.
        margin: fraction of the range that is added at each end.
        whole: whether the values are integers, so that no ticks are put at fractions.
    """

    def __init__(
        self,
        low: float,
        high: float,
        start: float,
        end: float,
        logarithmic: bool = False,
        margin: float = 0.05,
        whole: bool = False,
    ) -> None:
        self.logarithmic, self.start, self.end, self.whole = logarithmic, start, end, whole
        low, high = self._position(low), self._position(high)
        if low == high:
            # 0.5 if the only value is 0
            half = abs(low) / 10 or 0.5
            low, high = low - half, high + half
        missing = SMALLEST_RANGE * max(abs(low), abs(high)) - (high - low)
        if missing > 0:
            low, high = low - missing / 2, high + missing / 2
        extra = (high - low) * margin
        self.low, self.high = low - extra, high + extra

    def _position(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def __call__(self, value: float) -> float:
        """Return the position of a value on the axis, in pixels."""
        return self.start + (self._position(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[Tick]:
        """Return about five (value, label) pairs for round values inside the axis, in ascending order.

        No two labels are equal. There are at least three ticks, unless an axis of integers contains fewer than three integers.
        """
        if not self.logarithmic:
            return _best(_round_ticks(self.low, self.high, self.whole))
        choices = [ticks for ticks in self._logarithmic_ticks() if len(ticks) >= FEWEST]
        # An axis shorter than a decade is almost linear.
        return _best(choices or _round_ticks(10**self.low, 10**self.high, self.whole))

    def _logarithmic_ticks(self) -> Iterator[list[Tick]]:
        """Yield possible lists of ticks, from few to many: at some or all powers of ten, and at 1, 2 and 5 times each power."""
        first, last = math.floor(self.low), math.ceil(self.high)
        for stride, factors in ((50, (1,)), (20, (1,)), (10, (1,)), (5, (1,)), (2, (1,)), (1, (1,)), (1, (1, 2, 5))):
            decades = [
                decade for decade in range(stride * (first // stride), last + 1, stride) if abs(decade) < LARGEST
            ]
            values = [factor * 10.0**decade for decade in decades for factor in factors]
            inside = [value for value in values if self.low <= math.log10(value) <= self.high]
            yield [(value, f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:g}") for value in inside]


def label_width(ticks: Sequence[Tick], least: float) -> float:
    """Return the approximate width in pixels of the longest label of a vertical axis, plus a gap.

    Args:
        ticks: values and labels of the ticks.
        least: minimum result in pixels.
    """
    return max(least, 8 + CHARACTER * max((len(label) for _, label in ticks), default=0))


def _best(choices: Iterable[list[Tick]]) -> list[Tick]:
    """Return the list whose length is closest to five. Lists of fewer than three ticks count only if all are that short."""
    return min(choices, key=lambda ticks: (len(ticks) < FEWEST, abs(len(ticks) - BEST)))


def _round_ticks(low: float, high: float, whole: bool) -> Iterator[list[Tick]]:
    """Yield possible lists of ticks, from few to many: at the multiples of 5, 2 or 1 times a power of ten.

    Args:
        low: lower end of the axis.
        high: upper end of the axis.
        whole: whether all ticks must be integers.
    """
    exponent = math.floor(math.log10(high - low))
    for place in range(exponent, exponent - 2, -1):
        for factor in (5, 2, 1):
            if place >= 0 or not whole:
                yield list(_labeled(low, high, factor * 10.0**place, place))
    if whole and exponent < 0:
        yield list(_labeled(low, high, 1, 0))


def _labeled(low: float, high: float, distance: float, place: int) -> Iterator[Tick]:
    """Yield the multiples of ``distance`` inside a range, each with its label.

    Args:
        low: lower end of the range.
        high: upper end of the range.
        distance: distance between ticks.
        place: decimal place at which the labels end, as an exponent of ten, such as -2 for hundredths.
    """
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    values = [number * distance for number in range(first, last + 1)]
    largest = max(map(abs, values), default=0.0)
    digits = math.floor(math.log10(largest)) - place + 1 if largest else 1
    plain = largest < 1e9 and (place >= -4 or largest >= 1e-3)
    for value in values:
        yield value, f"{value:,.{max(0, -place)}f}" if plain else f"{value:.{max(digits, 1)}g}"
