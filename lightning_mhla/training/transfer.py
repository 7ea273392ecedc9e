"""Runs whose first steps match replaced layers one by one."""

from __future__ import annotations

from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.swap import swapped_layers
from lightning_mhla.system.lightning_private import ddp_options


def check_layer_steps(trainer: Trainer, network: nn.Module, trained: str) -> None:
    """Refuse strategies under which layers cannot be trained one by one.

    Args:
        trainer: of the run.
        network: its model.
        trained: what is trained after those steps, a :data:`lightning_mhla.swap.adapters.TrainedPart`.

    Raises:
        ValueError: naming the way out.
    """
    strategy = trainer.strategy
    if not swapped_layers(network):
        raise ValueError("distillation.layer_steps matches replaced layers, and none is replaced; see layer_kinds")
    if shards_weights(trainer):
        raise ValueError(
            f"distillation.layer_steps calls layers by themselves, whose weights {type(strategy).__name__} shards with "
            "their blocks; match layers on one device or under DDP, and shard in a run that starts from its checkpoint"
        )
    unused = ddp_options(strategy).get("find_unused_parameters", False)
    if isinstance(strategy, DDPStrategy) and trained == "all" and not unused:
        raise ValueError(
            "distillation.layer_steps leaves parameters outside the replaced layers without gradients: set "
            "--model.init_args.train=attention (or new, lora), or --trainer.strategy=ddp_find_unused_parameters_true"
        )
