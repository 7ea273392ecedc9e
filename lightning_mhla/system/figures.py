"""Matplotlib figures with several plots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_panels(
    count: int, columns: int, size: tuple[float, float], margin: tuple[float, float] = (0, 0)
) -> tuple[Figure, list[Any]]:
    """Create a matplotlib figure with plots arranged in rows. The last row may be shorter.

    Args:
        count: number of plots, at least 1.
        columns: maximum number of plots in a row.
        size: width and height of a plot in inches.
        margin: width and height in inches that the figure has in addition to its plots.

    Returns:
        The figure, and a list of the axes of its plots, row by row.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    from matplotlib.figure import Figure  # slow to import, and most commands draw nothing

    figure = Figure(figsize=(size[0] * columns + margin[0], size[1] * rows + margin[1]), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]
