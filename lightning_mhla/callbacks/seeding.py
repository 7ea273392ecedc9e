"""Random numbers of a training step as a function of the step, so that a resumed run draws the same."""

from __future__ import annotations

import os
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lightning_mhla.data.module import batches_trained, process_share
from lightning_mhla.data.sampling import seed_step


class StepSeed(Callback):
    """Seeds python's, numpy's and torch's generators before each batch from seed, batch count and rank.

    Dropout, stochastic depth and mixup then need no saved state: nothing is lost with a killed process, on any rank.

    Args:
        seed: None takes that of ``seed_everything``, or 0.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed this process."""
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed
        rank, _ = process_share(trainer)
        seed_step(seed, batches_trained(trainer), rank)
