"""Curves of the metrics of compared runs: a PNG picture with matplotlib, and SVG panels for a web page.

A single run is a thick line. Runs that differ only in their seed are thin lines, and their mean is a thick line over the steps
at which all of them have a value.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_mhla.callbacks.axes import FEWEST, Axis, label_width
from lightning_mhla.callbacks.markup import html_text
from lightning_mhla.system.figures import make_panels
from lightning_mhla.system.listing import without_controls
from lightning_mhla.system.numbers import rounded
from mhla_tasks.commandline.console import harmless
from mhla_tasks.tools.comparison.groups import Group, all_metrics

Points = list[tuple[int, float]]

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 10, 36
"""Width and height of an SVG panel, and its margins, in pixels. The left margin grows with the labels of the axis."""

COLORS = (
    ("#1f6feb", "#79b8ff"), ("#bc4c00", "#ffab70"), ("#1a7f37", "#7ee2a0"), ("#8250df", "#c9a6ff"),
    ("#bf3989", "#ff9bce"), ("#8a6a00", "#e6c33c"), ("#0e8a9e", "#56d3e6"), ("#6e7781", "#b1bac4"),
)  # fmt: skip
"""Color of each group on light pages and pictures, and the same hue for dark pages. Further groups get dashed lines."""

DASHES = ((), (6, 3), (2, 3), (8, 3, 2, 3))
"""Dash patterns of lines, in pixels. The first groups, as many as there are colors, use the first pattern, and so on."""

MEAN_WIDTH = 2.2
"""Width in pixels of the line of a group's mean."""

CHARACTERS = 68
"""Maximum number of characters in a line of the picture's legend, per plot in a row."""

MOST_MARKERS = 40
"""Number of points above which the points of a curve are not marked."""


def mean_points(group: Group, metric: str) -> Points:
    """Return the mean of a metric at the steps at which all runs of a group have a finite value.

    Args:
        group: runs to average.
        metric: name of the metric.

    Returns:
        Optimizer step and mean value of each point.
    """
    values = [dict(finite_points(run.points(metric))) for run in group.runs]
    steps = [step for step in values[0] if all(step in others for others in values[1:])]
    return [(step, fmean(of_run[step] for of_run in values)) for step in steps]


def finite_points(points: Sequence[tuple[int, float | None]]) -> Points:
    """Return the points of a curve, each an optimizer step and a value, without those whose value is None (not finite)."""
    return [(step, value) for step, value in points if value is not None]


def drawn_metrics(groups: Sequence[Group], metrics: Sequence[str] | None = None) -> list[str]:
    """List the metrics that have a curve: those that have at least two different finite values.

    Args:
        groups: compared groups.
        metrics: metrics to choose from; None for all.
    """
    runs = [run for group in groups for run in group.runs]
    names = all_metrics(groups) if metrics is None else metrics
    return [name for name in names if len({value for run in runs for _, value in finite_points(run.points(name))}) > 1]


