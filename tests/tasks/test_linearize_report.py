"""Figures in the report of ``lightning linearize``: small losses, cosines near 1, costs of layers, and samples in the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mhla_tasks.tools import layer_costs
from mhla_tasks.tools.linearize.report import softmax_layers, window_note, write_report
from mhla_tasks.tools.linearize.source import PretrainedSource
from test_linearize_options import SETTINGS

from lightning_mhla.system.numbers import metric_text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("val/loss", 9.514286603007349e-07, "9.514e-07"),
        ("val/loss", 0.0123456, "0.01235"),
        ("val/loss", 0.99999671, "1"),
        ("val/cosine", 0.9999967217445374, "0.9999967"),
        ("val/token_cosine", 0.999987781047821, "0.999988"),
        ("val/cosine", 0.9999998211860657, "0.99999982"),
        ("val/cosine", 0.9999999403953552, "0.99999994"),
        ("val/cosine", 0.9995, "0.9995"),
        ("val/cosine", 0.99904, "0.99904"),
        ("val/cosine", 0.97866, "0.9787"),
        ("val/cosine", 1.0, "1"),
        ("val/cosine", 1.0000001192092896, "1"),
        ("val/cosine", -0.9999967, "-1"),
        ("val/cosine", float("nan"), "not finite"),
        ("val/cosine", None, "not finite"),
    ],
)
def test_metrics_have_enough_digits(name: str, value: float | None, text: str) -> None:
    assert metric_text(name, value) == text


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ([], "none of 6 layers keeps softmax"),
        ([0], "1 of 6 layers keeps softmax: layer 0 (counted from 0)"),
        ([0, 5], "2 of 6 layers keep softmax: layers 0, 5 (counted from 0)"),
    ],
)
def test_layers_that_keep_softmax_are_counted(kept: list[int], text: str) -> None:
    assert softmax_layers(kept, 6) == text


def page(folder: Path, **entries: Any) -> str:
    original = {"val/loss": 2.48e-08, "val/cosine": 0.9999999403953552}
    swapped = {"val/loss": 3.247160202590749e-05, "val/cosine": 0.9999967217445374}
    trained = {"val/loss": 9.514286603007349e-07, "val/cosine": 1.0}
    curves = {name: [[2, value / 2], [4, value]] for name, value in trained.items()}
    fit = {"curves": curves, "seconds": 60, "steps": 4, "metrics": trained}
    results = {"original": original, "swapped": swapped, "matching": fit, "tuning": fit, "speed": {}, **entries}
    write_report(folder / "out", folder, PretrainedSource("bert", "text", 3, "bert"), SETTINGS, results)
    return (folder / "report.html").read_text()


def test_small_losses_and_cosines_near_1_are_told_apart(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert "<td class=n>0<td class=n>3.247e-05<td class=n>9.514e-07<td class=n>9.514e-07</tr>" in text
    assert "<td class=n>1<td class=n>0.9999967<td class=n>1<td class=n>1</tr>" in text
    assert "original 1<" in text, "the rounding error of the original is left out of the legend, too"


def test_costs_of_layers_have_significant_digits(tmp_path: Path) -> None:
    alone = {"0": 1.732300006551668e-06, "1": 5.88219108976773e-07, "2": 0.0}
    layers = {"original": 1.4901161193847656e-08, "alone": alone, "kept": [0], "unit": "sample"}
    text = page(tmp_path, layers=layers)
    assert "<td>layer 0<td class=n>+1.717e-06<td class=n>softmax" in text
    assert "<td>layer 1<td class=n>+5.733e-07<td class=n>replaced" in text
    assert "<td>layer 2<td class=n>-1.49e-08<td class=n>replaced" in text
    assert "1 of 3 layers keeps softmax: layer 0 (counted from 0)" in text
    assert "attention of 2 of 3 layers replaced" in text


def test_samples_in_the_window_are_warned_of(tmp_path: Path) -> None:
    window = {"block_size": 32, "tokens": 96, "share": 0.75, "smaller_block_size": 16}
    note = window_note({"window": window})
    assert note.startswith("75% of the held-out samples have at most 96 tokens")
    assert "--block_size=16 with a different --work" in note
    assert note in page(tmp_path, window=window)
    for entries in ({}, {"window": {**window, "share": 0.5}}):
        assert not window_note(entries)
        assert "Warning" not in page(tmp_path, **entries)


@pytest.mark.parametrize(("kept", "label"), [([0], "layer 0 kept"), ([0, 2], "layer 0, 2 kept"), ([], "no layer kept")])
def test_the_table_of_layers_has_significant_digits(kept: list[int], label: str) -> None:
    costs = {
        "original": 2.1e-7, "replaced": 1.4e-5, "alone": {0: 1.9e-6, 1: 8.1e-7}, "unit": "sample", "kept": kept,
        "hybrid": 1e-7, "layer_kinds": ["keep", "replace"],
    }  # fmt: skip
    lines = [line.split("  ") for line in layer_costs.table(costs).splitlines()[1:-1]]
    names, differences = [line[0].strip() for line in lines], [line[-1] for line in lines]
    assert names == ["original", "layer 0 new", "layer 1 new", "all new", label]
    assert differences == ["+0", "+1.69e-06", "+6e-07", "+1.379e-05", "-1.1e-07"]
