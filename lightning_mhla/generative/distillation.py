"""Learning from the softmax model that was replaced: the outputs of its layers, then its velocity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mhla.swap import SwappedAttention, attention_layers, swapped_layers
from lightning_mhla.swap.diffusers import patch_convolution


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


class Teacher:
    """A frozen transformer without replaced layers; no module, so that it is neither trained, averaged nor kept.

    Args:
        model: a transformer of diffusers, with its weights.
        predict: its velocity for noisy samples, times and text.
    """

    def __init__(self, model: Any, predict: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        self.model, self._predict = model.eval().requires_grad_(False), predict

    def __deepcopy__(self, memo: dict[int, Any]) -> Teacher:
        return self

    @torch.no_grad()
    def velocity(self, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """The teacher's prediction, float32."""
        return self._predict(self.model, noisy, times, text).float()

    def layer_loss(self, student: Any, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """How far each replaced layer's output is from the teacher's for the same input, mean over the layers.

        A layer's distance is the mean square of the difference over the variance of the teacher's output, so that all
        layers count alike. Each is given the teacher's own input: none has to mend what an earlier one does.
        """
        hosts, theirs = attention_layers(student), attention_layers(self.model)
        distances: list[Tensor] = []
        hooks = []
        for index in swapped_layers(student):
            processor = hosts[index].processor
            assert isinstance(processor, SwappedAttention)
            processor.grid(patch_convolution(student), (noisy,))
            compare = partial(_compare, hosts[index], student.is_gradient_checkpointing, distances)
            hooks.append(theirs[index].register_forward_hook(compare, with_kwargs=True))
        try:
            self.velocity(noisy, times, text)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(distances).mean()


def _compare(
    layer: nn.Module,
    recompute: bool,
    distances: list[Tensor],
    teacher: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> None:
    with torch.enable_grad():
        own = checkpoint(layer, *args, use_reentrant=False, **kwargs) if recompute else layer(*args, **kwargs)
        distances.append((own.float() - output.float()).square().mean() / output.float().var())
