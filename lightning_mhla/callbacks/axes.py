"""Axes of SVG plots: positions of values in pixels, and labeled ticks at round values."""

from __future__ import annotations

import math

LOG_DECADES = 2.5
"""Minimum length, in decades, of a logarithmic axis that has ticks only at powers of ten."""


class Axis:
    """Axis of a plot, which converts values to pixel positions.

    Args:
        low: smallest value.
        high: largest value.
        start: position of the lower end in pixels.
        end: position of the upper end in pixels.
        logarithmic: whether the axis is logarithmic, which requires positive values.
        margin: share of the range that is added at each end.
    """

    def __init__(
        self, low: float, high: float, start: float, end: float, logarithmic: bool = False, margin: float = 0.05
    ) -> None:
        self.logarithmic, self.start, self.end = logarithmic, start, end
        low, high = self._position(low), self._position(high)
        if low == high:
            half = abs(low) / 10 or 0.5
            low, high = low - half, high + half
        extra = (high - low) * margin
        self.low, self.high = low - extra, high + extra

    def _position(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def __call__(self, value: float) -> float:
        """Return the position of a value on the axis, in pixels."""
        return self.start + (self._position(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Return about five round values inside the axis with their labels, in ascending order. No two labels are equal."""
        if self.logarithmic:
            factors = (1, 2, 5) if self.high - self.low < LOG_DECADES else (1,)
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [factor * 10.0**decade for decade in decades for factor in factors]
            inside = [value for value in values if self.low <= math.log10(value) <= self.high]
            return [(value, f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:g}") for value in inside]
        least = (self.high - self.low) / 5
        exponent = math.floor(math.log10(least))
        factor = next(factor for factor in (1, 2, 5, 10) if factor * 10.0**exponent >= least * 0.999)
        distance, place = factor * 10.0**exponent, exponent + (factor == 10)  # labels end at the place of the distance
        first, last = math.ceil(self.low / distance - 1e-9), math.floor(self.high / distance + 1e-9)
        values = [number * distance for number in range(first, last + 1)]
        largest = max(map(abs, values))
        if place >= -4 and largest < 1e9:
            return [(value, f"{value:,.{max(0, -place)}f}") for value in values]
        digits = math.floor(math.log10(largest)) - place + 1 if largest else 1
        return [(value, f"{value:.{max(digits, 1)}g}") for value in values]
