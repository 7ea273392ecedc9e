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
        teacher: weights of the teacher, in any form that the option pretrained accepts; null for plain fine-tuning.
        layer_steps: number of optimizer steps at the beginning of training, in which each replaced layer only learns to match
            the output of the teacher's layer for the input of that layer.
        velocity_weight: weight, after these steps, of the mean squared distance from the teacher's velocity.
        flow_weight: weight, after these steps, of the flow-matching loss on the data.
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
        """Return the weighted sum of the flow-matching loss ``plain`` and the distance from the teacher's velocity, scalars."""
        return self.flow_weight * plain + self.velocity_weight * distance


@dataclass(frozen=True)
class VelocityHost(LinearizedHost):
    """Two-stage training of diffusers transformers that predict a velocity and whose attention was replaced.

    The teacher is the transformer before the replacement. In the first stage, each replaced attention layer learns to
    reproduce the output of the teacher's layer for the input of the teacher's layer, so it does not have to compensate for
    errors of earlier layers. All weights of the replaced layers are trained. The teacher provides the original layers because
    diffusers does not keep them. In the second stage, the teacher's velocity is a training target of the complete transformer.

    Args:
        velocity: function that takes a transformer, noisy samples, timesteps and text, and returns the predicted velocity.
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
        """Predict the velocity, float32, with ``network``; ``inputs`` are noisy samples, timesteps and text."""
        return self.velocity(network, *inputs).float()

    @override
    def distance(self, predicted: Tensor, expected: Tensor) -> Tensor:
        return (predicted - expected).square().mean()
