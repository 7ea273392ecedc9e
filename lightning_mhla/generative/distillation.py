"""Distillation of generative models: its options, and how transformers of diffusers learn from the model before the swap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning import Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.swap import SwappedAttention, attention_layers, swapped_layers
from lightning_mhla.swap.diffusers import patch_convolution
from lightning_mhla.swap.transfer import matching_loss
from lightning_mhla.training.linearize import LinearizedHost, check_layer_steps


@dataclass(frozen=True)
class DistillationConfig:
    """Distillation from a teacher, the model before its attention was replaced.

    Args:
        teacher: its weights, as for pretrained; null for plain fine-tuning.
        layer_steps: optimiser steps, from the first, that match the outputs of each replaced layer, given the teacher's
            inputs; nothing else is trained meanwhile.
        velocity_weight: weight of the squared distance to the teacher's velocity, afterwards.
        flow_weight: weight of the plain loss, afterwards.
    """

    teacher: str | None = None
    layer_steps: int = 0
    velocity_weight: float = 1.0
    flow_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.teacher is None and self.layer_steps:
            raise ValueError(f"distillation.layer_steps={self.layer_steps} needs distillation.teacher")
        if min(self.layer_steps, self.velocity_weight, self.flow_weight) < 0:
            raise ValueError("distillation.layer_steps, velocity_weight and flow_weight must not be negative")

    def weighted(self, plain: Tensor, distance: Tensor) -> Tensor:
        """See :meth:`lightning_mhla.training.linearize.TwoStageOptions.weighted`."""
        return self.flow_weight * plain + self.velocity_weight * distance


@dataclass(frozen=True)
class VelocityHost(LinearizedHost):
    """Transformers of diffusers that predict a velocity.

    diffusers does not keep the attention that was replaced, so that layers are matched to those of a teacher, for the
    teacher's inputs: no layer has to make up for the error of an earlier one. All of a replaced layer is trained meanwhile.

    Args:
        velocity: returns a transformer's velocity for noisy samples, times and text.
    """

    loss_name = "train/flow_loss"
    distance_name = "train/teacher_distance"
    velocity: Callable[[Any, Tensor, Tensor, Tensor], Tensor]

    @override
    def check(self, trainer: Trainer, network: nn.Module, trained: str) -> None:
        check_layer_steps(trainer, network, trained)

    @override
    def layer_loss(self, network: Any, teacher: Any, *inputs: Tensor) -> Tensor:
        layers, originals = attention_layers(network), attention_layers(teacher)
        replaced: dict[nn.Module, nn.Module] = {}
        for index in swapped_layers(network):
            processor = layers[index].processor
            assert isinstance(processor, SwappedAttention)
            processor.grid(patch_convolution(network), inputs[:1])
            replaced[originals[index]] = layers[index]
        run = partial(self.predict, teacher, *inputs)
        return matching_loss(network, replaced, run, network.is_gradient_checkpointing)

    @override
    def predict(self, network: Any, *inputs: Tensor) -> Tensor:
        """Return the velocity of noisy samples, times and text, float32."""
        return self.velocity(network, *inputs).float()

    @override
    def distance(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        return (predicted - wanted).square().mean()
