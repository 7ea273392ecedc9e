"""Four kinds of attention as language models of Python: trains each, prints a table, writes JSON.

    python -m benchmarks.language --out benchmarks/results

Each is ``lightning fit --config configs/language/stdlib.yaml`` with another attention, everything else equal. What is done
is not done again: a stopped report goes on from the last checkpoint of the model that it was training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from mhla_tasks.language import PythonSource
from mhla_tasks.language.checkpoint import load_checkpoint

from benchmarks.machine import describe
from lightning_mhla.files import write_whole

ROOT = Path(__file__).parents[1]
CONFIG = "configs/language/stdlib.yaml"

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax"},
    "linear": {"kind": "linear"},
    "mhla, dense": {"kind": "mhla", "mixing": "dense", "mixing_per_head": False},
    "mhla, exponential": {"kind": "mhla", "mixing": "exponential", "mixing_per_head": False},
    "mhla, dense, uniform start": {
        "kind": "mhla",
        "mixing": "dense",
        "mixing_per_head": False,
        "mixing_init": "uniform",
    },
    "mhla, dense per head": {"kind": "mhla", "mixing": "dense", "mixing_per_head": True},
    "mhla, exponential per head": {"kind": "mhla", "mixing": "exponential", "mixing_per_head": True},
}


def slug(name: str) -> str:
    """A variant's name for a folder."""
    return name.replace(", ", "-").replace(" ", "-")


def newest_checkpoint(place: Path) -> Path | None:
    """The last checkpoint that a run in ``place`` wrote."""
    found = sorted(place.glob("logs/version_*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def train(name: str, folder: Path, options: list[str]) -> tuple[Path, float]:
    """Train one variant, or go on with it.

    Returns:
        Its last checkpoint, and the seconds that training took, start-up and validation included.
    """
    place = (folder / slug(name)).resolve()
    clock = place / "seconds.json"
    fresh = {"seconds": 0.0, "done": False, "options": options}
    spent: dict[str, Any] = json.loads(clock.read_text()) if clock.exists() else fresh
    if spent["options"] != options:
        raise SystemExit(f"error: {place} was trained with {spent['options']}, not {options}; choose another --runs")
    if not spent["done"]:
        place.mkdir(parents=True, exist_ok=True)
        attention = [f"--model.init_args.attention.{key}={value}" for key, value in VARIANTS[name].items()]
        logs = [f"--trainer.logger.init_args.save_dir={place}", "--trainer.logger.init_args.name=logs"]
        last = newest_checkpoint(place)
        resume = [f"--ckpt_path={last}"] if last else []
        start = time.perf_counter()
        try:
            command = [sys.executable, "cli.py", "fit", "--config", CONFIG, *attention, *logs, *resume, *options]
            subprocess.run(command, check=True, cwd=ROOT)
            spent["done"] = True
        finally:
            spent["seconds"] += time.perf_counter() - start
            clock.write_text(json.dumps(spent))
    checkpoint = newest_checkpoint(place)
    assert checkpoint is not None
    return checkpoint, spent["seconds"]


def measure(name: str, checkpoint: Path, seconds: float) -> dict[str, Any]:
    """One row of the table: held-out metrics, learned coefficients, and a sample."""
    model = load_checkpoint(checkpoint)
    content = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
    memory = content["datamodule_hyper_parameters"]
    data = PythonSource(**{key: value for key, value in memory.items() if not key.startswith("_")})
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (metrics,) = trainer.validate(model, data, verbose=False)
    torch.manual_seed(0)
    sample = model.continue_prompts([PROMPT])[0]
    return {
        "variant": name,
        **{key.removeprefix("val/"): value for key, value in metrics.items()},
        "steps": content["global_step"],
        "tokens": content["global_step"] * data.batch_size * data.context,
        "seconds": round(seconds),
        "parameters": sum(p.numel() for p in model.network.parameters()),
        "sample": PROMPT + sample,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; the last column says where a variant lies between linear and softmax attention."""
    bits = {row["variant"]: row["bits_per_byte"] for row in rows}
    lines = [
        "| attention | bits per byte | perplexity per token | of the way from linear to softmax | training |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        share = ""
        if {"linear", "softmax"} <= set(bits):
            share = f"{(bits['linear'] - row['bits_per_byte']) / (bits['linear'] - bits['softmax']):.0%}"
        time_taken = f"{row['seconds'] / 60:.1f} min"
        cells = [f"`{row['variant']}`", f"{row['bits_per_byte']:.3f}", f"{row['perplexity']:.2f}", share, time_taken]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


PROMPT = 'def read_config(path):\n    """'


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--runs", type=Path, default=Path("runs/report-language"), help="where the runs are kept")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants, all by default")
    parser.add_argument("options", nargs="*", help="options for lightning fit, after --")
    args = parser.parse_args()
    path = None if args.out is None else args.out / "language-stdlib.json"
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    rows = known["rows"] if known.get("options") == args.options else []
    for name in args.only:
        checkpoint, seconds = train(name, args.runs, args.options)
        rows = [row for row in rows if row["variant"] != name] + [measure(name, checkpoint, seconds)]
        rows.sort(key=lambda row: list(VARIANTS).index(row["variant"]))
        print(table(rows), flush=True)
        if path is not None:
            result = {"machine": describe(torch.device("cpu")), "config": CONFIG, "options": args.options, "rows": rows}
            write_whole(path, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
