"""Callback that keeps an exponential moving average of a model's weights, sharded if the weights are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_mhla.checkpoints.weights import LIVE, load_weights
from lightning_mhla.system.modes import evaluation_mode
from lightning_mhla.system.sharding import is_shard, is_sharded_module
from lightning_mhla.system.torch_private import foreach_add_, foreach_copy_, foreach_mul_


class ExponentialMovingAverage(Callback):
    """Callback that keeps an exponential moving average of the weights, updated after each optimizer step.

    Validation uses the average. In a checkpoint, ``state_dict`` holds the average and ``current_model_state`` the trained
    weights. These keys are the same as in checkpoints of Lightning's ``EMAWeightAveraging``, which copies the module and
    therefore does not support sharded weights. Under FSDP2, each process averages its own shards. Buffers and frozen weights
    are not averaged; weights that a callback unfreezes are averaged from then on. The average of weights in half precision is
    kept in float32, in which small updates are not rounded away.

    Args:
        decay: weight of the previous average in each update, a number between 0 and 1. It may also be a function without
            arguments, which is called at each update and returns the number.

    Raises:
        ValueError: if ``decay`` is a number below 0 or above 1.
    """

    def __init__(self, decay: float | Callable[[], float]) -> None:
        if not callable(decay) and not 0 <= decay <= 1:
            raise ValueError(f"decay={decay} must be a number from 0 to 1")
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._updated = 0
        self._steps = 0
        self._trained: list[Tensor] | None = None
        """Copies of the trained weights while the module has their average, and None otherwise."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Discard the moving average that an earlier fit with this callback left behind."""
        self._average, self._updated, self._steps, self._trained = {}, 0, 0, None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Initialize the average with a copy of the current weights, unless a checkpoint supplied the average."""
        if not self._average:
            self._average = _copies(pl_module)
        weights = dict(pl_module.named_parameters())
        # The average may come from a checkpoint that Lightning loaded before it moved the module to its device.
        self._average = {name: tensor.to(weights[name].device) for name, tensor in self._average.items()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Update the average if the batch completed an optimizer step."""
        if trainer.global_step <= self._updated:  # a batch that only accumulates gradients
            return
        self._updated = trainer.global_step
        # Parts that were frozen at the start, which a callback such as BackboneFinetuning trains later.
        thawed = {name: p for name, p in pl_module.named_parameters() if p.requires_grad and name not in self._average}
        self._average |= {name: _exact(parameter.detach()) for name, parameter in thawed.items()}
        averages, weights = self._pairs(pl_module)
        if self._steps:
            decay = self.decay() if callable(self.decay) else self.decay
            foreach_mul_(averages, decay)
            foreach_add_(averages, weights, alpha=1 - decay)
        else:  # the first step replaces the untrained weights, which would otherwise stay in the average
            foreach_copy_(averages, weights)
        self._steps += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the module's weights with their average at the end of training."""
        averages, weights = self._pairs(pl_module)
        foreach_copy_(weights, averages)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the weights with their average, also in a fit that resumed after the end of training.

        Lightning does not call :meth:`on_train_end` in such a fit.
        """
        self.on_train_end(trainer, pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module the average of its weights, so that validation uses the average."""
        self._use_average(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the trained weights after validation."""
        self._use_trained(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the trained weights if an exception interrupted a validation, before other callbacks save a checkpoint."""
        self._use_trained(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a dict with ``latest_update_step``, the optimizer step of the last update."""
        return {"latest_update_step": self._updated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the saved optimizer step at which the average was last updated."""
        self._updated = state_dict["latest_update_step"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the average to the checkpoint's ``state_dict`` and the trained weights to ``current_model_state``.

        Every process must call this method, because sharded weights may have to be gathered to full tensors.
        """
        if not self._average:
            return
        live = checkpoint["state_dict"]
        # A sharded checkpoint holds DTensors; a full one was gathered already, so the average has to be gathered too.
        shards = any(is_shard(value) for value in live.values())
        averages = {name: value if shards else _whole(value) for name, value in self._average.items()}
        # state_dict lists a shared parameter under each of its names, the average only under the first.
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        shared = {name: names[id(p)] for name, p in pl_module.named_parameters(remove_duplicate=False)}
        checkpoint["state_dict"] = {name: averages.get(shared.get(name, name), value) for name, value in live.items()}
        checkpoint[LIVE] = live
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._steps)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the average and the trained weights when a fit resumes.

        When Lightning calls this method, it has already loaded the averaged weights from ``state_dict`` into the module. This
        method copies them, and then loads the trained weights into the module.
        """
        if trainer.state.fn != "fit":
            return
        self._average = _copies(pl_module, _averaged_names(checkpoint))
        # The module holds rounded averages if its weights have half precision; those in the checkpoint are exact.
        saved = checkpoint.get("state_dict") or {}
        for name, average in self._average.items():
            if name in saved and average.dtype == saved[name].dtype and is_shard(average) == is_shard(saved[name]):
                average.copy_(saved[name])
        if LIVE in checkpoint:
            self._steps = int(checkpoint["averaging_state"]["n_averaged"])
            load_weights(pl_module, checkpoint[LIVE])

    @contextmanager
    def average_weights(self, pl_module: LightningModule) -> Iterator[None]:
        """Context manager in which the module has the averaged weights. On exit, its trained weights are restored.

        Inside a validation, in which the module has the averaged weights already, entry and exit change nothing.
        """
        if self._trained is not None:  # inside a validation, which restores them
            yield
            return
        self._use_average(pl_module)
        try:
            yield
        finally:
            self._use_trained(pl_module)

    def _use_average(self, pl_module: LightningModule) -> None:
        if self._average and self._trained is None:
            averages, weights = self._pairs(pl_module)
            self._trained = [tensor.clone() for tensor in weights]
            foreach_copy_(weights, averages)

    def _use_trained(self, pl_module: LightningModule) -> None:
        if self._trained is not None:
            foreach_copy_(self._pairs(pl_module)[1], self._trained)
            self._trained = None

    def _pairs(self, pl_module: LightningModule) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averaged weights and the module's current weights, as two lists of tensors in the same order.

        For sharded tensors, the lists contain only the shards of this process.
        """
        _reshard(pl_module)
        weights = dict(pl_module.named_parameters())
        averages = [_local(tensor) for tensor in self._average.values()]
        return averages, [_local(weights[name].detach()) for name in self._average]


def _copies(pl_module: LightningModule, names: Collection[str] = ()) -> dict[str, Tensor]:
    """Return copies, by name, of the weights that require gradients and of those whose names are in ``names``.

    The copies of weights in half precision are float32.
    """
    _reshard(pl_module)
    return {name: _exact(p.detach()) for name, p in pl_module.named_parameters() if p.requires_grad or name in names}


def _averaged_names(checkpoint: dict[str, Any]) -> set[str]:
    """Return the names of the unsharded weights in a checkpoint whose average differs from their trained value.

    Such weights have been averaged, so their average has to be restored even if they are frozen when the run resumes.
    """
    averages, trained = checkpoint.get("state_dict") or {}, checkpoint.get(LIVE) or {}
    both = {name: (averages[name], trained[name]) for name in trained if name in averages}
    return {
        name
        for name, (average, weight) in both.items()
        if not is_shard(average) and not is_shard(weight) and not torch.equal(average.to(weight.dtype), weight)
    }


def _exact(weight: Tensor) -> Tensor:
    """Return a copy of a weight, in float32 if the weight has half precision.

    With a decay of 0.999, most updates of the average are smaller than the spacing of bfloat16 numbers, so that an average in
    bfloat16 would hardly ever change.
    """
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight.clone()


def _reshard(pl_module: LightningModule) -> None:
    """Free the full parameters that FSDP2 keeps after a forward pass without a backward pass, so that only shards remain."""
    for module in pl_module.modules():
        if is_sharded_module(module):
            module.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_shard(tensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().cpu() if is_shard(tensor) else tensor


@contextmanager
def evaluation_weights(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Context manager that puts a module in evaluation mode, with averaged weights if the trainer has them.

    The averaged weights come from an :class:`ExponentialMovingAverage` callback of the trainer. On exit, the trained weights
    and the previous mode of each submodule are restored.

    Args:
        trainer: trainer whose callbacks are searched.
        pl_module: module to evaluate.
    """
    average = next((callback for callback in trainer.callbacks if isinstance(callback, ExponentialMovingAverage)), None)  # type: ignore[attr-defined]
    with evaluation_mode(pl_module), average.average_weights(pl_module) if average is not None else nullcontext():
        yield
