"""Loading of weights into a module, which may be sharded over processes or complete on every process."""

from __future__ import annotations

from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_mhla.system.sharding import is_shard

LIVE = "current_model_state"
"""Name of the entry of a checkpoint with the trained weights, if ``state_dict`` is their moving average."""


def shards_weights(trainer: Trainer) -> bool:
    """Return whether a trainer's strategy shards the weights, so that no process holds all of them."""
    return isinstance(trainer.strategy, ModelParallelStrategy | FSDPStrategy)


def load_weights(module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
    """Load weights into a module, which may be sharded. Every process must call this function.

    Args:
        module: module to load the weights into.
        state: weights by name, sharded like those of the module, or complete on every process.
        strict: whether names in ``state`` must be those of the module's weights.

    Raises:
        RuntimeError: if ``strict`` is True and the names differ.
    """
    sharded = any(is_shard(parameter) for parameter in module.parameters())
    # `load_state_dict` cannot copy a full tensor into a shard.
    if sharded and not any(is_shard(value) for value in state.values()):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, strict=strict))
    else:
        with torch.no_grad():
            module.load_state_dict(state, strict=strict)
