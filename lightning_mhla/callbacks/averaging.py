"""Exponential moving average of the weights, sharded where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_mhla.checkpoints.weights import LIVE, load_weights
from lightning_mhla.system.sharding import is_shard, is_sharded_module
from lightning_mhla.system.torch_private import foreach_add_, foreach_copy_, foreach_mul_


class ExponentialMovingAverage(Callback):
    """Average the trained weights after each optimiser step.

    Validation and the checkpoint's ``state_dict`` use the average; ``current_model_state`` holds the weights as they are
    trained. Under FSDP2 every process averages its own share. The names in the checkpoint are those of Lightning's
    ``EMAWeightAveraging``, which copies the module and so refuses sharded weights; buffers are not averaged.

    Args:
        decay: share of the old average that is kept at each step; or a function that returns it, called at each step.
    """

    def __init__(self, decay: float | Callable[[], float]) -> None:
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._updated = 0
        self._steps = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the average of an earlier fit: outside of one, weights are what was loaded."""
        self._average, self._updated, self._steps = {}, 0, 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the weights as they are, unless a checkpoint brought an average."""
        if not self._average:
            self._average = _copies(pl_module)
        weights = dict(pl_module.named_parameters())
        self._average = {name: tensor.to(weights[name].device) for name, tensor in self._average.items()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Update the average, if the optimiser made a step."""
        if trainer.global_step <= self._updated:
            return
        self._updated = trainer.global_step
        ours, theirs = self._pairs(pl_module)
        if self._steps:
            decay = self.decay() if callable(self.decay) else self.decay
            foreach_mul_(ours, decay)
            foreach_add_(ours, theirs, alpha=1 - decay)
        else:
            foreach_copy_(ours, theirs)
        self._steps += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module."""
        ours, theirs = self._pairs(pl_module)
        foreach_copy_(theirs, ours)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the average."""
        self._swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train on with the weights."""
        self._swap(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The step of the last update."""
        return {"latest_update_step": self._updated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The step of the last update."""
        self._updated = state_dict["latest_update_step"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the average in ``state_dict``, and the weights beside it; whole tensors where the strategy saves those."""
        if not self._average:
            return
        live = checkpoint["state_dict"]
        shards = any(is_shard(value) for value in live.values())
        whole = {name: value if shards else _whole(value) for name, value in self._average.items()}
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        shared = {name: names[id(p)] for name, p in pl_module.named_parameters(remove_duplicate=False)}
        checkpoint["state_dict"] = {name: whole.get(shared.get(name, name), value) for name, value in live.items()}
        checkpoint[LIVE] = live
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._steps)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the average from the module, which has been given ``state_dict``, and give it the weights."""
        if trainer.state.fn != "fit":
            return
        self._average = _copies(pl_module)
        if LIVE in checkpoint:
            self._steps = int(checkpoint["averaging_state"]["n_averaged"])
            load_weights(pl_module, checkpoint[LIVE])

    @contextmanager
    def average_weights(self, pl_module: LightningModule) -> Iterator[None]:
        """Inside, the module has the averaged weights; afterwards its own again."""
        self._swap(pl_module)
        try:
            yield
        finally:
            self._swap(pl_module)

    def _swap(self, pl_module: LightningModule) -> None:
        if self._average:
            ours, theirs = self._pairs(pl_module)
            kept = [tensor.clone() for tensor in ours]
            foreach_copy_(ours, theirs)
            foreach_copy_(theirs, kept)

    def _pairs(self, pl_module: LightningModule) -> tuple[list[Tensor], list[Tensor]]:
        """This process's share of the average and of the weights."""
        _reshard(pl_module)
        weights = dict(pl_module.named_parameters())
        ours = [_local(tensor) for tensor in self._average.values()]
        return ours, [_local(weights[name].detach()) for name in self._average]


def _copies(pl_module: LightningModule) -> dict[str, Tensor]:
    _reshard(pl_module)
    return {name: p.detach().clone() for name, p in pl_module.named_parameters() if p.requires_grad}


def _reshard(pl_module: LightningModule) -> None:
    """Have FSDP2 give its parameters back in shards, where a forward pass alone left them whole."""
    for module in pl_module.modules():
        if is_sharded_module(module):
            module.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_shard(tensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().cpu() if is_shard(tensor) else tensor


@contextmanager
def evaluation_weights(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Inside, the module is in evaluation mode and has the averaged weights, if the run keeps an average."""
    average = next((callback for callback in trainer.callbacks if isinstance(callback, ExponentialMovingAverage)), None)  # type: ignore[attr-defined]
    training = pl_module.training
    pl_module.eval()
    try:
        with average.average_weights(pl_module) if average is not None else nullcontext():
            yield
    finally:
        pl_module.train(training)
