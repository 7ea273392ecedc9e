"""Comparison of a run that is killed repeatedly, at random times, with the same run left undisturbed.

    lightning bench kills --out benchmarks/results                       # digits: 50 kills; three more domains: 10 each
    lightning bench kills --domains classification --kills 5             # a short look

SIGKILL arrives during start-up, training, validation and the writing of checkpoints. After each kill the same command starts
again. The final weights, moving averages, optimizer, schedule and learning curves must be bit-identical to those of the
undisturbed run.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from lightning_mhla.system.files import write_json, write_whole

ROOT = Path(__file__).parents[1]
SAVE_EVERY = 5
"""Number of optimizer steps between two checkpoints. It is small, so that some kills interrupt the writing of a checkpoint."""

LAST = "checkpoints/recovery/step=*.ckpt"
"""Pattern of the checkpoint files in a run's folder. The last of them holds the final state."""

DRAWN = (
    "AttentionPictures",
    "GenerationMetrics",
    "TextSamples",
    "ClipPictures",
    "TokenThroughput",
    "LearningRateMonitor",
)
"""Callbacks to omit, because they only draw pictures, compute scores or measure times, and do not affect the weights."""


class Domain(NamedTuple):
    """Shipped configuration to train, default number of times to kill the run, and trainer options that shorten it."""

    config: str
    kills: int
    trainer: dict[str, Any]


DOMAINS = {
    "classification": Domain("configs/classification/digits.yaml", 50, {}),
    "language": Domain(
        "configs/language/stdlib.yaml", 10, {"max_steps": 120, "val_check_interval": 40, "limit_val_batches": 8}
    ),
    "diffusion": Domain("configs/diffusion/digits.yaml", 10, {"max_epochs": 6, "check_val_every_n_epoch": 2}),
    "video": Domain("configs/video/digits_pretrain.yaml", 10, {"max_steps": 120, "val_check_interval": 40}),
}


def write_config(domain: Domain, folder: Path) -> Path:
    """Write the configuration of a domain, changed to log losses to a CSV file and to save checkpoints often.

    Args:
        domain: shipped configuration and the options that shorten the run.
        folder: folder of the file.

    Returns:
        Path of the file.
    """
    config = yaml.safe_load((ROOT / domain.config).read_text())
    trainer = config["trainer"] | domain.trainer
    trainer |= {"log_every_n_steps": 1, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer["logger"] = [{"class_path": "CSVLogger", "init_args": {"save_dir": ".", "flush_logs_every_n_steps": 1}}]
    trainer["callbacks"] = [c for c in trainer["callbacks"] if not c["class_path"].endswith(DRAWN)]
    recovery = {"class_path": "lightning_mhla.callbacks.Recovery", "init_args": {"every_n_steps": SAVE_EVERY}}
    trainer["callbacks"].append(recovery)
    if "cache_dir" not in config["data"]["init_args"] and "language" in domain.config:
        config["data"]["init_args"]["cache_dir"] = str(folder / "cache")
    write_whole(folder / "config.yaml", yaml.safe_dump(config | {"trainer": trainer}))
    return folder / "config.yaml"


class RunningProcess(Protocol):
    """Subset of the interface of :class:`subprocess.Popen` that this benchmark uses. The process leads a process group."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        ...

    def wait(self) -> int:
        """Wait for the end of the process and return the exit status."""
        ...


def start(config: Path, run: Path) -> RunningProcess:
    """Start a process that trains a run, or resumes it, and appends its output to ``output.txt``.

    Args:
        config: path of the configuration.
        run: folder of the run.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "mhla_tasks.commandline.parser", "fit", "--config", str(config), "--run_dir", str(run)],
            stdout=output, stderr=output, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def wait_to_kill(process: RunningProcess, run: Path, rng: random.Random, spread: float) -> str | None:
    """Wait for a random moment during start-up, training or the writing of a checkpoint.

    Args:
        process: process of the run.
        run: folder of the run.
        rng: source of random numbers.
        spread: longest time in seconds to wait after training has begun.

    Returns:
        ``"starting"``, ``"training"`` or ``"writing"``; None if the run has ended.
    """
    kind = rng.choices(["starting", "training", "writing"], [0.2, 0.4, 0.4])[0]
    until = time.monotonic() + rng.uniform(0.5, 8)
    while kind != "starting" and not _logs(run / "metrics.csv", process):
        if process.poll() is not None:
            return None
        time.sleep(0.02)
    # Training has begun: the time of the kill counts from here.
    if kind != "starting":
        until = time.monotonic() + rng.uniform(0, spread)
    while time.monotonic() < until:
        if process.poll() is not None:
            return None
        time.sleep(0.005)
    while kind == "writing" and not any(run.rglob("*.part")):  # name of a file during an atomic write
        if process.poll() is not None:
            return None
    return kind


def _logs(table: Path, process: RunningProcess) -> bool:
    """Return whether the current process of a run has logged a step. Steps that earlier processes logged do not count.

    Args:
        table: CSV file of losses in the folder of the run.
        process: current process of the run.
    """
    try:
        begun = Path(f"/proc/{process.pid}").stat().st_mtime
        return table.stat().st_mtime > begun and bool(_rows(table))
    except FileNotFoundError:
        return False


