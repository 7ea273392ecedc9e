"""Style of the pictures that benchmarks draw."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter


def plain_numbers(axis: Axes) -> None:
    """Label the axes of a plot with plain numbers instead of powers of ten; logarithmic axes at 1, 2, 5, 10, 20 and so on."""
    for one_axis in (axis.xaxis, axis.yaxis):
        if one_axis.get_scale() == "log":
            one_axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        one_axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        one_axis.set_minor_formatter(NullFormatter())
