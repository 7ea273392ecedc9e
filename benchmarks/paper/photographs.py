"""Studies of classification on pieces of photographs, 256 tokens and 16 features per head: learning rate, and accuracy."""

from __future__ import annotations

from pathlib import Path

from mhla_tasks.classification import ImageClassifier

from benchmarks.paper.mnist import KINDS, LONG_KINDS, accuracy_by_epoch, draw_epochs, epochs_table
from benchmarks.paper.rates import peak_rate, rate_section, rate_variants
from benchmarks.paper.runs import ROOT
from benchmarks.paper.study import Row, Study, attention, conditions
from benchmarks.photo_pieces import write_pieces
from lightning_mhla.training.loading import load_module

PIECES = "runs/pieces"
"""Folder of the data, in the folder of the repository."""
CONFIG = "configs/classification/folder.yaml"
EPOCHS = 8
SHOWN_EPOCHS = (2, 4, 6, EPOCHS)
"""Epochs whose held-out accuracy is in the table."""

RATES = dict.fromkeys(LONG_KINDS, (2e-3, 4e-3, 8e-3))
"""Learning rates that are tried, by kind."""
BEST: dict[str, float] = {}
"""Best learning rate of each kind in the study ``photographs-rates``; 4e-3 before that study."""

OPTIONS = (
    "--model.init_args.shape={patch_size: 4, dim: 64, depth: 4, heads: 4, mlp_ratio: 2.0}",
    "--model.init_args.channels=1",
    *attention(block_grid="[8, 8]"),
    f"--data.init_args.train={PIECES}/train",
    f"--data.init_args.val={PIECES}/val",
    "--data.init_args.channels=1",
    "--data.init_args.num_workers=0",
    "--data.init_args.augment={auto_augment: null, color_jitter: 0.0, random_erasing: 0.0, min_scale: 0.5}",
    f"--trainer.max_epochs={EPOCHS}",
)
"""The shipped configuration for folders of images, with the network of the studies of MNIST."""


def prepare() -> None:
    """Make the data of the studies, unless they exist."""
    if not (ROOT / PIECES).exists():
        write_pieces(ROOT / PIECES)


def measure(checkpoint: Path) -> Row:
    """Read the held-out accuracy of a trained classifier after its last epoch and after all, and count its parameters."""
    accuracies = accuracy_by_epoch(checkpoint)
    network = load_module(ImageClassifier, checkpoint).network
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {"accuracy": accuracies[-1], "accuracy_by_epoch": accuracies, "parameters": parameters}


def section(rows: list[Row], folder: Path) -> str:
    """Return the accuracy of each variant after some epochs as a Markdown table, and draw it by epoch.

    Args:
        rows: results of the runs.
        folder: folder of the results page and its pictures.
    """
    draw_epochs(rows, folder / "pictures" / "results-photographs.png")
    picture = f"![Held-out accuracy on pieces of photographs by epoch. {CAPTION}](pictures/results-photographs.png)"
    return f"{epochs_table(rows, SHOWN_EPOCHS)}\n\n{picture}\n\n{conditions(rows)}"


CAPTION = ""
"""Sentences that say what the picture shows."""

STUDIES = (
    Study(
        "photographs-rates",
        "Classification: learning rates for pieces of photographs",
        CONFIG,
        rate_variants(KINDS, RATES, peak_rate),
        measure,
        rate_section("accuracy", 1, 100, RATES),
        OPTIONS,
        setting=(
            "`lightning bench photo_pieces --out runs/pieces` cuts 27 photographs, desktop backgrounds of Debian packages, "
            "into gray pieces of 64 x 64 pixels with equal mean and contrast: 4,320 for training and 1,080 from held-out "
            "regions. The models name the photograph that a piece comes from. They have the network of the sections above, "
            f"256 tokens of 4 x 4 pixels (N / Dk = 16), blocks of 4 tokens, `lepe`, and train for {EPOCHS} epochs with "
            "random crops and mirroring. The table shows held-out accuracy in percent by learning rate. The next section "
            "uses the best rate of each kind."
        ),
        seeds=(0,),
        prepare=prepare,
    ),
    Study(
        "photographs",
        "Classification: photographs in 256 tokens (N / Dk = 16)",
        CONFIG,
        {kind: [*KINDS[kind], *peak_rate(BEST.get(kind, 4e-3))] for kind in RATES},
        measure,
        section,
        OPTIONS,
        setting="The models above, each with its best learning rate and three seeds.",
        reading=(
            "**Predicted before the runs.** The order is that of MNIST, with smaller distances, because a texture is visible "
            "in a few neighboring patches: MHLA with coefficients per head, MHLA and Gated DeltaNet end within two points of "
            "each other at 65 to 75%, softmax three to eight points below them, and linear attention three more below softmax. "
            "Guessing gives 4%."
        ),
        prepare=prepare,
    ),
)