def train_killed(
    config: Path,
    run: Path,
    kills: int,
    rng: random.Random,
    spread: float,
    start: Callable[[Path, Path], RunningProcess] = start,
) -> list[str]:
    """Train a run to its end while killing its process repeatedly.

    Args:
        config: configuration of the run.
        run: folder of the run.
        kills: number of kills.
        rng: source of random numbers.
        spread: longest time in seconds between the beginning of training and a kill.
        start: function that starts, or resumes, a run.

    Returns:
        The activity that each kill interrupted: ``"starting"``, ``"training"`` or ``"writing"``.
    """
    done: list[str] = []
    while True:
        process = start(config, run)
        kind = wait_to_kill(process, run, rng, spread) if len(done) < kills else None
        if kind is None:
            if status := process.wait():
                raise SystemExit(f"error: {run}: the run ended with status {status}, see output.txt")
            return done
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done.append(kind)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open() as stream:
            rows = list(csv.DictReader(stream))
    except FileNotFoundError:
        return []
    return [row for row in rows if None not in row and None not in row.values() and (row.get("step") or "").isdigit()]


def losses(run: Path) -> list[tuple[str, int, str]]:
    """Read the losses that all processes of a run have logged: name, step, and value with all digits."""
    rows = [row for path in sorted(run.glob("metrics*.csv")) for row in _rows(path)]
    return [(name, int(row["step"]), row[name]) for row in rows for name in ("train/loss", "val/loss") if row.get(name)]


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the paths of all entries in which two checkpoints differ, such as ``/state_dict/bias``.

    Args:
        a: content of one checkpoint, or a value nested in it.
        b: content of the other checkpoint, or the corresponding value.
        path: path of the two values, with which the returned paths begin.
    """
    if isinstance(a, torch.Tensor):
        return [] if isinstance(b, torch.Tensor) and torch.equal(a, b) else [path]
    if isinstance(a, dict):
        keys = {*a, *b} if isinstance(b, dict) else {}
        return (
            [w for key in keys for w in differences(a.get(key), b.get(key), f"{path}/{key}")]
            if keys or a == b
            else [path]
        )
    if isinstance(a, list | tuple):
        same = isinstance(b, list | tuple) and len(a) == len(b)
        return (
            [w for i, (x, y) in enumerate(zip(a, b, strict=True)) for w in differences(x, y, f"{path}/{i}")]
            if same
            else [path]
        )
    return [] if a == b else [path]


def compare(undisturbed: Path, killed: Path) -> dict[str, Any]:
    """Compare an undisturbed run with one that was killed, and count the steps that were repeated.

    Args:
        undisturbed: folder of the undisturbed run.
        killed: folder of the killed run.

    Returns:
        Number of steps, number of repeated steps, and lists of all losses, tensors and values that differ.
    """
    ends = [torch.load(sorted(run.glob(LAST))[-1], weights_only=True) for run in (undisturbed, killed)]
    keys = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "global_step")
    unequal = [w for key in keys for w in differences(ends[0].get(key), ends[1].get(key), key)]
    one, two = (end["callbacks"].get("LearningCurves") for end in ends)
    unequal += differences(one, two, "learning curves")
    once, again = losses(undisturbed), losses(killed)
    # Repeated steps are in the list twice, but with the same value, so that the sets are equal.
    wrong = sorted(set(again) ^ set(once))
    trained = [entry for entry in again if entry[0] == "train/loss"]
    return {
        "steps": int(ends[0]["global_step"]),
        "repeated_steps": len(trained) - len({step for _, step, _ in trained}),
        "losses_that_differ": [list(entry) for entry in wrong],
        "tensors_and_values_that_differ": unequal,
    }


def measure(name: str, folder: Path, kills: int | None, seed: int) -> dict[str, Any]:
    """Train one domain undisturbed and with kills, and compare the two runs.

    Args:
        name: name of the domain.
        folder: folder of both runs.
        kills: number of kills; None for the default of the domain.
        seed: seed of the random times.
    """
    domain = DOMAINS[name]
    config = write_config(domain, folder)
    begun = time.monotonic()
    process = start(config, folder / "whole")
    if process.wait() != 0:
        raise SystemExit(f"error: {folder / 'whole'}: the run failed, see output.txt")
    alone = time.monotonic() - begun
    number_of_kills = domain.kills if kills is None else kills
    spread = 0.6 * max(5.0, alone - 10) / number_of_kills
    done = train_killed(config, folder / "killed", number_of_kills, random.Random(f"{seed} {name}"), spread)
    row = {"config": domain.config, "kills": len(done), **{kind: done.count(kind) for kind in sorted(set(done))}}
    return {
        **row,
        **compare(folder / "whole", folder / "killed"),
        "seconds": round(time.monotonic() - begun),
        "alone": round(alone),
    }


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Print the results as a table with a row for each domain."""
    table = Table(
        "run", "steps", "kills", "while starting", "training", "writing", "steps repeated", "what differs in the end"
    )
    for name, row in rows.items():
        wrong = len(row["losses_that_differ"]) + len(row["tensors_and_values_that_differ"])
        counts = [str(row.get(kind, 0)) for kind in ("starting", "training", "writing")]
        table.add_row(
            name,
            str(row["steps"]),
            str(row["kills"]),
            *counts,
            str(row["repeated_steps"]),
            str(wrong) if wrong else "nothing",
        )
    Console(width=120).print(table)


def main() -> None:
    """Measure the chosen domains, print and write the results, and exit with an error if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domains", nargs="+", choices=list(DOMAINS), default=list(DOMAINS))
    parser.add_argument(
        "--kills", type=int, help="number of kills in each domain (default: 50 for classification, 10 for the others)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times")
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="folder for kills.json")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.domains:
            rows[name] = measure(name, (options.runs or Path(scratch)) / name, options.kills, options.seed)
            show(rows)
            if options.out:
                result = {"machine": describe(torch.device("cpu")), "save_every_n_steps": SAVE_EVERY, "runs": rows}
                write_json(options.out / "kills.json", result, indent=1)
    if any(row["losses_that_differ"] or row["tensors_and_values_that_differ"] for row in rows.values()):
        raise SystemExit("error: a killed run did not end like the undisturbed one")


if __name__ == "__main__":
    main()
