"""Kinds of attention as language models of Python: trains each, prints a table, writes JSON.

    python -m benchmarks.language --out benchmarks/results

Each is ``lightning fit --config configs/language/stdlib.yaml`` with another attention, everything else equal. What is done
is not done again: a stopped report resumes from the last checkpoint of the model that it was training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from mhla_tasks.language import PythonSource
from mhla_tasks.language.export import load_checkpoint

from benchmarks.runs import report

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
    report(__doc__, CONFIG, VARIANTS, "runs/report-language", "language-stdlib.json", measure, table)


if __name__ == "__main__":
    main()
