"""Record of the metrics of a run by optimizer step, and a function that plots them."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import Trainer

from lightning_mhla.callbacks.axes import FEWEST
from lightning_mhla.system.figures import arrange, make_panels
from lightning_mhla.system.lightning_private import loop_metrics

LARGEST = 1e300
"""Absolute value at and above which a metric counts as not finite, because means and axes could overflow."""

UNPLOTTED = ("attention/", "data/")
"""Prefixes of metrics that loggers get and that curves do not show: a value for each layer, and counts of broken samples."""


class MetricPoints(dict[str, list[tuple[int, float]]]):
    """Dict from metric name to a list of (optimizer step, value) pairs, in ascending order of steps.

    Attributes:
        validation: names of the metrics that validation has logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.validation: set[str] = set()

    def note(self, name: str, step: int, value: float) -> None:
        """Record the value of a metric at a step, unless the metric already has a value at this step or a later one."""
        points = self.setdefault(name, [])
        if not points or points[-1][0] < step:
            points.append((step, value))

    def note_training(self, trainer: Trainer) -> None:
        """Record the latest values of the metrics that training has logged and validation has not.

        Names of metrics need not begin with ``train/``. Metrics that validation also logs have values from validation only.
        """
        for name, value in _latest(trainer, "train/").items():
            if name not in self.validation:
                self.note(name, trainer.global_step, value)

    def note_validation(self, trainer: Trainer) -> None:
        """Record the values of the metrics that a validation has logged, even if their names do not begin with ``val/``.

        Call this method at the end of the validation. Values that training logged under the same names are discarded.
        """
        for name, value in _latest(trainer, "val/").items():
            if name not in self.of_validation():
                self.pop(name, None)  # values that training has logged under this name
            self.validation.add(name)
            self.note(name, trainer.global_step, value)

    def of_validation(self) -> dict[str, list[tuple[int, float]]]:
        """Return the (step, value) pairs of each validation metric, by the name of the metric."""
        return {name: points for name, points in self.items() if name in self.validation or name.startswith("val/")}

    def clear(self) -> None:
        """Discard all metrics."""
        super().clear()
        self.validation.clear()

    def restore(self, saved: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Replace the recorded values of the metrics in ``saved`` with the (step, value) pairs from a checkpoint.

        Metrics that are not in ``saved`` keep their values.
        """
        self.update({name: [(point[0], point[1]) for point in points] for name, points in saved.items()})


def _latest(trainer: Trainer, prefix: str) -> dict[str, float]:
    """Return the latest values of all metrics that Lightning's running loop has logged or whose names begin with ``prefix``.

    Metrics that are never plotted, whose names begin with ``attention/`` or ``data/``, are left out.
    """
    # A callback may set a value in `callback_metrics` by hand, which no loop has logged.
    by_prefix = {name: value for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}
    metrics = {**by_prefix, **loop_metrics(trainer)}
    return {name: float(value) for name, value in metrics.items() if not name.startswith(UNPLOTTED)}


def as_lists(points: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, list[list[float]]]:
    """Convert the (step, value) pairs of each metric to lists, the form in which checkpoints store them."""
    return {name: [list(point) for point in of_metric] for name, of_metric in points.items()}


MATCHING = "train/layer_distance"
"""Name of the loss of a first training stage in which each new attention layer learns to match its original layer."""


def matching_steps(module: Any) -> int:
    """Return for how many optimizer steps a module's new attention layers learn to match the original ones; 0 if none do."""
    return int(getattr(getattr(module, "distillation", None), "layer_steps", 0))


def separate_stages(
    points: Mapping[str, Sequence[tuple[int, float]]], matching_steps: int
) -> dict[str, Sequence[tuple[int, float]]]:
    """Separate the training losses of two training stages, because they cannot be compared.

    In the first stage, each new attention layer learns to match its original layer. There, ``train/loss`` equals
    ``train/layer_distance``, and is left out. In the second stage, the complete model is trained. The trainer still reports the
    last ``train/layer_distance``, which is also left out.

    Args:
        points: (step, value) pairs by the name of the metric.
        matching_steps: number of optimizer steps of the first stage; 0 if there is none.

    Returns:
        The points to show, without metrics that have no points left. Without a first stage, all points are unchanged.
    """
    if not matching_steps:
        return dict(points)
    separated = dict(points)
    if MATCHING in points:
        separated[MATCHING] = [point for point in points[MATCHING] if point[0] <= matching_steps]
    if "train/loss" in points:
        separated["train/loss"] = [point for point in points["train/loss"] if point[0] > matching_steps]
    return {name: values for name, values in separated.items() if values}


def finite_points(points: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, list[tuple[int, float]]]:
    """Return, for each metric, the points that can be drawn: those with finite values below 1e300 in absolute value.

    Args:
        points: (step, value) pairs by the name of the metric; a value may be None.
    """
    return {
        name: [(int(step), float(value)) for step, value in values if value is not None and abs(value) < LARGEST]
        for name, values in points.items()
    }


def panels_of(points: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, list[str]]:
    """Group metrics whose names differ only in their prefix, such as ``train/loss`` and ``val/loss``.

    Args:
        points: (step, value) pairs by the name of the metric.

    Returns:
        Dict from common name, such as ``loss``, to the full names of its metrics in alphabetical order. Groups in which no
        metric changes are left out.
    """
    panels: dict[str, list[str]] = defaultdict(list)
    for name in sorted(points):
        panels[name.split("/", 1)[-1]].append(name)
    return {title: names for title, names in panels.items() if any(_moves(points[name]) for name in names)}


def draw_curves(points: Mapping[str, Sequence[tuple[int, float]]], target: Path) -> bool:
    """Plot the metrics of a run against the optimizer step as a PNG picture.

    Metrics whose names differ only in their prefix, such as ``train/loss`` and ``val/loss``, share a plot. A plot is left out
    if none of its metrics changes.

    Args:
        points: (step, value) pairs by the name of the metric, such as ``train/loss``. Values that are not finite are left out.
        target: path of the file to write. Its folder is created if missing.

    Returns:
        True if a picture was written, or False if no metric changes.
    """
    drawable = {name: values for name, values in finite_points(points).items() if values}
    panels = panels_of(drawable)
    if not panels:
        return False
    figure, axes = make_panels(len(panels), 3, (4.2, 3))
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        lines: list[Any] = []
        for name in names:
            marker = "o" if len(drawable[name]) <= 12 else ""
            lines += axis.plot(*zip(*drawable[name], strict=True), linewidth=1.2, marker=marker, markersize=3)
        axis.set_title("\n".join(textwrap.wrap(title, 40)), parse_math=False)
        axis.set_xlabel("optimizer step")
        axis.locator_params("y", min_n_ticks=FEWEST)
        axis.locator_params("x", integer=True, min_n_ticks=1)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.grid(alpha=0.3)
        if len(names) > 1:
            # The lines are listed here because matplotlib's own list leaves out labels that begin with an underscore.
            axis.legend(lines, [name.split("/", 1)[0] for name in names])
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, format="png", bbox_inches=arrange(figure, 110))
    return True


def _moves(points: Sequence[tuple[int, float]]) -> bool:
    return len({value for _, value in points}) > 1
