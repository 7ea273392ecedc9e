"""Training after a swap: its options, and runs whose first steps match replaced layers one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.swap import swapped_layers
from lightning_mhla.system.lightning_private import ddp_options


@dataclass(frozen=True)
class TransferOptions:
    """How the new attention learns from the old one.

    Args:
        layer_steps: optimiser steps, from the first, that match the output of each replaced layer to that of the attention it
            replaced, for the same input; only what the swap added is trained meanwhile.
        teacher: weights of the model before the swap, as for pretrained, whose predictions are matched afterwards; null for
            none.
        logits_weight: weight of the divergence from the teacher's predictions.
        loss_weight: weight of the plain loss beside it.
    """

    layer_steps: int = 0
    teacher: str | None = None
    logits_weight: float = 1.0
    loss_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("layer_steps", "logits_weight", "loss_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"distillation.{name}={getattr(self, name)} must not be negative")


def check_layer_steps(
    trainer: Trainer, network: nn.Module, trained: str, whole: tuple[str, ...] = ("attention", "new", "lora")
) -> None:
    """Refuse strategies under which layers cannot be trained one by one.

    Args:
        trainer: of the run.
        network: its model.
        trained: what is trained after those steps, a :data:`lightning_mhla.swap.adapters.TrainedPart`.
        whole: parts of which those steps train every parameter.

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
    if isinstance(strategy, DDPStrategy) and trained not in whole and not unused:
        raise ValueError(
            f"distillation.layer_steps leaves some of the trained parameters (train={trained!r}) without gradients: set "
            f"--model.train={' or '.join(whole)}, or --trainer.strategy=ddp_find_unused_parameters_true"
        )


def check_transfer(trainer: Trainer, network: nn.Module, trained: str) -> None:
    """:func:`check_layer_steps`, where those steps train nothing but what replacing added.

    Raises:
        ValueError: for attention that adds nothing, too.
    """
    check_layer_steps(trainer, network, trained, ("new",))
    layers = swapped_layers(network).values()
    if idle := next((layer for layer in layers if not any(p.requires_grad for p in layer.parameters())), None):
        raise ValueError(
            f"distillation.layer_steps trains what replacing added, and attention kind {idle.config.kind!r} added nothing "
            "that is trained; set distillation.layer_steps=0, or feature_map: learned"
        )


class Teacher:
    """A frozen model before the swap; no module, so that it is neither trained, averaged nor kept.

    Args:
        model: with its weights.
        predict: its scores ``[..., classes]`` for inputs.
    """

    def __init__(self, model: Any, predict: Callable[[Any, Tensor], Tensor]) -> None:
        self.model, self._predict = model.eval().requires_grad_(False), predict

    def __deepcopy__(self, memo: dict[int, Any]) -> Teacher:
        return self

    def divergence(self, scores: Tensor, inputs: Tensor) -> Tensor:
        """Kullback-Leibler divergence of the model's predictions from the teacher's, the mean over all but the classes.

        Args:
            scores: the model's ``[..., classes]``.
            inputs: what they are for.
        """
        with torch.no_grad():
            wanted = self._predict(self.model, inputs).float().log_softmax(-1).flatten(0, -2)
        found = scores.float().log_softmax(-1).flatten(0, -2)
        return F.kl_div(found, wanted, reduction="batchmean", log_target=True)
