"""Video: a softmax Wan on moving digits of MNIST, its attention replaced and fine-tuned; 392 tokens, N / Dk = 49."""

from __future__ import annotations

from pathlib import Path

import torch
from mhla_tasks.video import MovingMnist, VideoDiffusion

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
from lightning_mhla.training.loading import load_module


@torch.no_grad()
def measure(checkpoint: Path) -> Row:
    """Held-out loss, of the weights' average."""
    steps = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)["global_step"]
    torch.manual_seed(0)
    found = validated(load_module(VideoDiffusion, checkpoint), MovingMnist(**remembered(checkpoint)))
    return {"loss": found["loss"], "steps": steps}


def section(rows: list[Row], folder: Path) -> str:
    """One table."""
    lines = [
        [f"`{name}`", spread([row["loss"] for row in each], 4), str(each[0]["steps"])]
        for name, each in by_variant(rows).items()
    ]
    return f"{markdown(['attention', 'held-out loss', 'steps'], lines)}\n\n{conditions(rows)}"


PRETRAIN = Study(
    "video-pretrain",
    "Video: the softmax model that is fine-tuned below",
    "configs/video/mnist_pretrain.yaml",
    {"softmax": []},
    measure,
    section,
)

MHLA = {
    "mhla, 16 blocks": {"block_grid": "[4,2,2]"},
    "mhla, 72 blocks": {"block_grid": "[8,3,3]"},
    "mhla, 16 blocks, uniform start": {"block_grid": "[4,2,2]", "mixing_init": "uniform"},
    "mhla, 16 blocks, per head": {"block_grid": "[4,2,2]", "mixing_per_head": "true"},
}

STUDIES = (
    PRETRAIN,
    Study(
        "video",
        "Video: attention replaced and fine-tuned (N / Dk = 49)",
        "configs/video/mnist_finetune.yaml",
        {
            "softmax": attention(kind="softmax"),
            "linear": attention(kind="linear"),
            **{name: attention(kind="mhla", **options) for name, options in MHLA.items()},
            **{kind: attention(kind=kind) for kind in ("retention", "gla", "gated_deltanet")},
        },
        measure,
        section,
        ("--model.init_args.pretrained={pretrained}",),
        (PRETRAIN, "softmax"),
    ),
)
