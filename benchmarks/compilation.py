"""Effect of `compile: true` on the shipped CPU configurations: number of graphs, change of the losses, time of a step.

    lightning bench compilation --out benchmarks/results

Each configuration is fitted for 50 steps with a validation in between, compiled and uncompiled, at a tenth of its learning
rate. At the full rate some configurations are unstable when 50 steps are the complete schedule, and rounding differences grow.
Step times are medians of several runs of `benchmarks.throughput`. Inductor's cache is empty at the first run, whose first step
is the longest.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

# All processes of this benchmark inherit an empty cache.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")

import torch
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.loss_identity import CONFIGS, ROOT, STEPS, first_losses
from benchmarks.machine import describe
from benchmarks.throughput import SMALL, measure_or_halve
from lightning_mhla.system.files import write_json

LEARNING_RATE = 0.1
"""Factor by which the learning rate of a configuration is multiplied."""


def fits(config: str, steps: int, folder: Path, start: Path | None) -> dict[str, Any]:
    """Fit a configuration uncompiled and compiled, and return the number of graphs and the difference of the losses.

    Args:
        config: path of the configuration below ``configs``, without extension.
        steps: number of optimizer steps.
        folder: folder of the two runs.
        start: folder of the run whose weights to start from; None for new weights.
    """
    options = yaml.safe_load((ROOT / f"configs/{config}.yaml").read_text())["model"]["init_args"]
    rate = options["training"]["optimizer"].get("lr", 1e-3) * LEARNING_RATE
    arguments = [f"--model.init_args.training.optimizer.lr={rate}", "--trainer.limit_val_batches=2"]
    arguments += ["--trainer.check_val_every_n_epoch=null", f"--trainer.val_check_interval={max(1, steps // 2)}"]
    eager, _ = first_losses(config, steps, folder / "eager", start, arguments)
    compiled, output = first_losses(
        config, steps, folder / "compiled", start, [*arguments, "--model.init_args.training.compile=true"]
    )
    counts = re.findall(r"compiled (\d+) graphs in (\d+) s", " ".join(output.split()))
    return {
        "config": config,
        "steps": steps,
        "graphs": int(counts[0][0]),
        "compile_seconds": int(counts[0][1]),
        "graphs_later": int(counts[1][0]),
        "compile_seconds_later": int(counts[1][1]),
        "first_loss": float(eager[0]),
        "last_loss": float(eager[-1]),
        "largest_difference": max(abs(float(a) - float(b)) for a, b in zip(eager, compiled, strict=True)),
    }


def step_times(config: str, runs: int) -> dict[str, Any]:
    """Measure the duration of training steps, and of the first step, in several compiled and uncompiled runs.

    Args:
        config: path of the configuration below ``configs``, without extension.
        runs: number of runs of each kind.

    Returns:
        Sorted lists with a value for each run: milliseconds per step, and seconds of the first step.
    """
    figures: dict[str, Any] = {}
    for compiled in (False, True):
        rows = [measure_or_halve(config, SMALL.get(config, 16), compiled, 12) for _ in range(runs)]
        name = "compiled" if compiled else "eager"
        figures[f"{name}_ms"] = sorted(1e3 * row["seconds"] for row in rows)
        figures[f"{name}_first_seconds"] = sorted(row["first_step_seconds"] for row in rows)
    return figures


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a row for each configuration."""

    def text(values: list[float]) -> str:
        return f"{median(values):.1f} ({values[0]:.1f} .. {values[-1]:.1f})"

    table = Table(title="graphs of a fit of 50 steps; losses; milliseconds of a step, median (minimum .. maximum)")
    for title in ("configuration", "graphs", "later", "loss", "differs by", "eager", "compiled", "first step, s"):
        table.add_column(title, justify="left" if title == "configuration" else "right")
    for row in rows:
        table.add_row(
            row["config"], f"{row['graphs']} in {row['compile_seconds']} s", str(row["graphs_later"]),
            f"{row['first_loss']:.3f} .. {row['last_loss']:.3f}", f"{row['largest_difference']:.1e}",
            text(row["eager_ms"]), text(row["compiled_ms"]), text(row["compiled_first_seconds"]),
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Measure the chosen configurations, write JSON after each, and print a table."""
    parser = argparse.ArgumentParser(prog="lightning bench compilation", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="number of runs for the step times")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", help="only configurations whose path contains this text")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for compilation-cpu.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for config, pretraining in CONFIGS.items():
            if args.only not in config:
                continue
            start = None
            if pretraining is not None:
                start = Path(scratch) / pretraining / "eager/run"
                if not start.exists():
                    first_losses(pretraining, args.steps, Path(scratch) / pretraining / "eager", None)
            rows.append(fits(config, args.steps, Path(scratch) / config, start) | step_times(config, args.runs))
            content = {"machine": describe(torch.device("cpu")), "rows": rows}
            write_json(args.out / "compilation-cpu.json", content, indent=1)
    print_table(rows, Console(width=150))


if __name__ == "__main__":
    main()
