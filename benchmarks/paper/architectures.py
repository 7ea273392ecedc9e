"""Studies of two more architectures of the paper, at small size: VLT (classification) and DiG (class-to-image) on MNIST."""

from __future__ import annotations

from pathlib import Path

import torch
from mhla_tasks.classification import ImageClassifier, Mnist

from benchmarks.paper import images
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
def measure_vlt(checkpoint: Path) -> Row:
    """Measure accuracy and loss of a trained VLT on the held-out digits, and count its parameters."""
    module = load_module(ImageClassifier, checkpoint)
    metrics = validated(module, Mnist(**remembered(checkpoint)))
    parameters = sum(parameter.numel() for parameter in module.network.parameters())
    return {"accuracy": metrics["accuracy"], "loss": metrics["loss"], "parameters": parameters}


def vlt_section(rows: list[Row], folder: Path) -> str:
    """Return the results of the VLT study as a Markdown table.

    Args:
        rows: results of the runs.
        folder: folder of the results page.
    """
    lines = [
        [
            f"`{name}`",
            spread([row["accuracy"] for row in runs], 1, 100),
            spread([row["loss"] for row in runs], 3),
            f"{runs[0]['parameters']:,}",
        ]
        for name, runs in by_variant(rows).items()
    ]
    header = ["attention of both stages", "accuracy, %", "held-out loss", "parameters"]
    return f"{markdown(header, lines)}\n\n{conditions(rows)}"


def dig(**options: str) -> list[str]:
    """Return options of the model DiG as arguments of ``lightning fit``."""
    return [f"--model.init_args.dig.{name}={value}" for name, value in options.items()]


VLT_PRINTED = """\
| ImageNet-1K, 224 pixels, top-1, % | RAVLT | MAViT | MHLA-VLT |
| --- | ---: | ---: | ---: |
| T (2.4 to 2.5 GFLOP) | 82.3 | 82.4 | 82.6 |
| S (4.6 GFLOP) | | 84.3 | 84.6 |

RAVLT and MAViT are from the paper's own runs; their repositories report 82.8 (RAVLT-T), 84.4 (RAVLT-S) and 84.7 (MAViT-S)."""

DIG_PRINTED = """\
| DiG-S/2, ImageNet 256, FID without guidance | causal only | two directions | four directions | MHLA |
| --- | ---: | ---: | ---: | ---: |
| 400,000 steps | 175.84 | 69.28 | 62.06 | 59.49 |

The columns of GLA are those of the DiG paper (arXiv 2405.18428, ablation); the first two are without the convolutions."""

STUDIES = (
    Study(
        "mnist-vlt",
        "VLT: MNIST in two stages of 196 and 49 tokens",
        "configs/classification/mnist_vlt.yaml",
        {kind: attention(kind=kind) for kind in ("softmax", "linear", "rala", "mala", "mhla")},
        measure_vlt,
        vlt_section,
        setting=(
            "The model is a small VLT with stages of width 32 and 64, two blocks each, and with 16 features per head, "
            "rotary positions, `lepe` of 5 x 5 and gate for all kinds. MHLA has 7 x 7 and 4 x 4 blocks (uneven ones in "
            "the second stage). Training takes 6 epochs of 4,000 digits."
        ),
        reading=(
            "**What the figures say.** All five kinds are within 0.6 points of each other, as far as seeds of one kind "
            "are: with convolutions in each block and rotary positions, the digits do not need what distinguishes the kinds "
            "at 196 tokens above. "
            "**What they do not say.** They say nothing about ImageNet, where the paper's own runs differ by 0.3 "
            "points."
        ),
        printed=VLT_PRINTED,
        full=(
            "configs/classification/vlt_t_imagenet.yaml",
            "configs/classification/ravlt_t_imagenet.yaml",
            "configs/classification/vlt_s_imagenet.yaml",
        ),
    ),
    Study(
        "mnist-dig",
        "DiG: scan directions, MNIST's pixels in 196 tokens",
        "configs/diffusion/mnist_dig.yaml",
        {
            "gla, one direction, no convolution": dig(directions="one", local="false"),
            "gla, two directions, no convolution": dig(directions="two", local="false"),
            "gla, four directions": [],
            "mhla, 49 blocks": [
                *attention(kind="mhla", block_grid="[7,7]"),
                *dig(causal="false", directions="one"),
            ],
        },
        images.measure,
        images.section,
        ("--trainer.max_epochs=4",),
        setting=(
            "A DiG with 4 layers of width 64, 4 heads, keys of 8 and values of 16 features trains for 500 steps of 32 "
            "images. FID compares 1,000 samples without guidance with the training images, in features of a classifier "
            "of these digits. The last column is measured on 500 samples with guidance 2. The last two variants have "
            "the convolution after each block."
        ),
        reading=(
            "**What the figures say.** The order is that of the paper: one direction is worst, two are better, and "
            "four with the convolution halve the FID of one. MHLA, which attends to all tokens at once and needs no "
            "change of direction, is ahead of four directions with every seed, by 7 points on average, and it has no "
            "recurrence.\n\n"
            "**What they do not say.** They do not show how much of the last step is due to the convolution, which the "
            "first two variants lack, as in the paper's ablation. Also, 500 steps compare only what is learned early."
        ),
        printed=DIG_PRINTED,
        full=("configs/diffusion/dig_s2_256.yaml", "configs/diffusion/dig_s2_256_mhla.yaml"),
    ),
)
