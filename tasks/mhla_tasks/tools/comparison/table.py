"""Table of a comparison: a row for each group of runs, with its options, metrics, size and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lightning_mhla.system.numbers import duration, metric_text, rounded_with_spread
from mhla_tasks.tools.comparison.groups import Group, Summary, all_metrics, direction
from mhla_tasks.tools.comparison.options import SEED, option_text, short_names
from mhla_tasks.tools.comparison.runs import differences

ARROWS = {"min": "↓", "max": "↑", None: ""}
"""Arrow that shows whether lower (``min``) or higher (``max``) values of a metric are better; empty if this is unknown."""


@dataclass(frozen=True)
class Cell:
    """Cell of the table that compares runs.

    Attributes:
        text: text of the cell; for a metric, its rounded mean.
        value: unrounded number by which the cell is sorted; None if the cell is not a number.
        spread: rounded standard deviation; empty if there is none.
        spread_value: unrounded standard deviation; None if there is none.
        best: whether this value is the best of its column, or equals the best one after rounding.
    """

    text: str
    value: float | None = None
    spread: str = ""
    spread_value: float | None = None
    best: bool = False

    def __str__(self) -> str:
        return f"{self.text} ± {self.spread}" if self.spread else self.text


@dataclass(frozen=True)
class Column:
    """Column of the table that compares runs.

    Attributes:
        name: heading, such as ``kind`` or ``val/accuracy``.
        kind: content of the column: ``run`` (name of the folder), ``option`` (value of an option), ``number`` (metric, steps,
            time or a count) or ``note`` (remarks).
        better: ``min`` if lower values are better, ``max`` if higher values are; None if unknown or not applicable.
        key: complete configuration key of an option; empty for other columns.
    """

    name: str
    kind: str
    better: str | None = None
    key: str = ""

    @property
    def title(self) -> str:
        """Heading with an arrow that shows whether lower or higher values are better."""
        return f"{self.name} {ARROWS[self.better]}".rstrip()


@dataclass(frozen=True)
class Table:
    """Comparison of groups of runs as a table.

    Attributes:
        columns: columns of the table.
        rows: cells of each group, in the order of the columns.
        identified: whether options and notes tell all rows apart, so that the names of folders may be left out.
    """

    columns: list[Column]
    rows: list[list[Cell]]
    identified: bool

    def without(self, kind: str) -> Table:
        """Return a copy of the table without the columns of one kind, see :class:`Column`."""
        indices = [index for index, column in enumerate(self.columns) if column.kind != kind]
        rows = [[row[index] for index in indices] for row in self.rows]
        return Table([self.columns[index] for index in indices], rows, self.identified)


BEST = "best "
"""Prefix of the name of a column with the best values of a metric."""


def tabulate(groups: Sequence[Group], columns: Sequence[str] | None = None) -> Table:
    """Build the table of a comparison.

    The first columns are the folder, the options that differ between groups, and the number of runs if a group has several. The
    next ones are the last values of the metrics, and the best values of the metrics by which checkpoints were chosen, unless
    these equal the last values. The remaining columns are steps, time, parameters, and notes if there are any.

    Args:
        groups: groups of runs, see :func:`mhla_tasks.tools.comparison.groups.group_runs`.
        columns: names of the columns of numbers to show, in this order: metrics, ``best NAME`` for a metric by which
            checkpoints were chosen, ``steps``, ``time`` and ``parameters``. None for all. If a metric has the name of one of
            the other columns, such as ``time``, the name of that column ends in ``(run)``.

    Raises:
        ValueError: if ``columns`` contains the name of a column that does not exist.
    """
    runs = [run for group in groups for run in group.runs]
    keys = [key for key in differences(runs) if key != SEED]
    recorded, monitored = all_metrics(groups), {run.record["best"].get("metric") for run in runs}
    filled: list[tuple[Column, list[Cell]]] = []
    taken = {*recorded, *FIGURES, "run", "runs", "notes"}
    for key, short in short_names(keys).items():
        name = key if short in taken else short  # such as the option sampling.steps beside the column steps
        cells = [_option_cell(group.first.options.get(key)) for group in groups]
        filled.append((Column(name, "option", key=key), cells))
    identities = {(*(cells[row].text for _, cells in filled), *group.notes) for row, group in enumerate(groups)}
    filled.insert(0, (Column("run", "run"), [Cell(group.name) for group in groups]))
    if any(len(group.runs) > 1 for group in groups):
        filled.append((Column("runs", "number"), [Cell(str(len(group.runs)), len(group.runs)) for group in groups]))
    best = {_distinct(f"{BEST}{name}", recorded): name for name in recorded if name in monitored}
    figures = {_distinct(name, recorded): cell for name, cell in FIGURES.items()}
    if columns is None:
        # A column that repeats the last values, because training ended with the best ones, says nothing new.
        new = [title for title, name in best.items() if any(group.best(name) != group.final(name) for group in groups)]
        columns = [*recorded, *new, *figures]
    for name in dict.fromkeys(columns):
        if name in recorded:
            filled.append(_metric_column(name, name, [group.final(name) for group in groups], groups))
        elif name in best:
            filled.append(_metric_column(name, best[name], [group.best(best[name]) for group in groups], groups))
        elif name in figures:
            filled.append((Column(name, "number"), [figures[name](group) for group in groups]))
        else:
            available = ", ".join([*recorded, *best, *figures])
            raise ValueError(f"no run recorded the metric {name}; the columns are {available}")
    notes = ["; ".join([*group.notes, *_early(group, [c for c in columns if c in recorded])]) for group in groups]
    filled += [(Column("notes", "note"), [Cell(note) for note in notes])] if any(notes) else []
    rows = [list(row) for row in zip(*(cells for _, cells in filled), strict=True)]
    return Table([column for column, _ in filled], rows, bool(keys) and len(identities) == len(groups))


def _distinct(name: str, metrics: Sequence[str]) -> str:
    """Return the name of a column that is not a metric, with the suffix ``(run)`` if a metric has this name."""
    return f"{name} (run)" if name in metrics else name


def _metric_column(
    name: str, metric: str, summaries: Sequence[Summary], groups: Sequence[Group]
) -> tuple[Column, list[Cell]]:
    """Return a column with the heading ``name``, and its cells with a metric's mean and standard deviation in each group."""
    column = Column(name, "number", direction(metric, groups))
    return column, _metric_cells(metric, summaries, groups, column)


