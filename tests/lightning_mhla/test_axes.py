"""Ticks of the axes of plots."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lightning_mhla.callbacks.axes import Axis
from lightning_mhla.callbacks.markup import Curve, plot
from lightning_mhla.callbacks.points import draw_curves

RANGES = [
    (0.05, 2.05),
    (2.3026, 2.3027),
    (0.9999, 1.0),
    (0.3, 0.3),
    (-1.7, 0.2),
    (7e-8, 9e-8),
    (3e8, 1.9e9),
    (5e-324, 1e-300),
]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_an_axis_has_three_labels_and_none_of_them_twice(low: float, high: float) -> None:
    labels = [label for _, label in Axis(low, high, 0, 100).ticks()]
    assert 3 <= len(set(labels)) == len(labels) <= 8


def test_a_difference_in_the_last_bits_is_not_blown_up() -> None:
    axis = Axis(1.0, 1.0 + 2**-50, 0, 100)
    assert [label for _, label in axis.ticks()][2] == "1.000000000"
    assert axis(1.0) == pytest.approx(axis(1.0 + 2**-50), abs=1e-3)


@pytest.mark.parametrize("decades", [0.01, 0.3, 0.9, 1.5, 2.4, 2.6, 2.9, 4.0, 9.0, 40.0, 600.0])
@pytest.mark.parametrize("start", [-0.4, 0.05, 0.6])
def test_a_logarithmic_axis_has_three_labels_at_any_length(decades: float, start: float) -> None:
    low = 10 ** (start if decades < 300 else start - 300)
    axis = Axis(low, low * 10 ** (decades / 2) * 10 ** (decades / 2), 0, 100, logarithmic=True)
    labels = [label for _, label in axis.ticks()]
    assert 3 <= len(set(labels)) == len(labels) <= 13
    places = [axis(value) for value, _ in axis.ticks()]
    assert places == sorted(places)
    assert min(places) >= -0.1
    assert max(places) <= 100.1


@pytest.mark.parametrize(
    ("last", "labels"),
    [(0, ["0"]), (1, ["0", "1"]), (2, ["0", "1", "2"]), (3, ["0", "1", "2", "3"]), (7, ["0", "2", "4", "6"])],
)
def test_steps_are_whole_numbers(last: int, labels: list[str]) -> None:
    assert [label for _, label in Axis(0, last, 0, 100, margin=0, whole=True).ticks()] == labels


@pytest.mark.parametrize("values", [(2.302585, 2.302586), (1e-9, 1.1e-9), (123456789.0, 123456790.0)])
def test_no_label_begins_left_of_the_plot(values: tuple[float, float]) -> None:
    drawn = plot("loss", [Curve("val", [(1, values[0]), (2, values[1])])])
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="end">([^<]+)<', drawn)
    heights = [float(y) for _, y, _ in labels]
    assert len(heights) >= 3
    assert all(float(x) >= 6.5 * len(label) for x, _, label in labels), "a digit is about 6.5 pixels wide"


@pytest.mark.parametrize(("low", "high"), RANGES[:6])
def test_pictures_of_curves_have_three_labels(
    low: float, high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_curves({"val/loss": [(1, low), (2, high + (low == high))]}, tmp_path / "curves.png")
    (axis,) = figures[0].axes
    for scale, limits in ((axis.yaxis, axis.get_ylim()), (axis.xaxis, axis.get_xlim())):
        ticks = [tick for tick in scale.get_majorticklocs() if limits[0] <= tick <= limits[1]]
        assert len(ticks) >= (3 if scale is axis.yaxis else 2)
    assert all(float(tick).is_integer() for tick in axis.get_xticks())
