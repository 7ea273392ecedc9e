"""Figures of several panels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_panels(
    count: int, columns: int, size: tuple[float, float], margin: tuple[float, float] = (0, 0)
) -> tuple[Figure, list[Any]]:
    """A figure with panels in rows, the last row as long as it gets.

    Args:
        count: number of panels, at least 1.
        columns: panels in a row at most.
        size: width and height of a panel in inches.
        margin: width and height in inches that the figure has beside its panels.

    Returns:
        The figure, and the axes of its panels in order.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    from matplotlib.figure import Figure  # takes long to import, and most commands draw nothing

    figure = Figure(figsize=(size[0] * columns + margin[0], size[1] * rows + margin[1]), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]
