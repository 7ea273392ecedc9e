"""AdamW as every domain uses it: parameter groups, a warm-up and a schedule, and the clip of mixing coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_mhla.mixing import MixingCoefficients, clip_mixing


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    Args:
        lr: peak learning rate.
        weight_decay: for matrices and convolutions; biases, norms, embeddings of positions and mixing have none.
        betas: AdamW's.
        eps: AdamW's.
        schedule: after the warm-up, cosine down to min_lr, or constant.
        min_lr: learning rate at the end of the cosine.
        warmup_epochs: epochs of linear warm-up. One of this and warmup_steps.
        warmup_steps: optimiser steps of linear warm-up.
        mixing_lr_scale: learning rate of the mixing coefficients, over lr.
        layer_decay: factor on the learning rate from each layer to the one below it (1 for none).
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr: float = 0.0
    warmup_epochs: float = 0.0
    warmup_steps: int = 0
    mixing_lr_scale: float = 1.0
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        if self.warmup_epochs and self.warmup_steps:
            raise ValueError(f"give warmup_epochs={self.warmup_epochs} or warmup_steps={self.warmup_steps}, not both")
        for name in ("lr", "weight_decay", "min_lr", "warmup_epochs", "warmup_steps", "mixing_lr_scale"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay={self.layer_decay} must be above 0 and at most 1")


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, layers: Iterable[Iterable[str]] = ()
) -> list[dict[str, Any]]:
    """Optimizer groups: decayed, not decayed, and mixing, for each layer if there is layer decay.

    Args:
        model: whose trainable parameters are grouped.
        config: rates and decay.
        layers: name prefixes of each layer, from the input to the output; what matches none counts as the output.
    """
    mixing = {id(p) for m in model.modules() if isinstance(m, MixingCoefficients) for p in m.parameters()}
    prefixes = [tuple(names) for names in layers]
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        depth = next((i for i, each in enumerate(prefixes) if name.startswith(each)), len(prefixes))
        lr = config.lr * config.layer_decay ** (len(prefixes) - depth)
        kind = "decay"
        if id(parameter) in mixing:
            kind, lr = "mixing", lr * config.mixing_lr_scale
        elif parameter.ndim < 2 or name.endswith("position"):
            kind = "no_decay"
        decay = config.weight_decay if kind == "decay" else 0.0
        group = groups.setdefault(
            (kind, lr), {"params": [], "lr": lr, "weight_decay": decay, "name": f"{kind}-{lr:.3g}"}
        )
        group["params"].append(parameter)
    return list(groups.values())


def lr_factor(config: OptimizerConfig, steps: float, warmup: int) -> Callable[[int], float]:
    """Factor on the learning rate at each optimiser step, of ``steps`` in all."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.schedule == "constant":
            return 1.0
        share = min(1.0, (step - warmup) / max(1.0, steps - warmup))
        floor = config.min_lr / config.lr if config.lr else 0.0
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return factor


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    steps: float,
    steps_per_epoch: float,
    layers: Iterable[Iterable[str]] = (),
) -> tuple[Optimizer, LambdaLR]:
    """AdamW over the groups of ``model`` and its schedule; mixing coefficients are clipped right after each step.

    Args:
        model: to be trained.
        config: see :class:`OptimizerConfig`.
        steps: optimiser steps of the whole run.
        steps_per_epoch: optimiser steps of an epoch, for ``warmup_epochs``.
        layers: see :func:`parameter_groups`.

    Raises:
        ValueError: for a cosine over a run without an end.
    """
    if config.schedule == "cosine" and not math.isfinite(steps):
        raise ValueError("schedule 'cosine' needs an end: set trainer.max_epochs or trainer.max_steps")
    optimizer = AdamW(parameter_groups(model, config, layers), lr=config.lr, betas=config.betas, eps=config.eps)

    def clip(*_: Any) -> None:
        with torch.no_grad():
            clip_mixing(model)

    optimizer.register_step_post_hook(clip)
    warmup = config.warmup_steps or round(config.warmup_epochs * steps_per_epoch)
    return optimizer, LambdaLR(optimizer, lr_factor(config, steps, warmup))
