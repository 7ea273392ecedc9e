"""Check of ``lightning doctor`` that trains a small model on handwritten digits for twenty steps."""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

from lightning_mhla.system.numbers import rounded
from mhla_tasks.tools.doctor.report import Finding

STEPS = 20
LIMIT = 180.0
"""Time limit of the training process in seconds."""
OPTIONS = (
    "--seed_everything=0",
    "--model=mhla_tasks.classification.ImageClassifier",
    "--model.attention={kind: mhla, block_grid: [4, 4]}",
    "--model.num_classes=10",
    "--model.image_size=8",
    "--model.channels=1",
    "--model.shape.patch_size=1",
    "--model.shape.stem=conv",
    "--model.shape.dim=64",
    "--model.shape.depth=2",
    "--model.shape.heads=4",
    "--model.training.optimizer={lr: 5.0e-3}",
    "--data=mhla_tasks.classification.Digits",
    "--data.batch_size=64",
    f"--trainer.max_steps={STEPS}",
    "--trainer.limit_val_batches=0",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.devices=1",
)


def fit() -> Iterator[Finding]:
    """Train a small image classifier with ``lightning fit`` in a separate process, and check that its loss falls.

    Yields:
        One finding with the duration and the losses, or with the reason why the training failed or was not tried.
    """
    if find_spec("sklearn") is None:
        advice = "pip install 'lightning-mhla[classification]'"
        yield Finding("training", "fit", "note", "not tried: the digits come with scikit-learn", advice)
        return
    with tempfile.TemporaryDirectory() as folder:
        # Quoted, because the path may contain characters that have a meaning in YAML, such as a comma.
        place = json.dumps(folder)
        logger = f"--trainer.logger={{class_path: CSVLogger, init_args: {{save_dir: {place}, name: '', version: ''}}}}"
        command = [sys.executable, "-m", "mhla_tasks", "fit", *OPTIONS, logger]
        start = time.perf_counter()
        try:
            # With a wide terminal, the last line of an error message is not only its end.
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT, cwd=folder, check=False,
                env={**os.environ, "COLUMNS": "200"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            yield Finding(
                "training", "fit", "wrong", f"not done after {LIMIT:g} s", f"run it to see: {shlex.join(command)}"
            )
            return
        seconds = time.perf_counter() - start
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
            text = f"status {done.returncode}: {lines[-1][:300]}"
            yield Finding("training", "fit", "wrong", text, f"any training would meet this: {shlex.join(command)}")
            return
        with (Path(folder) / "metrics.csv").open() as stream:
            losses = [float(row["train/loss"]) for row in csv.DictReader(stream) if row.get("train/loss")]
    sound = len(losses) == STEPS and all(map(math.isfinite, losses)) and mean(losses[-5:]) < mean(losses[:5])
    text = "no loss was logged"
    if losses:
        first, last = rounded(mean(losses[:5])), rounded(mean(losses[-5:]))
        text = f"{len(losses)} steps in {rounded(seconds)} s with the start, loss {first} (first five) to {last} (last five)"
    advice = "" if sound else "the loss should fall in twenty steps: see the lines of the operator"
    values = {"seconds": seconds, "losses": losses}
    yield Finding("training", "fit", "ok" if sound else "wrong", text, advice, values)
