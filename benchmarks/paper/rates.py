"""Searches for the learning rate of each kind of attention: variants of a study, and its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.paper.study import Row, by_variant, conditions, markdown, spread


def peak_rate(rate: float) -> list[str]:
    """Return the option of ``lightning fit`` for a peak learning rate."""
    return [f"--model.init_args.training.optimizer.lr={rate}"]


def rate_variants(
    kinds: Mapping[str, Sequence[str]],
    rates: Mapping[str, Sequence[float]],
    options: Callable[[float], Sequence[str]],
) -> dict[str, list[str]]:
    """Return options of ``lightning fit`` for each kind of attention with each of its learning rates.

    Args:
        kinds: options by the name of the kind.
        rates: learning rates by the name of the kind.
        options: function that returns the options of a learning rate.
    """
    return {f"{kind}, {rate}": [*kinds[kind], *options(rate)] for kind in rates for rate in rates[kind]}


def rate_section(
    rows: list[Row], folder: Path, *, metric: str, digits: int, factor: float, rates: Mapping[str, Sequence[float]]
) -> str:
    """Return a metric by kind of attention and learning rate as a Markdown table.

    Args:
        rows: results of the runs.
        folder: folder of the results page.
        metric: name of the metric in each row.
        digits: number of digits after the decimal point.
        factor: factor by which the metric is multiplied.
        rates: learning rates by the name of the kind.
    """
    scores = {name: [row[metric] for row in runs] for name, runs in by_variant(rows).items()}
    columns = sorted({rate for tried in rates.values() for rate in tried})
    lines = [
        [f"`{kind}`", *(spread(scores.get(f"{kind}, {rate}", []), digits, factor) for rate in columns)]
        for kind in rates
    ]
    return f"{markdown(['attention', *(f'{rate:g}' for rate in columns)], lines)}\n\n{conditions(rows)}"
