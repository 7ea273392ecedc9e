"""Distillation from an original diffusers transformer (teacher) to a copy whose attention layers were replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning import Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.swap.diffusers_grid import patch_convolution
from lightning_mhla.swap.swapping import host_of
from lightning_mhla.swap.transfer import matching_loss
from lightning_mhla.system.ranges import check_range
from lightning_mhla.training.linearize import LinearizedHost, check_layer_steps


@dataclass(frozen=True)
class DistillationConfig:
    """Options for distillation from a teacher, which is the model before its attention layers were replaced.

    Args:
        teacher: source of the teacher's weights, such as a folder or a Hugging Face Hub name, in any form that the model's
            option pretrained accepts; null for plain fine-tuning.
        layer_steps: number of optimizer steps in the first stage of training. In these steps, each replaced layer learns to
            reproduce the output of the teacher's layer for the same input.
        velocity_weight: weight of the mean squared difference from the teacher's predicted velocity, after the first
            layer_steps steps.
        flow_weight: weight of the flow-matching loss on the data, after the first layer_steps steps.

    Raises:
        ValueError: if a number is negative, or ``layer_steps`` is positive without a teacher.
    """

    teacher: str | None = None
    layer_steps: int = 0
    velocity_weight: float = 1.0
    flow_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.teacher is None and self.layer_steps:
            raise ValueError(f"distillation.layer_steps={self.layer_steps} needs distillation.teacher")
        for name in ("layer_steps", "velocity_weight", "flow_weight"):
            check_range("distillation.", least=0, **{name: getattr(self, name)})

    def weighted(self, plain: Tensor, distance: Tensor) -> Tensor:
        """Return the weighted sum of the flow-matching loss and the distance from the teacher's velocity.

        The weights are ``flow_weight`` and ``velocity_weight``.

        Args:
            plain: flow-matching loss on the data, a scalar.
            distance: mean squared difference from the teacher's predicted velocity, a scalar.
        """
        return self.flow_weight * plain + self.velocity_weight * distance


@dataclass(frozen=True)
class VelocityHost(LinearizedHost):
    """Two-stage distillation of diffusers transformers that predict a velocity and whose attention layers were replaced.

    The velocity is the noise minus the clean data. The teacher is the transformer before the replacement. In the first stage,
    each replaced layer receives the input of the teacher's layer, and is trained to reproduce its output. Errors of earlier
    replaced layers therefore have no effect. In the second stage, the complete transformer is trained with the flow-matching
    loss on the data and with the distance from the teacher's predicted velocity.

    Args:
        velocity: function that takes a transformer, noisy samples ``[B, C, ...]``, timesteps ``[B]`` from 0 (clean data) to
            1000 (pure noise) and embedded captions ``[B, L, D]``, and returns the predicted velocity in the shape of the
            samples.
    """

    loss_name = "train/flow_loss"
    distance_name = "train/teacher_distance"
    velocity: Callable[[Any, Tensor, Tensor, Tensor], Tensor]

    @override
    def check(self, trainer: Trainer, network: nn.Module, trained: str) -> None:
        check_layer_steps(trainer, network, trained)

    @override
    def layer_loss(self, network: Any, teacher: Any, *inputs: Tensor) -> Tensor:
        replaced: dict[nn.Module, nn.Module] = {}
        for group, index, layer, _ in host_of(network).replaced(network):
            # Only the teacher runs, so the layers of the network would not learn the size of the input themselves.
            layer.processor.grid(patch_convolution(network), inputs[:1])
            replaced[group.layers(teacher)[index]] = layer
        run = partial(self.predict, teacher, *inputs)
        return matching_loss(network, replaced, run, network.is_gradient_checkpointing)

    @override
    def predict(self, network: Any, *inputs: Tensor) -> Tensor:
        """Predict the velocity of noisy samples, and return it in float32.

        Args:
            network: transformer from the diffusers library.
            inputs: noisy samples ``[B, C, ...]``, timesteps ``[B]`` from 0 to 1000 and embedded captions ``[B, L, D]``, in this
                order.

        Returns:
            Velocity in the shape of the noisy samples, float32.
        """
        return self.velocity(network, *inputs).float()

    @override
    def distance(self, predicted: Tensor, expected: Tensor) -> Tensor:
        return (predicted - expected).square().mean()
