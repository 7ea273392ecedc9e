"""Exponential moving average of the weights, through Lightning's callback."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_mhla.strategies import shards_weights


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
        if shards_weights(trainer):
            raise ValueError(
                f"the weight average cannot be kept under {type(trainer.strategy).__name__}, which shards the weights; "
                "set --model.init_args.ema_decay=null (configs/trainer/fsdp.yaml does)"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*overrides the configure_model.*")
            super().setup(trainer, pl_module, stage)

    @contextmanager
    def average_weights(self, pl_module: LightningModule) -> Iterator[None]:
        """Inside, the module has the averaged weights; afterwards its own again."""
        self._swap_models(pl_module)
        try:
            yield
        finally:
            self._swap_models(pl_module)


@contextmanager
def evaluation_weights(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Inside, the module is in evaluation mode and has the averaged weights, if the run keeps an average."""
    average = next((each for each in trainer.callbacks if isinstance(each, ExponentialMovingAverage)), None)  # type: ignore[attr-defined]
    training = pl_module.training
    pl_module.eval()
    try:
        with average.average_weights(pl_module) if average is not None else nullcontext():
            yield
    finally:
        pl_module.train(training)
