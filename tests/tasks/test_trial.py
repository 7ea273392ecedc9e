"""A trial with ``--trainer.fast_dev_run`` runs all code once, and leaves no file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from lightning import Trainer
from processes import run_in_turn

from lightning_mhla.callbacks import LearningCurves
from lightning_mhla.system.folders import checkpoint_folder, run_folder

ROOT = Path(__file__).parents[2]
SHORT = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


def test_a_trial_leaves_no_file(tmp_path: Path) -> None:
    """Attention is drawn, curves have two points, texts are generated."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    digits = ["fit", f"--config={ROOT / 'configs/classification/digits.yaml'}", *SHORT]
    texts = ["fit", f"--config={ROOT / 'configs/language/stdlib.yaml'}", *SHORT, "--model.shape.depth=1"]
    outcomes = run_in_turn(
        [*digits, "--trainer.fast_dev_run=2"],
        [*digits, "--trainer.fast_dev_run=true", "--run_dir=run"],
        [*texts, "--trainer.fast_dev_run=true", "--data.batch_size=2"],
        folder=tmp_path,
        TMPDIR=str(temporary),
    )
    for status, said in outcomes:
        assert status == 0, said[-3000:]
        assert "trial              fast_dev_run keeps no file" in said
        assert "log folder" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
    assert not list(temporary.glob("fast-dev-run-*"))


def test_callbacks_of_a_trial_write_to_a_folder_that_does_not_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer = Trainer(fast_dev_run=True, accelerator="cpu", default_root_dir="runs", callbacks=[LearningCurves()])
    folder = run_folder(trainer)
    assert folder == run_folder(trainer)
    assert folder.parent == tmp_path
    assert checkpoint_folder(trainer) == folder / "checkpoints"
    assert run_folder(Trainer(accelerator="cpu", logger=False, default_root_dir="runs")) == Path("runs")