def _option_cell(value: object) -> Cell:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    return Cell(option_text(value), number)


def _count(number: int) -> Cell:
    return Cell(f"{number:,}", number)  # the same for all runs of a group, see group_runs


def _time(group: Group) -> Cell:
    seconds = fmean(run.record["seconds"] for run in group.runs)
    return Cell(duration(seconds), seconds)


FIGURES: dict[str, Callable[[Group], Cell]] = {
    "steps": lambda group: _count(group.first.record["steps"]),
    "time": _time,
    "parameters": lambda group: _count(group.first.record["parameters"]),
}
"""Functions for the cells of the columns that are not metrics."""


def _metric_cells(metric: str, summaries: Sequence[Summary], groups: Sequence[Group], column: Column) -> list[Cell]:
    """Return the cells of a metric, in which the best value and all values that round to the same number are marked.

    Unfinished runs cannot be the best. No cell is marked if there is only one value, or if all values round to the same number.

    Args:
        metric: name of the metric.
        summaries: mean and standard deviation of the metric in each group.
        groups: compared groups.
        column: column of the metric, which states whether lower or higher values are better.
    """
    cells = [_metric_cell(metric, summary) for summary in summaries]
    competing = [group.first.record["finished"] for group in groups]
    texts = {
        cell.value: cell.text
        for cell, competes in zip(cells, competing, strict=True)
        if competes and cell.value is not None
    }
    if column.better is None or not texts:
        return cells
    value = min(texts) if column.better == "min" else max(texts)
    best = texts[value]
    # With a spread, the mean ends at the place of the spread, and 0.934 is equal to 0.93 ± 0.28.
    has_spread = any(cell.spread for cell in cells if (cell.value, cell.text) == (value, best))
    places = f",.{len(best.partition('.')[2])}f" if has_spread else ""

    def is_best(cell: Cell) -> bool:
        if cell.value is None:
            return False
        return best in (cell.text, texts.get(cell.value)) or (has_spread and format(cell.value, places) == best)

    marks = [competes and is_best(cell) for cell, competes in zip(cells, competing, strict=True)]
    if sum(marks) == sum(competes and cell.value is not None for cell, competes in zip(cells, competing, strict=True)):
        return cells
    return [replace(cell, best=mark) for cell, mark in zip(cells, marks, strict=True)]


def _metric_cell(metric: str, summary: Summary) -> Cell:
    if summary.mean is None:
        return Cell(summary.problem)
    if summary.spread is None:
        return Cell(metric_text(metric, summary.mean), summary.mean)
    text, spread = rounded_with_spread(summary.mean, summary.spread)
    return Cell(text, summary.mean, spread, summary.spread)


def _early(group: Group, metrics: Sequence[str]) -> list[str]:
    """Describe metrics whose last value was measured before the last step of the runs.

    Args:
        group: runs with the metrics.
        metrics: names of the metrics to examine.

    Returns:
        Texts such as ``val/loss at step 900, not 1,000``; empty if there are no such metrics.
    """
    steps = group.first.record["steps"]
    early: dict[int, list[str]] = {}
    for metric in metrics:
        last = min((points[-1][0] for run in group.runs if (points := run.points(metric))), default=steps)
        if last < steps:
            early.setdefault(last, []).append(metric)
    if len(early) == 1 and len(next(iter(early.values()))) > 1:
        return [f"metrics at step {next(iter(early)):,}, not {steps:,}"]
    return [f"{', '.join(names)} at step {step:,}, not {steps:,}" for step, names in early.items()]
