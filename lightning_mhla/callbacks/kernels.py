"""All processes of a run use the same kernels."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from mhla_kernels import agree_on_kernels


class KernelAgreement(Callback):
    """Use no kernel that any process has withdrawn.

    The processes agree after the first batch of each epoch or resumed run, and after each validation.

    See :func:`mhla_kernels.agree_on_kernels`; with one process there is nothing to agree on.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """All processes train on equally many batches, so that all of them come here."""
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            self._agree(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation may use kernels of other sizes."""
        self._agree(trainer)

    def _agree(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:
            agree_on_kernels()
