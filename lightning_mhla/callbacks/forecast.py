"""Callback that prints how much memory a run needs, and later how long it will take."""

from __future__ import annotations

import math
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_mhla.callbacks.averaging import ExponentialMovingAverage
from lightning_mhla.system.numbers import duration, rounded
from lightning_mhla.system.sharding import is_shard
from lightning_mhla.system.steps import steps_of_epochs, steps_of_run

GIB = 1 << 30


class Forecast(Callback):
    """Callback that prints the model size, memory needs and length of a run, and later its speed and remaining time.

    The first lines appear when training starts: the number of parameters, the memory per device and the number of steps.

    Args:
        warm_up_steps: number of optimizer steps before the speed is measured.
        measured_steps: number of optimizer steps over which the speed is measured.

    Raises:
        ValueError: if ``warm_up_steps`` is negative, or ``measured_steps`` is less than 1.
    """

    def __init__(self, warm_up_steps: int = 5, measured_steps: int = 20) -> None:
        if warm_up_steps < 0 or measured_steps < 1:
            raise ValueError(
                f"warm_up_steps={warm_up_steps} must be at least 0, and measured_steps={measured_steps} at least 1"
            )
        self.warm_up_steps, self.measured_steps = warm_up_steps, measured_steps
        self._paused = 0.0  # never reset: the speed depends only on differences

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the number of parameters, the estimated memory per device and the number of steps."""
        self._first = trainer.global_step
        self._clock: float | None = None
        self._said = False
        if trainer.is_global_zero:
            averages = any(isinstance(callback, ExponentialMovingAverage) for callback in trainer.callbacks)  # type: ignore[attr-defined]
            optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
            lines = [needs(pl_module, averages, trainer.world_size, optimizer), _steps(trainer)]
            Console(soft_wrap=True, highlight=False, stderr=True).print("\n".join(lines))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause the measurement of the training speed during validation."""
        self._stopped = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume the measurement of the training speed after validation."""
        if not trainer.sanity_checking:
            self._paused += time.monotonic() - self._stopped

    def exclude(self, seconds: float) -> None:
        """Exclude the duration of a periodic evaluation, in seconds, from the measurement of the training speed."""
        self._paused += seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Print the speed and the remaining time once, as soon as the speed has been measured."""
        # Optimizer steps, not batches: under gradient accumulation several batches end at the same step.
        done = trainer.global_step - self._first
        if self._said or done < self.warm_up_steps:
            return
        now = time.monotonic() - self._paused
        if self._clock is None:
            self._clock, self._clock_step = now, done
        elif done >= self._clock_step + self.measured_steps:
            self._said = True
            if trainer.is_global_zero:
                self._print((now - self._clock) / (done - self._clock_step), trainer)

    def _print(self, step_seconds: float, trainer: Trainer) -> None:
        """Print the measured time per optimizer step, and the estimated remaining time.

        Args:
            step_seconds: seconds per optimizer step.
            trainer: trainer of the run.
        """
        remaining_steps = steps_of_run(trainer) - trainer.global_step
        remaining_text = (
            f", {duration(step_seconds * remaining_steps)} remaining, without validation"
            if math.isfinite(remaining_steps)
            else ""
        )
        text = (
            f"{rounded(step_seconds)} s per step{remaining_text}"
            if step_seconds >= 1
            else f"{rounded(1 / max(step_seconds, 1e-9))} steps per second{remaining_text}"
        )
        Console(soft_wrap=True, highlight=False, stderr=True).print(text)


def needs(module: nn.Module, averages: bool, processes: int, optimizer: Optimizer | None = None) -> str:
    """Describe in one line how many parameters a module has, and how much memory its training needs per device.

    The memory includes weights, gradients, the state of a known optimizer (Adam, AdamW, CAME or SGD) and the moving average of
    the weights, but not activations.

    Args:
        module: module with full or sharded parameters.
        averages: whether a moving average of the trained weights is kept.
        processes: number of training processes, which the description mentions.
        optimizer: optimizer of the run. If None, the kind in the module's ``optimizer_config`` is used, AdamW or CAME. Without
            such a configuration, the state of the optimizer is not counted.

    Returns:
        The description, as one line of text.
    """
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    local = sum(_local_bytes(parameter) for parameter in parameters)
    trained_bytes = sum(_local_bytes(parameter) for parameter in trained)
    config = getattr(module, "optimizer_config", None)
    name, moments = _moments(optimizer)
    factored = config is not None and config.kind == "came"
    if factored or (config is not None and optimizer is None):
        name, moments = ("CAME" if factored else "AdamW"), 2
    total = local + trained_bytes * (1 + moments)
    if averages:  # in float32 at least
        total += sum(_local_bytes(parameter) * max(1, 4 // parameter.element_size()) for parameter in trained)
    if factored:  # CAME stores one moment of a matrix, and only row and column statistics of the other
        total -= sum(_local_bytes(parameter) for parameter in trained if parameter.ndim == 2)
    parts = "weights, gradients" + (f", {name}" if name else "") + (", average" if averages else "")
    count = sum(parameter.numel() for parameter in trained)
    return (
        f"{_short(sum(p.numel() for p in parameters))} parameters, {_short(count)} of them trained, on {processes} "
        f"{'process' if processes == 1 else 'processes'}: {_memory(total)} each for {parts}; "
        f"{'' if name else 'the state of the optimizer and '}activations are not included"
    )


def _moments(optimizer: Optimizer | None) -> tuple[str, int]:
    """Return the name of an optimizer and how many numbers it keeps for each weight; an empty name and 0 if unknown."""
    if isinstance(optimizer, Adam | AdamW):
        return type(optimizer).__name__, 2 + any(group["amsgrad"] for group in optimizer.param_groups)
    if isinstance(optimizer, SGD):
        return type(optimizer).__name__, int(any(group["momentum"] for group in optimizer.param_groups))
    return "", 0


def _memory(count: int) -> str:
    return f"{rounded(count / GIB)} GiB" if count >= GIB else f"{rounded(count / (1 << 20))} MiB"


def _local_bytes(parameter: nn.Parameter) -> int:
    local = parameter.to_local() if is_shard(parameter) else parameter
    return local.numel() * local.element_size()


def _steps(trainer: Trainer) -> str:
    steps, epoch_steps = steps_of_run(trainer), steps_of_epochs(trainer, 1)
    epoch = f"{int(epoch_steps):,} steps per epoch" if math.isfinite(epoch_steps) else "no epochs"
    end = f"{int(steps):,} in all" if math.isfinite(steps) else "without an end"
    done = f", {trainer.global_step:,} done" if trainer.global_step else ""
    return f"{epoch}, {end}{done}"


def _short(count: int) -> str:
    for size, sign in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{rounded(count / size)}{sign}"
    return str(count)
