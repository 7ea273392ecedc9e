"""Headings of the table of predictions, for classes with equal names."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mhla_tasks.classification.predict import PredictionTable


@pytest.mark.parametrize(
    ("names", "headings"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "b", "a"], ["a (0)", "b", "a (2)"]),
        (["a", "a", "a (0)"], ["a (0)", "a (1)", "a (0) (2)"]),
        (["a (1)", "a", "a"], ["a (1) (0)", "a (1)", "a (2)"]),
        (["a", "a", "a (0)", "a (0) (2)"], ["a (0)", "a (1)", "a (0) (2)", "a (0) (2) (3)"]),
        (["path (1)", "path"], ["path (1) (0)", "path (1)"]),
    ],
)
def test_no_two_columns_have_the_same_heading(names: list[str], headings: list[str], tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(
        predict_dataloaders=SimpleNamespace(source=None), is_global_zero=True, world_size=1, fast_dev_run=False,
        log_dir=str(tmp_path), limit_predict_batches=1.0,
    )  # fmt: skip
    module: Any = SimpleNamespace(class_names=names)
    table = PredictionTable()
    best = len(names) - 1
    probability = torch.nn.functional.one_hot(torch.tensor([best]), len(names))
    table.on_predict_batch_end(trainer, module, {"index": torch.tensor([0]), "probability": probability})
    table.on_predict_end(trainer, module)
    head, row = csv.reader((tmp_path / "predictions.csv").open())
    assert head == ["path", "predicted", *headings]
    assert row[1] == headings[best]
