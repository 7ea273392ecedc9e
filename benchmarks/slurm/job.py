"""Training job on two nodes of a SLURM cluster, submitted with the shipped template, and the losses that it logs."""

from __future__ import annotations

import csv
import os
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from lightning import Callback

from benchmarks.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docker/slurm/train.sbatch"
STEP_TIMEOUT = 90.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Pace(Callback):
    """Callback that makes each training step take at least ``seconds`` seconds, for faults that need a long run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the timer of a training step."""
        self._begun = time.monotonic()

    def on_train_batch_end(self, *_: Any) -> None:
        """Sleep until the training step has taken its minimal duration."""
        time.sleep(max(0.0, self.seconds - (time.monotonic() - self._begun)))


def write_config(folder: Path, steps: int, pace: float = 0.0) -> Path:
    """Write a small, fast digits configuration with a CSV file of losses and a checkpoint every 25 steps.

    Args:
        folder: folder of the file.
        steps: number of optimizer steps of the run.
        pace: minimal duration of a training step in seconds.

    Returns:
        Path of the file.
    """
    config = yaml.safe_load((ROOT / "configs/classification/digits.yaml").read_text())
    options = config["model"]["init_args"]
    options["shape"] |= {"dim": 8, "depth": 1, "heads": 1}
    options["training"] = {"optimizer": {"lr": 1.0e-3, "warmup_steps": 10}, "ema_decay": 0.9}
    options["drop_path"] = 0.2
    config["data"]["init_args"] = {"batch_size": 64}
    config["trainer"] = {
        "accelerator": "cpu",
        "max_steps": steps,
        "check_val_every_n_epoch": 5,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": ".", "flush_logs_every_n_steps": 1}}],
        "callbacks": [
            {"class_path": "ModelCheckpoint", "init_args": {"save_last": True, "monitor": "val/loss"}},
            {"class_path": "lightning_mhla.callbacks.Recovery", "init_args": {"every_n_steps": 25}},
        ],
    }
    if pace:
        config["trainer"]["callbacks"].append(
            {"class_path": "benchmarks.slurm.job.Pace", "init_args": {"seconds": pace}}
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


class SlurmJob:
    """Training run as a job of a SLURM cluster, which the constructor submits.

    Args:
        cluster: cluster that runs the job.
        folder: new folder for configuration, output and run.
        steps: number of optimizer steps of the run.
        pace: minimal duration of a step in seconds.
        **options: additional options of sbatch, see :meth:`Cluster.submit`.
    """

    def __init__(
        self, cluster: Cluster, folder: Path, steps: int, pace: float = 0.0, **options: str | int | bool
    ) -> None:
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        self._waits_since: float | None = None
        config = write_config(folder, steps, pace)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        exported = {"RUN_DIR": self.run, "PYTHON": sys.executable, "OMP_NUM_THREADS": 1, "PYTHONPATH": path}
        allowed = ("--allow=benchmarks",) if pace else ()
        self.number = cluster.submit(
            TEMPLATE,
            *("--config", str(config), "--config", str(ROOT / "configs/trainer/ddp.yaml"), *allowed),
            **{
                "job_name": "mhla-test",
                "nodes": 2,
                "chdir": str(ROOT),
                "output": str(folder / "out.txt"),
                "export": ",".join(["ALL", *(f"{name}={value}" for name, value in exported.items())]),
                **options,
            },
        )

    def step(self) -> int:
        """Return the last training step that the run has logged since its latest start; -1 if there is none yet."""
        return max((step for step, _ in _losses(self.run / "metrics.csv")), default=-1)

    def starts(self) -> int:
        """Return how often the run has started, counting only starts that have logged a step."""
        return len(list(self.run.glob("metrics*.csv")))

    def wait_for_start(self, number: int, steps: int = 3) -> None:
        """Wait until the run has started a given number of times, and has logged some steps since the last start.

        Args:
            number: number of starts.
            steps: number of steps to log after the first step since the start.

        Raises:
            TimeoutError: if this takes more than 90 seconds, or the job has ended.
        """
        until = time.monotonic() + STEP_TIMEOUT
        begun = None
        while True:
            self.hasten()
            if self.starts() >= number and self.step() >= 0:
                begun = self.step() if begun is None else begun
                if self.step() >= begun + steps:
                    return
            fields = self.cluster.show(self.number)
            if fields["JobState"] in OVER or time.monotonic() > until:
                state = f"{fields['JobState']} ({fields.get('Reason')}, exit code {fields.get('ExitCode')})"
                raise TimeoutError(f"no steps of start {number}; the job is {state}:\n{self.output()[-3000:]}")
            time.sleep(0.1)

    def hasten(self) -> None:
        """Shorten the delay with which SLURM starts a requeued job.

        The first seconds of the delay remain, because SLURM would reject the job's old credential.
        """
        fields = self.cluster.show(self.number)
        if fields["JobState"] != "PENDING":
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()
        elif fields.get("Reason") == "BeginTime" and time.monotonic() - self._waits_since > 2.5:
            self.cluster.attempt("scontrol", "update", f"job={self.number}", "StartTime=now")

    def finish(self, timeout: float = 180) -> dict[str, str]:
        """Wait for the end of the job, and return the fields that SLURM shows for it.

        Raises:
            TimeoutError: if the job takes more than ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        while True:
            self.hasten()
            fields = self.cluster.show(self.number)
            if fields["JobState"] in OVER:
                return fields
            if time.monotonic() > until:
                raise TimeoutError(f"the job is {fields['JobState']} after {timeout:g} s:\n{self.output()[-3000:]}")
            time.sleep(0.2)

    def output(self) -> str:
        """Return the text that the job has printed so far."""
        path = self.folder / "out.txt"
        return path.read_text() if path.exists() else ""

    def curve(self) -> dict[int, str]:
        """Return the training loss of every step, with all digits, by step."""
        return curve(self.run)

    def repeated(self) -> int:
        """Return the number of training steps that were repeated after a restart."""
        return sum(len(_losses(path)) for path in self.run.glob("metrics*.csv")) - len(self.curve())


def curve(run: Path) -> dict[int, str]:
    """Read the training loss of every step, with all digits, from the folder of a run, by step.

    Raises:
        AssertionError: if a repeated step has different losses.
    """
    losses: dict[int, str] = {}
    for path in sorted(run.glob("metrics*.csv")):
        for step, loss in _losses(path):
            assert losses.setdefault(step, loss) == loss, f"step {step} came twice, with {losses[step]} and {loss}"
    return losses


def _losses(path: Path) -> list[tuple[int, str]]:
    try:
        rows = list(csv.DictReader(path.read_text().splitlines(keepends=True)))
    except FileNotFoundError:
        return []
    # The run may be writing the last row at this moment.
    complete_rows = [row for row in rows if None not in row and None not in row.values()]
    return [
        (int(row["step"]), row["train/loss"])
        for row in complete_rows
        if row.get("train/loss") and row["step"].isdigit()
    ]
