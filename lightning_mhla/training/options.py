"""Options shared by all training modules."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mhla.training.compilation import CompileOptions
from lightning_mhla.training.optim import OptimizerConfig


@dataclass(frozen=True)
class TrainingOptions:
    """Options for training a network: its optimizer, the moving average of its weights, memory use and compilation.

    Args:
        optimizer: AdamW or CAME, and its schedule.
        ema_decay: decay of the moving average of the weights that validation, predictions and samples use; null for none.
        ema_batch: number of samples per step for which the average decays by ema_decay. A step on n samples then decays it by
            ema_decay ** (n / ema_batch). null to decay it by ema_decay at every step.
        checkpointing: whether to recompute blocks in the backward pass, to save memory.
        compile: whether to compile the network, block by block (:func:`torch.compile`).
        compile_options: options of torch.compile; see :class:`lightning_mhla.training.compilation.CompileOptions`.

    Raises:
        ValueError: if ema_decay or ema_batch is out of range.
    """

    optimizer: OptimizerConfig = OptimizerConfig()
    ema_decay: float | None = None
    ema_batch: int | None = None
    checkpointing: bool = False
    compile: bool = False
    compile_options: CompileOptions | None = None

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay} must lie between 0 and 1, or be null for no average")
        if self.ema_batch is not None and self.ema_batch < 1:
            raise ValueError(f"ema_batch={self.ema_batch} must be a number of samples, or null")

    @property
    def compilation(self) -> CompileOptions | None:
        """Options of torch.compile, or None if the network is not compiled."""
        return (self.compile_options or CompileOptions()) if self.compile else None
