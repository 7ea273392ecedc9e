"""Exponential moving average of the weights, through Lightning's callback."""

from __future__ import annotations

import warnings

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy


class ExponentialMovingAverage(EMAWeightAveraging):
    """Lightning's EMA, updated after each optimiser step (and so after mixing coefficients are clipped).

    Validation and the checkpoint's ``state_dict`` use the average; ``current_model_state`` holds the live weights.
    Buffers are copied, not averaged: an average of index tables would be rounded down.

    Args:
        decay: share of the old average that is kept at each step.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(decay=decay, use_buffers=False)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See Lightning.

        Raises:
            ValueError: under a strategy that shards the weights.
        """
        if isinstance(trainer.strategy, ModelParallelStrategy | FSDPStrategy):
            raise ValueError(
                f"the weight average cannot be kept under {type(trainer.strategy).__name__}, which shards the weights; "
                "set --model.init_args.ema_decay=null (configs/trainer/fsdp.yaml does)"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*overrides the configure_model.*")
            super().setup(trainer, pl_module, stage)
