"""Language: Python's standard library with all kinds, by position too."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from mhla_tasks.language import PythonSource
from mhla_tasks.language.export import load_checkpoint

from benchmarks.context import losses_by_position
from benchmarks.language import VARIANTS
from benchmarks.paper.study import (
    Row,
    Study,
    attention,
    by_variant,
    conditions,
    markdown,
    remembered,
    spread,
    validated,
)

OTHERS = ("retention", "gla", "gated_deltanet", "mamba2")
LONG, WINDOWS = 4096, 8
"""Tokens of the longer windows, and how many are read."""


@torch.no_grad()
def measure(checkpoint: Path) -> Row:
    """Held-out bits per byte, and perplexity as long as trained, as long again, and in the last quarter of 4,096 tokens."""
    model = load_checkpoint(checkpoint)
    memory = remembered(checkpoint)
    found = validated(model, PythonSource(**memory))
    trained = model.context
    source = PythonSource(**{**memory, "context": LONG}).windows("validate")
    windows = [source[index]["tokens"] for index in range(min(WINDOWS, len(source)))]
    losses = losses_by_position(model, windows)
    parts = {"trained": losses[:trained], "again": losses[trained : 2 * trained], "last": losses[-LONG // 4 :]}
    return {
        "bits_per_byte": found["bits_per_byte"],
        "perplexity": found["perplexity"],
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


STUDIES = (
    Study(
        "stdlib",
        "Language: Python's standard library",
        "configs/language/stdlib.yaml",
        {
            **{name: attention(**options) for name, options in VARIANTS.items()},
            **{kind: attention(kind=kind) for kind in OTHERS},
        },
        measure,
        section,
    ),
)
