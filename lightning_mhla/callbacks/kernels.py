"""Callback by which all processes of a run agree on the fused kernels they use."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from mhla_kernels import agree_on_kernels


class KernelAgreement(Callback):
    """Withdraw on every process the fused kernels that any process has withdrawn; see :func:`mhla_kernels.agree_on_kernels`.

    The processes agree after the first batch of each epoch or resumed run, and after each validation. With one process the
    callback does nothing.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Agree on kernels after the first batch of an epoch. Collective: every process calls this."""
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            self._agree(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree on kernels after validation, which may use different kernels. Collective: every process calls this."""
        self._agree(trainer)

    def _agree(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:
            agree_on_kernels()
