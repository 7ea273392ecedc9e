"""A trial with ``--trainer.fast_dev_run`` runs all code once, and leaves no file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from lightning import Trainer
from processes import fork_server, run_in_turn

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


PROGRAM = """
import sys
from pathlib import Path
from tempfile import gettempdir

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader
from mhla_tasks.captioned.requests import SampleFolder
from mhla_tasks.classification.predict import PredictionTable
from lightning_mhla.generative.images import SampleWriter
from lightning_mhla.system.folders import run_folder

class Samples(SampleFolder):
    kind = "images"
    def __init__(self): super().__init__(None)
    def _check_origin(self, trainer, module): pass
    def write(self, path, pixels, module): path.touch()
    def show(self, samples, path): path.touch()

class Failing(Callback):
    def on_train_batch_end(self, trainer, *_):
        (run_folder(trainer) / f"{trainer.global_rank}.txt").touch()
        if trainer.is_global_zero:
            raise ValueError("as a full disk would")

class Drawing(LightningModule):
    class_names = ["a", "b"]
    def predict_step(self, batch):
        batch = batch + self.global_rank
        rows = [{"file": f"{i}.png", "prompt": "p", "index": i, "seconds": 1.0} for i in batch.tolist()]
        count = len(batch)
        return {
            "pixels": torch.zeros(count, 3, 4, 4, dtype=torch.uint8), "index": batch, "label": batch, "rows": rows,
            "probability": torch.ones(count, 2) / 2,
        }

import logging
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
what, processes, strategy = sys.argv[1], int(sys.argv[2]), sys.argv[3]
callbacks = {"npz": SampleWriter("npz"), "png": SampleWriter("png"), "prompts": Samples(), "table": PredictionTable()}
options = dict(accelerator="cpu", devices=processes, strategy=strategy, fast_dev_run=1, enable_progress_bar=False,
               use_distributed_sampler=False)
if __name__ == "__main__":
    if what == "failing":
        Trainer(callbacks=[Failing()], **options).fit(BoringModel())
    else:
        loader = DataLoader(torch.zeros(1, dtype=torch.long))
        DataLoader.source = range(processes)  # of the class, because Lightning builds the loader again
        Trainer(callbacks=[callbacks[what]], **options).predict(Drawing(), loader, return_predictions=False)
        assert not any(path.name.startswith("fast-dev-run-") for path in Path(gettempdir()).iterdir())
"""
"""Predicts or trains in a trial of one or several processes; the processes end without the interpreter's cleanup."""


@pytest.mark.parametrize(
    ("what", "processes"),
    [("npz", 2), ("png", 2), ("prompts", 2), ("table", 2), ("table", 1), ("failing", 1), ("failing", 2)],
)
def test_the_processes_of_a_trial_share_a_folder_that_is_removed(what: str, processes: int, tmp_path: Path) -> None:
    strategy = "ddp" if processes > 1 else "auto"
    status, said = fork_server().program(
        PROGRAM, what, processes, strategy, folder=tmp_path, processes=processes, TMPDIR=str(tmp_path)
    )
    assert (status != 0) == (what == "failing"), said
    assert ("as a full disk would" in said) == (what == "failing")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("fast-dev-run-")] == []
    if what in ("npz", "png", "table"):
        assert "fast-dev-run-" not in said
        assert "written to a temporary folder (fast_dev_run keeps no file)" in said


def test_forked_processes_of_a_trial_leave_no_file(tmp_path: Path) -> None:
    """They are forked by Lightning, so that their interpreters end without cleanup."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "prompts", "2", "ddp_fork"],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200"}, capture_output=True, text=True,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("fast-dev-run-")] == []
    assert "images of 4 x 4 in a temporary folder (fast_dev_run keeps no file)" in said


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
