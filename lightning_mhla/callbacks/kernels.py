"""Callback that makes all processes of a run use the same Triton kernels."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from mhla_kernels import agree_on_kernels


class KernelAgreement(Callback):
    """Callback that makes all processes stop using a Triton kernel once any process has stopped using it.

    If a kernel fails, a process stops using it, and computes the same results with PyTorch instead. The processes exchange the
    names of these kernels after the first batch of each epoch, after the first batch of a resumed run, and after each
    validation. With a single process, the callback does nothing.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop using each Triton kernel that any process has stopped using.

        The method does this only after the first batch of an epoch or of a resumed run.
        """
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            self._agree(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop using each Triton kernel that any process has stopped using, at the end of a validation.

        Validation may use different kernels from training.
        """
        self._agree(trainer)

    def _agree(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:
            agree_on_kernels()
