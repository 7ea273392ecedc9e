"""Language: Python's standard library with all kinds, by position too."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from lightning import Trainer
from mhla_tasks.language import PythonSource
from mhla_tasks.language.export import load_checkpoint

from benchmarks.context import losses_by_position
from benchmarks.language import VARIANTS
from benchmarks.paper.study import Row, Study, by_variant, conditions, markdown, spread

OTHERS = ("retention", "gla", "gated_deltanet", "mamba2")
LONG, WINDOWS = 4096, 8
"""Tokens of the longer windows, and how many are read."""


@torch.no_grad()
def measure(checkpoint: Path) -> Row:
    """Held-out bits per byte, and perplexity as long as trained, as long again, and in the last quarter of 4,096 tokens."""
    model = load_checkpoint(checkpoint)
    content = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
    memory = {k: v for k, v in content["datamodule_hyper_parameters"].items() if not k.startswith("_")}
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (found,) = trainer.validate(model, PythonSource(**memory), verbose=False)
    trained = model.context
    source = PythonSource(**{**memory, "context": LONG}).windows("validate")
    windows = [source[index]["tokens"] for index in range(min(WINDOWS, len(source)))]
    losses = losses_by_position(model, windows)
    parts = {"trained": losses[:trained], "again": losses[trained : 2 * trained], "last": losses[-LONG // 4 :]}
    return {
        "bits_per_byte": found["val/bits_per_byte"],
        "perplexity": found["val/perplexity"],
        **{f"perplexity_{name}": math.exp(float(part.mean())) for name, part in parts.items()},
        "parameters": sum(p.numel() for p in model.network.parameters()),
    }


def section(rows: list[Row], folder: Path) -> str:
    """One table."""
    keys = {"bits_per_byte": 3, "perplexity": 2, "perplexity_trained": 2, "perplexity_again": 2, "perplexity_last": 2}
    header = ["attention", "bits per byte", "perplexity", "tokens 1 to 512 of 4,096", "513 to 1,024", "3,073 to 4,096"]
    lines = [
        [f"`{name}`", *(spread([row[key] for row in each], digits) for key, digits in keys.items())]
        for name, each in by_variant(rows).items()
    ]
    return f"{markdown(header, lines)}\n\n{conditions(rows)}"


def options(attention: dict[str, object]) -> list[str]:
    """Options of ``lightning fit``."""
    return [f"--model.init_args.attention.{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in attention.items()]  # fmt: skip


STUDIES = (
    Study(
        "stdlib",
        "Language: Python's standard library",
        "configs/language/stdlib.yaml",
        {
            **{name: options(attention) for name, attention in VARIANTS.items()},
            **{kind: options({"kind": kind}) for kind in OTHERS},
        },
        measure,
        section,
    ),
)
