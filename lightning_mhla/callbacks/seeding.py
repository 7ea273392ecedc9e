"""Callback that seeds the random generators before each batch, so that a resumed run draws the same random numbers."""

from __future__ import annotations

import os
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lightning_mhla.data.module import batches_trained, process_share
from lightning_mhla.data.sampling import seed_step


class StepSeed(Callback):
    """Callback that seeds the random generators of Python, NumPy and torch before each batch.

    The seed of a batch is computed from the run's seed, the number of batches so far and the rank. A resumed run therefore
    draws the same random numbers for dropout, stochastic depth and mixup, although checkpoints hold no generator states.

    Args:
        seed: seed of the run; None for the seed that ``seed_everything`` has set, or 0 if it has not been called.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed the random generators of this process for the batch."""
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed
        rank, _ = process_share(trainer)
        seed_step(seed, batches_trained(trainer), rank)
