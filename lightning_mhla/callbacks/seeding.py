"""Seeding of each training step from its number, so that a resumed run draws the same random numbers."""

from __future__ import annotations

import os
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lightning_mhla.data.module import batches_trained, process_share
from lightning_mhla.data.sampling import seed_step


class StepSeed(Callback):
    """Seed the random generators of Python, NumPy and torch before each batch, from seed, number of batches and rank.

    Dropout, stochastic depth and mixup then need no saved state of the generators, and a resumed run draws the same numbers.

    Args:
        seed: the seed; None for that of ``seed_everything``, or 0 if there is none.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed the random generators of this process for the batch."""
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed
        rank, _ = process_share(trainer)
        seed_step(seed, batches_trained(trainer), rank)
