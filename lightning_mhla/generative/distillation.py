"""Distillation of generative models: options, and two-stage training of diffusers' transformers."""

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
    """Options of distillation from a teacher, the model before its attention was replaced.

    Args:
        teacher: weights of the teacher, in the same forms as pretrained; null for plain fine-tuning.
        layer_steps: number of optimizer steps at the beginning that only train each replaced layer to match the output of the
            teacher's layer for the teacher's inputs.
        velocity_weight: weight of the squared distance to the teacher's velocity after the layer steps.
        flow_weight: weight of the loss without a teacher after the layer steps.
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
        """Return the weighted sum of the loss without a teacher, ``plain``, and the distance to the teacher, all scalars."""
        return self.flow_weight * plain + self.velocity_weight * distance


@dataclass(frozen=True)
class VelocityHost(LinearizedHost):
    """Adapter that trains diffusers transformers with replaced attention, which predict a velocity, in two stages.

    diffusers does not keep the attention that was replaced, so the first stage matches each replaced layer to that of a
    teacher. It gets the input of the teacher's layer, so no layer has to compensate for the error of an earlier one. All
    weights of a replaced layer are trained in this stage.

    Args:
        velocity: function that returns a transformer's velocity for noisy samples, times and text.
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
            # Only the teacher runs, so the layers of the network would not learn the size of the input themselves.
            processor.grid(patch_convolution(network), inputs[:1])
            replaced[originals[index]] = layers[index]
        run = partial(self.predict, teacher, *inputs)
        return matching_loss(network, replaced, run, network.is_gradient_checkpointing)

    @override
    def predict(self, network: Any, *inputs: Tensor) -> Tensor:
        """Predict the velocity, float32, for noisy samples, times and text."""
        return self.velocity(network, *inputs).float()

    @override
    def distance(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        return (predicted - wanted).square().mean()