def draw(groups: Sequence[Group], path: Path, metrics: Sequence[str] | None = None) -> None:
    """Plot the metrics of compared runs against the optimizer step, and write a picture.

    Args:
        groups: groups of runs. Each has a color; if there are more groups than colors, dashes distinguish groups with the same
            color.
        path: path of the picture file to write.
        metrics: metrics to plot; None for all.

    Raises:
        ValueError: if no metric has two different values, or if ``path`` does not have the extension of a picture format.
    """
    names = drawn_metrics(groups, metrics)
    if not names:
        raise ValueError("no metric of these runs changes, or none of those asked for, so there are no curves to draw")
    columns = min(len(names), 3)
    labels = [textwrap.fill(without_controls(harmless(legend(group))), CHARACTERS * columns) for group in groups]
    lines = sum(1 + label.count("\n") for label in labels)
    figure, axes = make_panels(len(names), columns, (4.6, 3.2), (0, 0.2 + 0.2 * lines))
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(
            f"{path} does not end in the name of a picture format, such as .png; there are {', '.join(formats)}"
        )
    lines_of_means: list[Any] = []
    for axis, metric in zip(axes, names, strict=True):
        for index, group in enumerate(groups):
            # matplotlib measures dashes in widths of the line
            dashes = [length / MEAN_WIDTH for length in _dashes(index)]
            style: dict[str, Any] = {
                "color": COLORS[index % len(COLORS)][0],
                "linestyle": (0, dashes) if dashes else "-",
            }
            if len(group.runs) > 1:
                for run in group.runs:
                    axis.plot(*_transposed(finite_points(run.points(metric))), linewidth=0.7, alpha=0.5, **style)
            lines_of_means += axis.plot(*_transposed(mean_points(group, metric)), linewidth=1.6, marker=".", **style)
        axis.set_title(textwrap.fill(metric, 40), parse_math=False)
        axis.set_xlabel("optimizer step")
        axis.locator_params("y", min_n_ticks=FEWEST)
        axis.locator_params("x", integer=True, min_n_ticks=1)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.grid(alpha=0.3)
    # The lines are listed here because matplotlib's own list leaves out labels that begin with an underscore.
    key = figure.legend(lines_of_means[: len(groups)], labels, loc="outside lower left", fontsize=8)
    for text in key.get_texts():
        text.set_parse_math(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # The font draws a box for such a character; the web page and the table have the name in full.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=120)


def legend(group: Group) -> str:
    """Return the label of a group, with the number of runs if there are several, such as ``kind=mhla (mean of 3 runs)``."""
    return group.label if len(group.runs) == 1 else f"{group.label} (mean of {len(group.runs)} runs)"


def _transposed(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def panel(metric: str, groups: Sequence[Group]) -> str:
    """Draw the curves of a metric as an SVG element, whose colors follow the style sheet of the page.

    Args:
        metric: name of the metric, one of those that :func:`drawn_metrics` returns.
        groups: compared groups. The lines of a group have the CSS class that :func:`color_class` returns, and the attribute
            ``data-group`` with the index of the group.
    """
    points = [point for group in groups for run in group.runs for point in finite_points(run.points(metric))]
    steps, values = zip(*points, strict=True)
    # SVG counts y from the top, so the smallest value has the largest coordinate.
    scale_y = Axis(min(values), max(values), HEIGHT - BOTTOM, TOP)
    ticks_y = scale_y.ticks()
    left = label_width(ticks_y, LEFT)
    scale_x = Axis(0, max(steps), left, WIDTH - RIGHT, margin=0, whole=True)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html_text(f"curves of {metric}")}">']
    for value, label in ticks_y:
        y = scale_y(value)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for step, label in scale_x.ticks():
        x = scale_x(step)
        anchor = "end" if x > WIDTH - 2 * RIGHT else "middle"  # a label at the right edge would be cut
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="{anchor}">{label}</text>')
    middle = (left + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 5}" text-anchor="middle">optimizer step</text>')
    for index, group in enumerate(groups):
        parts.append(f'<g class="series {color_class(index)}" data-group="{index}"{dash(index)}>')
        if len(group.runs) > 1:
            parts += [_line(finite_points(run.points(metric)), scale_x, scale_y, "thin") for run in group.runs]
        mean = mean_points(group, metric)
        parts.append(_line(mean, scale_x, scale_y, "mean"))
        if len(mean) <= MOST_MARKERS:
            parts += [_marker(point, scale_x, scale_y, legend(group)) for point in mean]
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def color_class(index: int) -> str:
    """Return the CSS class that sets the color of the group with this index."""
    return f"g{index % len(COLORS)}"


def color_rules(dark: bool) -> str:
    """Return the CSS rules that set the colors of the classes of :func:`color_class`, for a light or a dark page."""
    return " ".join(f".g{number} {{ --color: {color[dark]} }}" for number, color in enumerate(COLORS))


def dash(index: int) -> str:
    """Return the SVG attribute with the dash pattern of the lines of the group with this index; empty for solid lines."""
    pattern = _dashes(index)
    return f' stroke-dasharray="{" ".join(map(str, pattern))}"' if pattern else ""


def _dashes(index: int) -> tuple[int, ...]:
    return DASHES[index // len(COLORS) % len(DASHES)]


def _line(points: Points, scale_x: Axis, scale_y: Axis, name: str) -> str:
    if not points:
        return ""
    pairs = " ".join(f"{scale_x(step):.1f},{scale_y(value):.1f}" for step, value in points)
    return f'<polyline class="{name}" points="{pairs}"/>'


def _marker(point: tuple[int, float], scale_x: Axis, scale_y: Axis, label: str) -> str:
    step, value = point
    title = html_text(f"{label}: {rounded(value)} at step {step:,}")
    return f'<circle cx="{scale_x(step):.1f}" cy="{scale_y(value):.1f}" r="2.5"><title>{title}</title></circle>'
