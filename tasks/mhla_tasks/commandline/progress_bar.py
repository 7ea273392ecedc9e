"""Progress bar of the commands, which ends at the last batch that training uses in the current epoch."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from typing_extensions import override


class EpochBar(RichProgressBar):
    """Progress bar of an epoch, which is also correct if a run resumes within an epoch or stops within one.

    The total is the number of batches in the epoch. In the epoch in which ``max_steps`` ends the run, it is the number of
    batches up to that step. The description omits the number of epochs if only ``max_steps`` limits training.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first_batch = 0  # of the current epoch in this process

    @property
    @override
    def total_train_batches(self) -> int | float:
        # Lightning's own total subtracts optimizer steps from a number of batches, and counts from a resumed step.
        trainer = self.trainer
        batches = trainer.num_training_batches
        if trainer.max_steps == -1:
            return batches
        every = trainer.accumulate_grad_batches
        accumulated = self._first_batch // every + trainer.max_steps - trainer.global_step
        return max(self._first_batch, min(batches, accumulated * every))

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_batch = 0
        super().on_train_epoch_start(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Create the bar of an epoch that an earlier process began, because Lightning calls no epoch hook in this case."""
        if self.is_enabled and self.train_progress_bar_id is None:
            self._first_batch = batch_idx
            super().on_train_epoch_start(trainer, pl_module)
            assert self.progress is not None
            assert self.train_progress_bar_id is not None
            # A reset also forgets the time of the batches of the earlier process, which took no time in this one.
            self.progress.reset(self.train_progress_bar_id, completed=batch_idx)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _get_train_description(self, current_epoch: int) -> str:
        limit = self.trainer.max_epochs
        return f"Epoch {current_epoch}" if limit in (None, -1) else super()._get_train_description(current_epoch)
