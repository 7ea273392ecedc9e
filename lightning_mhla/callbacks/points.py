"""The values of a run's metrics by optimiser step, and their drawing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lightning import Trainer

from lightning_mhla.system.figures import make_panels


class MetricPoints(dict[str, list[tuple[int, float]]]):
    """Optimiser step and value of every note of a metric, by the metric's name; steps rise."""

    def note(self, name: str, step: int, value: float) -> None:
        """Add a point to the metric ``name``, ``train/loss`` say, unless it has one of this step."""
        points = self.setdefault(name, [])
        if not points or points[-1][0] < step:
            points.append((step, value))

    def note_logged(self, trainer: Trainer, prefix: str) -> None:
        """Add what the trainer has logged last under a prefix, ``"val/"`` say."""
        for name, value in trainer.callback_metrics.items():
            if name.startswith(prefix):
                self.note(name, trainer.global_step, float(value))

    def under(self, prefix: str) -> dict[str, list[tuple[int, float]]]:
        """The points of the metrics whose names begin with a prefix."""
        return {name: points for name, points in self.items() if name.startswith(prefix)}

    def restore(self, saved: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Take points from a checkpoint, in place of what these metrics have."""
        self.update({name: [(point[0], point[1]) for point in points] for name, points in saved.items()})


def as_lists(points: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, list[list[float]]]:
    """Points as plain lists, which a checkpoint keeps."""
    return {name: [list(point) for point in of_metric] for name, of_metric in points.items()}


def draw_curves(points: Mapping[str, Sequence[tuple[int, float]]], target: Path | BinaryIO) -> bool:
    """Draw every metric that moves against the optimiser step, as PNG; one name under several prefixes shares a panel.

    Args:
        points: steps and values by name, ``train/loss`` and ``val/loss`` say.
        target: file to write, with its folder, or a binary stream.

    Returns:
        Whether there was anything to draw.
    """
    panels: dict[str, list[str]] = defaultdict(list)
    for name in sorted(points):
        panels[name.split("/", 1)[1]].append(name)
    panels = {title: names for title, names in panels.items() if any(_moves(points[name]) for name in names)}
    if not panels:
        return False
    figure, axes = make_panels(len(panels), 3, (4.2, 3))
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            axis.plot(*zip(*points[name], strict=True), label=name.split("/", 1)[0], linewidth=1.2)
        axis.set_title(title, parse_math=False)
        axis.set_xlabel("optimiser step")
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend()
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, format="png")
    return True


def _moves(points: Sequence[tuple[int, float]]) -> bool:
    return len({value for _, value in points}) > 1
