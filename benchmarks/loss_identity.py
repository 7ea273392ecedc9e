"""First losses of every shipped CPU configuration, compared bit by bit, to show that a change does not alter results.

    lightning bench loss_identity                  # train 50 steps of each, compare with benchmarks/results/losses.json
    lightning bench loss_identity --write          # make these losses the reference
    lightning bench loss_identity --only digits    # configurations whose path contains a word
    lightning bench loss_identity --steps 10       # fewer; video/digits_finetune, which starts from another, is left out

Training uses float32, one thread and no validation. Results depend on the processor, on torch and, for stdlib.yaml, on Python's
standard library. A reference from a different machine is compared, too, and the differences between the machines are printed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.machine import describe
from lightning_mhla.system.files import write_json

ROOT = Path(__file__).parents[1]
STEPS = 50
REFERENCE = ROOT / "benchmarks/results/losses.json"
CONFIGS = {
    "classification/digits": None,
    "language/stdlib": None,
    "diffusion/digits": None,
    "video/digits_pretrain": None,
    "video/digits_finetune": "video/digits_pretrain",
}
"""Configurations to train, each with the configuration from whose weights it starts; None for new weights."""


def first_losses(
    config: str, steps: int, folder: Path, start: Path | None, options: Sequence[str] = ()
) -> tuple[list[str], str]:
    """Train a configuration for a few steps in a separate process, and return its losses.

    Args:
        config: path of the configuration below ``configs``, without extension.
        steps: number of optimizer steps.
        folder: folder of the run, which must not exist.
        start: folder of the run whose weights to start from; None for new weights.
        options: additional options of ``lightning fit``.

    Returns:
        ``train/loss`` of every step, as the shortest text that represents the float exactly; and the output of the process.

    Raises:
        SystemExit: if training fails.
    """
    overlay = {
        "trainer": {
            "callbacks": [],
            "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": "."}}],
            "max_steps": steps,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "precision": "32-true",
            "enable_progress_bar": False,
        }
    }
    folder.mkdir(parents=True)
    (folder / "overlay.yaml").write_text(yaml.safe_dump(overlay))
    command = [
        sys.executable,
        "-m",
        "mhla_tasks.commandline.parser",
        "fit",
        "--config",
        str(ROOT / f"configs/{config}.yaml"),
    ]
    command += ["--config", str(folder / "overlay.yaml"), f"--run_dir={folder / 'run'}"]
    command += [] if start is None else [f"--model.init_args.pretrained={start}"]
    command += options
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MHLA_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {config} did not train:\n{(done.stdout + done.stderr)[-3000:]}")
    with (folder / "run/metrics.csv").open() as stream:
        losses = {int(row["step"]): row["train/loss"] for row in csv.DictReader(stream) if row["train/loss"]}
    return [losses[step] for step in range(steps)], done.stdout + done.stderr


def compare(measured: dict[str, list[str]], reference: dict[str, list[str]]) -> list[str]:
    """Compare losses with those of the reference.

    Args:
        measured: losses of each step by configuration.
        reference: losses of each step by configuration, as they should be.

    Returns:
        A line for each configuration whose losses differ, with the first such step, or that the reference lacks.
    """
    lines = []
    for config, losses in measured.items():
        expected = reference.get(config)
        if expected is None:
            lines.append(f"{config}: no reference")
            continue
        differing = [step for step, pair in enumerate(zip(losses, expected, strict=False)) if pair[0] != pair[1]]
        if differing:
            step = differing[0]
            lines.append(
                f"{config}: {len(differing)} losses differ, first at step {step}: {losses[step]}, not {expected[step]}"
            )
    return lines


def main() -> None:
    """Train all configurations, and compare their losses with the reference or write it. Exit with status 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each configuration (default: %(default)s)")
    parser.add_argument("--only", default="", help="only configurations whose path contains this text")
    parser.add_argument("--write", action="store_true", help="make the losses the reference")
    parser.add_argument("--reference", type=Path, default=REFERENCE, help="JSON file (default: %(default)s)")
    args = parser.parse_args()
    machine = describe(torch.device("cpu"))
    measured: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for config, pretraining in CONFIGS.items():
            selected = args.only in config and (pretraining is None or args.steps == STEPS)
            if selected or any(args.only in name for name, start in CONFIGS.items() if start == config):
                start = None if pretraining is None else Path(scratch) / pretraining / "run"
                losses, _ = first_losses(config, args.steps, Path(scratch) / config, start)
                if selected:
                    measured[config] = losses
                    print(f"{config}: {len(losses)} losses, {losses[0]} .. {losses[-1]}", flush=True)
    reference: dict[str, Any] = json.loads(args.reference.read_text()) if args.reference.exists() else {}
    if args.write:
        losses_by_config = {**reference.get("losses", {}), **measured}
        write_json(args.reference, {"machine": machine, "losses": losses_by_config}, indent=1)
        return
    if not reference:
        raise SystemExit(f"error: {args.reference} does not exist; create it with --write")
    differing = compare(measured, reference["losses"])
    if other := [
        f"{key} {reference['machine'].get(key)} there, {value} here"
        for key, value in machine.items()
        if reference["machine"].get(key) != value and key != "date"
    ]:
        print(f"the reference comes from a different machine: {'; '.join(other)}")
    if differing:
        raise SystemExit("error: " + "\n".join(differing))
    print(f"{len(measured)} configurations have the losses of the reference, to the last bit")


if __name__ == "__main__":
    main()
