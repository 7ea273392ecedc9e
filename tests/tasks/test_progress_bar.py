"""The progress bar of a run that is killed within an epoch and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import fork_server

ROOT = Path(__file__).parents[2]

WATCH = """
import json
from lightning.pytorch import Callback

class Watch(Callback):
    def _note(self, trainer, batches):
        bar = trainer.progress_bar_callback.train_progress_bar
        with open("bar.jsonl", "a") as stream:
            stream.write(json.dumps([bar.description.strip(), bar.completed, bar.total, batches]) + "\\n")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._note(trainer, batch_idx)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._note(trainer, batch_idx + 1)
"""
"""Module with a callback that notes the description, position and total of the bar, and the position in the epoch."""

BATCHES = 5  # of an epoch


def train(folder: Path, *words: str, kill_at: int | None = None) -> list[list[Any]]:
    """Train a small classifier, and return the notes of :data:`WATCH` at the start and at the end of its batches."""
    (folder / "watching.py").write_text(WATCH)
    (folder / "bar.jsonl").unlink(missing_ok=True)
    recovery = "{class_path: lightning_mhla.callbacks.Recovery, init_args: {every_n_steps: 1}}"
    bar = "{class_path: mhla_tasks.commandline.progress_bar.EpochBar}"  # called first, so that the others see its state
    status, said = fork_server().run(
        "fit", f"--config={ROOT / 'configs/classification/digits.yaml'}", "--run_dir=run", "--allow=watching",
        f"--trainer.callbacks=[{bar}, {{class_path: watching.Watch}}, {recovery}]", "--trainer.accelerator=cpu",
        "--model.shape.dim=16", "--model.shape.depth=1", "--model.shape.heads=2", "--data.batch_size=200",
        f"--trainer.limit_train_batches={BATCHES}", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1",
        *words, folder=folder, kill_at=kill_at,
    )  # fmt: skip
    assert status == (0 if kill_at is None else -9), said[-3000:]
    return [json.loads(line) for line in (folder / "bar.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "kill_at", "resumes_at", "totals"),
    [
        (["--trainer.max_epochs=2"], 7, 2, {"Epoch 1/1": 5}),
        (["--trainer.max_epochs=2", "--trainer.val_check_interval=2"], 8, 3, {"Epoch 1/1": 5}),
        (["--trainer.max_epochs=2", "--trainer.max_steps=8"], 7, 2, {"Epoch 1/1": 3}),
        (["--trainer.max_epochs=-1", "--trainer.max_steps=12"], 7, 2, {"Epoch 1": 5, "Epoch 2": 2}),
        (["--trainer.max_epochs=-1", "--trainer.max_steps=9"], 8, 3, {"Epoch 1": 4}),
        (
            ["--trainer.max_epochs=-1", "--trainer.max_steps=8", "--trainer.accumulate_grad_batches=2"],
            4,  # an epoch of five batches has three steps
            2,
            {"Epoch 1": 5, "Epoch 2": 4},
        ),
        (
            ["--trainer.max_epochs=3", "--trainer.accumulate_grad_batches=2", "--trainer.val_check_interval=1"],
            5,
            4,
            {"Epoch 1/2": 5, "Epoch 2/2": 5},
        ),
    ],
    ids=["epochs", "validated", "both", "steps", "last epoch", "accumulated steps", "accumulated epochs"],
)
def test_the_bar_of_a_resumed_run_counts_up_to_its_total(
    words: list[str], kill_at: int, resumes_at: int, totals: dict[str, int], tmp_path: Path
) -> None:
    train(tmp_path, *words, kill_at=kill_at)
    notes = train(tmp_path, *words)
    assert notes[0][1] == notes[0][3] == resumes_at, "the bar is there from the first resumed batch on"
    assert [note[1] for note in notes] == [note[3] for note in notes]
    assert {description: total for description, _, total, _ in notes} == totals
    last = {description: completed for description, completed, _, _ in notes}
    assert last == totals, "the bar of each epoch is full at its end"
