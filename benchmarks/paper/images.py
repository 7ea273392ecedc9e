"""Class-to-image: MNIST's pixels in 196 tokens, FID by attention."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.diffusion import logged
from benchmarks.paper.mnist import KINDS
from benchmarks.paper.study import Row, Study, attention, by_variant, conditions, markdown, spread

CONFIG = "configs/diffusion/mnist.yaml"
PLAIN = attention(lepe=0, gate="false")


def measure(checkpoint: Path) -> Row:
    """Figures that GenerationMetrics logged last: FID without guidance, and how often guided samples show their class."""
    logs = checkpoint.parents[2]
    content = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
    plain, guided = (logged(logs, name)[-1] for name in ("generation", "guided"))
    if {plain["step"], guided["step"]} != {content["global_step"]}:
        raise SystemExit(f"error: the last evaluation in {logs} is not of the last step; delete the folder")
    return {
        "fid": plain["fid"],
        "precision": plain["precision"],
        "recall": plain["recall"],
        "guided_label_accuracy": guided["label_accuracy"],
        "steps": content["global_step"],
        "parameters": sum(t.numel() for key, t in content["state_dict"].items() if key.startswith("network.")),
    }


def section(rows: list[Row], folder: Path) -> str:
    """One table."""
    header = ["attention", "FID", "precision, %", "recall, %", "guided samples that show their class, %"]
    lines = [
        [
            f"`{name}`",
            spread([row["fid"] for row in each], 2),
            *(spread([row[key] for row in each], 1, 100) for key in ("precision", "recall", "guided_label_accuracy")),
        ]
        for name, each in by_variant(rows).items()
    ]
    return f"{markdown(header, lines)}\n\n{conditions(rows)}"


STUDIES = (
    Study(
        "mnist-images",
        "Class-to-image: MNIST's pixels in 196 tokens (N / Dk = 12)",
        CONFIG,
        {
            **{name: [*KINDS[name], *PLAIN] for name in ("softmax", "linear", "mhla", "mhla, exponential")},
            **{f"{name} + lepe + gate": KINDS[name] for name in ("softmax", "linear", "mhla")},
            **{name: [*KINDS[name], *PLAIN] for name in ("retention", "gla", "gated_deltanet")},
        },
        measure,
        section,
    ),
)
