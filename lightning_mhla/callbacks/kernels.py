"""All processes of a run use the same kernels."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from mhla_kernels import agree_on_kernels


class KernelAgreement(Callback):
    """After the first batch of an epoch and after a validation, use no kernel that any process has withdrawn.

    See :func:`mhla_kernels.agree_on_kernels`; with one process there is nothing to agree on.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """All processes train on equally many batches, so that all of them come here."""
        if batch_idx == 0:
            self._agree(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation may use kernels of other sizes."""
        self._agree(trainer)

    def _agree(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:
            agree_on_kernels()
