"""The page of a run: whole in one file, and nothing in it but text that was meant as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from PIL import Image

from lightning_mhla.callbacks import LearningCurves, RunReport
from lightning_mhla.callbacks.page import duration, write_page
from lightning_mhla.callbacks.points import draw_curves


class Reader(HTMLParser):
    """HTML parser that collects tags and the addresses that the page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]


def record(**changes: Any) -> dict[str, Any]:
    kept = {
        "finished": False, "steps": 1200, "seconds": 61.4, "parameters": 1_000_000, "trained_parameters": 10, "processes": 2,
        "best": {"metric": "val/loss", "mode": "min", "value": 0.25, "step": 600},
        "metrics": {"val/loss": [[600, 0.25], [900, None], [1200, 0.5]], "val/samples": [[600, 10], [1200, 10]], "val/<b>": [[1, 2.0]]},
        "versions": {"torch": "2.15"},
    }  # fmt: skip
    return {**kept, **changes}


def test_the_page_shows_all_of_a_run_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/<script>"
    (run / "pictures").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "lock").touch()
    for name in ("mixing-step0000100.png", "mixing-step0000200.png", "clips-step0000200.gif"):
        Image.new("L", (4, 4)).save(run / "pictures" / name)
    (run / "config.yaml").write_text("name: <img src=http://example.org/x>\n")
    (run / "samples.md").write_text("# step 1\n<script>alert(2)</script> & more\n")
    write_page(run, run / "checkpoints", record())
    text = (run / "report.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert "script" not in reader.tags
    assert "b" not in reader.tags
    assert len(reader.loads) == 3, "the curves, the last mixing and the clips"
    assert all(re.match(r"data:image/(png|gif);base64,\w", load) for load in reader.loads)
    assert "mixing-step0000200.png" in text
    assert "mixing-step0000100.png" not in text
    assert "<h2>Curves</h2>" in text
    for words in ("not finished; 1,200 steps, 1 min 01 s, 19.5 steps per second overall", "0.25 at step 600", "2 processes",
                  "lightning fit --run_dir &#x27;runs/&lt;script&gt;&#x27;", "&amp; more", "torch 2.15"):  # fmt: skip
        assert words in text, words


def test_drawn_curves_take_the_place_of_others(tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "learning_curves.png")
    write_page(tmp_path, tmp_path, record())
    text = (tmp_path / "report.html").read_text()
    assert "<h2>Curves</h2>" not in text
    assert text.count("data:image/png;base64,") == 1


def test_metrics_that_move_are_drawn(tmp_path: Path) -> None:
    assert not draw_curves({"val/samples": [(1, 10.0), (2, 10.0)], "val/new": [(1, 0.5)]}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    assert draw_curves({"train/loss": [(1, 0.5), (2, 0.25)], "val/loss": [(2, 0.5)]}, tmp_path / "new/curves.png")
    with Image.open(tmp_path / "new/curves.png") as picture:
        assert picture.format == "PNG"
    write_page(
        tmp_path, tmp_path / "checkpoints", record(metrics={"val/samples": [[1, 10], [2, None], [3, 10]]}, best={})
    )
    assert "<h2>Curves</h2>" not in (tmp_path / "report.html").read_text(), "only a value that is not finite differs"


class Measured(BoringModel):
    """Model that logs a metric under ``val/`` and one under ``train/``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/steps", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/epoch", float(self.current_epoch))


@pytest.mark.parametrize("order", [1, -1], ids=["curves first", "report first"])
def test_curves_and_report_share_one_record(tmp_path: Path, order: int) -> None:
    curves, report = LearningCurves(), RunReport()
    callbacks = [curves, report][::order]
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=0, log_every_n_steps=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(Measured())
    assert report.points is curves.points
    assert curves.points["val/epoch"] == [(2, 0.0), (4, 1.0)], "one point a validation, whoever comes first"
    saved = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=True)["callbacks"]
    assert saved["RunReport"]["points"] == {"val/epoch": saved["LearningCurves"]["val/epoch"]}
    assert {"val/epoch", "train/steps"} <= set(saved["LearningCurves"])
    alone = RunReport()
    alone.load_state_dict(saved["RunReport"])
    assert alone.points == {"val/epoch": [(2, 0.0), (4, 1.0)]}


def test_a_run_that_has_nothing_yet_has_a_page(tmp_path: Path) -> None:
    write_page(tmp_path, tmp_path / "checkpoints", record(metrics={}, best={}, steps=0, seconds=0.0, processes=1))
    text = (tmp_path / "report.html").read_text()
    assert "No validation yet." in text
    assert "Resume" not in text, "there is no configuration to resume with"
    (tmp_path / "config.yaml").touch()
    write_page(tmp_path, tmp_path / "checkpoints", record())
    text = (tmp_path / "report.html").read_text()
    assert f"lightning fit --config {tmp_path}/config.yaml --ckpt_path {tmp_path}" in text
    write_page(tmp_path, tmp_path / "checkpoints", record(metrics={"val/loss": [[1, None]]}, best={}))
    assert "not finite" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (61, "1 min 01 s"), (3725, "1 h 02 min")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
