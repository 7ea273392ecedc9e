"""Studies of classification on pieces of photographs, 256 tokens and 16 features per head: learning rate, and accuracy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mhla_tasks.classification import ImageClassifier

from benchmarks.paper.mnist import KINDS, LONG_KINDS, accuracy_by_epoch, epochs_section
from benchmarks.paper.rates import peak_rate, rate_section, rate_variants
from benchmarks.paper.runs import ROOT
from benchmarks.paper.study import Row, Study, attention
from benchmarks.photo_pieces import write_pieces
from lightning_mhla.training.loading import load_module

PIECES = "runs/pieces"
"""Folder of the data, in the folder of the repository."""
CONFIG = "configs/classification/folder.yaml"
CAPTION = (
    "Held-out accuracy on pieces of photographs by epoch. Gated DeltaNet is ahead from the first epoch on, linear attention "
    "and MHLA are level, and two of three runs of softmax end below all others."
)
EPOCHS = 8
SHOWN_EPOCHS = (2, 4, 6)
"""Epochs whose held-out accuracy is in the table, beside the last one."""

RATES = {
    **dict.fromkeys(LONG_KINDS, (2e-3, 4e-3, 8e-3)),
    **dict.fromkeys(("linear", "mhla"), (2e-3, 4e-3, 8e-3, 1.6e-2)),
}
"""Learning rates that are tried, by kind. A kind whose best rate was the highest one got another, twice as high."""
BEST = {**dict.fromkeys(LONG_KINDS, 4e-3), "linear": 8e-3, "mhla": 8e-3}
"""Learning rate of each kind in the study ``photographs``: the best of ``photographs-rates``."""

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
    """Make the data of the studies, unless they exist.

    Raises:
        SystemExit: if the machine cannot fetch Debian packages.
    """
    if (ROOT / PIECES).exists():
        return
    try:
        write_pieces(ROOT / PIECES)
    except FileNotFoundError as error:
        raise SystemExit(
            f"error: the photographs are in Debian packages: {error}; choose other studies by --only"
        ) from None


def measure(checkpoint: Path) -> Row:
    """Read the held-out accuracy of a trained classifier after its last epoch and after all, and count its parameters."""
    accuracies = accuracy_by_epoch(checkpoint)
    network = load_module(ImageClassifier, checkpoint).network
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {"accuracy": accuracies[-1], "accuracy_by_epoch": accuracies, "parameters": parameters}


STUDIES = (
    Study(
        "photographs-rates",
        "Classification: learning rates for pieces of photographs",
        CONFIG,
        rate_variants(KINDS, RATES, peak_rate),
        measure,
        partial(rate_section, metric="accuracy", digits=1, factor=100, rates=RATES),
        OPTIONS,
        setting=(
            "`lightning bench photo_pieces --out runs/pieces` cuts 27 photographs, desktop backgrounds of Debian packages, "
            "into gray pieces of 64 x 64 pixels with equal mean and contrast: 4,320 for training and 1,080 from held-out "
            "regions. The models name the photograph that a piece comes from. They have the network of the sections above, "
            f"256 tokens of 4 x 4 pixels (N / Dk = 16), blocks of 4 tokens, `lepe`, and train for {EPOCHS} epochs with "
            "random crops and mirroring. The table shows held-out accuracy in percent by learning rate. Linear attention and "
            "MHLA were best at 8e-3, so they were trained at 1.6e-2 too. The next section uses the best rate of each kind."
        ),
        seeds=(0,),
        prepare=prepare,
    ),
    Study(
        "photographs",
        "Classification: photographs in 256 tokens (N / Dk = 16)",
        CONFIG,
        {kind: [*KINDS[kind], *peak_rate(BEST[kind])] for kind in RATES},
        measure,
        partial(epochs_section, name="photographs", caption=CAPTION, shown=SHOWN_EPOCHS),
        OPTIONS,
        setting=(
            "The models above, each with its best learning rate and three seeds. The rows of seed 0 are runs of the search, "
            "which have the same options."
        ),
        reading=(
            "**Predicted before the runs.** The order is that of MNIST, with smaller distances, because a texture is visible "
            "in a few neighboring patches: MHLA with coefficients per head, MHLA and Gated DeltaNet end within two points of "
            "each other at 65 to 75%, softmax three to eight points below them, and linear attention three more below softmax. "
            "Guessing gives 4%.\n\n"
            "**What the figures say.** Most of that was wrong. Gated DeltaNet is at least 12 points ahead of every other "
            "kind, and each of its runs is ahead of each of theirs. Softmax is last on average. Linear attention is level "
            "with MHLA, with or without coefficients per head: mixing the summaries of blocks adds nothing here. Only the "
            "distances between MHLA and softmax, five points, and between the two variants of MHLA are as predicted. All "
            "kinds learn less than predicted.\n\n"
            "**What they do not say.** They do not say which part of Gated DeltaNet helps: it has a short convolution of "
            "queries, keys and values, a gate and a decay, which the other kinds lack, and takes 1.7 to 2.4 times their "
            "processor time. Nor "
            "do they show where the kinds end: accuracy rises until the learning rate is almost zero, so more epochs would "
            "give more. The learning rates were chosen with seed 0, which favors its rows."
        ),
        prepare=prepare,
    ),
)
