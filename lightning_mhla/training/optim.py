"""Optimizers and learning-rate schedules: AdamW or CAME, with parameter groups and a warm-up.

timm's parameter groups are not used, because they store layer decay as ``lr_scale``, which torch's optimizers ignore, and have
no group for mixing coefficients. timm's schedulers are not used, because they do not derive from ``LRScheduler``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_mhla.attention.mixing import MixingCoefficients
from lightning_mhla.system.ranges import check_range
from lightning_mhla.system.sharding import is_shard
from lightning_mhla.system.torch_private import set_last_rates

log = logging.getLogger(__name__)


BETAS = {"adamw": (0.9, 0.999), "came": (0.9, 0.999, 0.9999)}
"""Default decay rates of the moments, by kind of optimizer: torch's for AdamW, and those of CAME's authors, as in SANA."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Options of the optimizer and the learning-rate schedule.

    Args:
        lr: peak learning rate.
        weight_decay: weight decay of matrices and convolutions. Other parameters, such as biases, norms, position embeddings
            and mixing coefficients, have none.
        betas: decay rates of the moments, two for AdamW, three for CAME; null for 0.9 and 0.999, and for CAME also 0.9999.
        eps: epsilon of AdamW.
        schedule: schedule after the warm-up: cosine down to min_lr, or constant.
        min_lr: learning rate at the end of the cosine.
        warmup_epochs: length of the linear warm-up in epochs. Give either this or warmup_steps.
        warmup_steps: length of the linear warm-up in optimizer steps.
        mixing_lr_scale: factor by which the learning rate of the mixing coefficients is multiplied.
        layer_decay: learning rate of a layer divided by that of the next layer; 1 for the same rate in all layers.
        kind: adamw or came (arXiv 2307.02047). CAME is the optimizer of SANA, and needs the package pytorch-optimizer. It keeps
            one full tensor for each matrix where AdamW keeps two, and does not support sharded parameters (FSDP).

    Raises:
        ValueError: if an option is out of range or not one of its choices, or if both warm-up lengths are given.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, ...] | None = None
    eps: float = 1e-8
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr: float = 0.0
    warmup_epochs: float = 0.0
    warmup_steps: int = 0
    mixing_lr_scale: float = 1.0
    layer_decay: float = 1.0
    kind: Literal["adamw", "came"] = "adamw"

    def __post_init__(self) -> None:
        for name, choices in {"kind": tuple(BETAS), "schedule": ("cosine", "constant")}.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"optimizer.{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        defaults = BETAS[self.kind]
        if self.betas is not None and len(self.betas) != len(defaults):
            raise ValueError(
                f"optimizer.betas={list(self.betas)}: {self.kind} takes {len(defaults)}, such as {list(defaults)}"
            )
        if self.warmup_epochs and self.warmup_steps:
            raise ValueError(f"give warmup_epochs={self.warmup_epochs} or warmup_steps={self.warmup_steps}, not both")
        for beta in self.betas or ():
            check_range(least=0, below=1, betas=beta)
        for name in ("lr", "weight_decay", "eps", "min_lr", "warmup_epochs", "warmup_steps", "mixing_lr_scale"):
            check_range(least=0, **{name: getattr(self, name)})
        check_range(above=0, most=1, layer_decay=self.layer_decay)


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, layers: Iterable[Iterable[str]] = ()
) -> list[dict[str, Any]]:
    """Group trainable parameters by learning rate and weight decay.

    There is a group with weight decay, a group without, and a group of mixing coefficients. With layer decay, each layer has
    these three groups.

    Args:
        model: model to train.
        config: learning rates and weight decay.
        layers: prefixes of the parameter names of each layer, from input to output. Parameters whose names match no prefix
            belong to the output, whose learning rate is not reduced.

    Returns:
        Parameter groups for a torch optimizer, dicts with ``params``, ``lr``, ``weight_decay`` and ``name``. Empty groups are
        left out.
    """
    mixing = {id(p) for m in model.modules() if isinstance(m, MixingCoefficients) for p in m.parameters()}
    prefixes = [tuple(names) for names in layers]
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # 0 for the input, len(prefixes) for the output, whose rate is not reduced.
        depth = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))
        layer = f"-layer{depth}" if config.layer_decay != 1 else ""
        lr = config.lr * config.layer_decay ** (len(prefixes) - depth)
        kind = "decay"
        if id(parameter) in mixing:
            kind, lr = "mixing", lr * config.mixing_lr_scale
        elif parameter.ndim < 2 or name.endswith(("position", "A_log")):  # the latter: Mamba's decays, a matrix
            kind = "no_decay"
        decay = config.weight_decay if kind == "decay" else 0.0
        group = groups.setdefault(
            f"{kind}{layer}", {"params": [], "lr": lr, "weight_decay": decay, "name": f"{kind}{layer}"}
        )
        group["params"].append(parameter)
    return list(groups.values())


class Schedule:
    """Learning-rate schedule with a linear warm-up, followed by a cosine or a constant learning rate.

    ``LambdaLR`` calls the object to get the factor by which it multiplies the peak learning rate. It saves the object's
    attributes in checkpoints.

    Args:
        config: options of the schedule, see :class:`OptimizerConfig`.
        steps: number of optimizer steps of the complete run; infinite if the run has no end.
        warmup: number of warm-up steps.

    Attributes:
        start: step at which the cosine begins: the end of the warm-up, or the step at which the options last changed.
        top: learning rate at step ``start``, divided by the peak learning rate.
    """

    def __init__(self, config: OptimizerConfig, steps: float, warmup: int) -> None:
        self.kind, self.steps, self.warmup = str(config.schedule), steps, warmup
        # LambdaLR only knows factors on the peak rate.
        self.floor = config.min_lr / config.lr if config.lr else 0.0
        self.start, self.top = warmup, 1.0

    def __call__(self, step: int) -> float:
        """Return the learning rate at optimizer step ``step``, counted from 0, divided by the peak learning rate."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        # The maximum is for a run that ends with the warm-up, the minimum for steps after the last one.
        share = min(1.0, (step - self.start) / max(1.0, self.steps - self.start))
        return self.floor + (self.top - self.floor) * 0.5 * (1 + math.cos(math.pi * share))

    def follow(self, new_schedule: Schedule, step: int) -> list[str]:
        """Adopt the options of a different schedule after ``step`` steps.

        A cosine continues from the current learning rate. Warm-up steps, and a constant schedule, have the learning rates of
        the new options.

        Args:
            new_schedule: schedule whose options are adopted.
            step: number of completed optimizer steps.

        Returns:
            One string for each changed option, with its old and its new value.

        Raises:
            ValueError: if the rest of the run would train at a learning rate of zero.
        """
        names = ("kind", "steps", "warmup", "floor")
        changed = {name: (getattr(self, name), getattr(new_schedule, name)) for name in names}
        changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
        if not changed:
            return []
        factor = self(step)
        for name, (_, value) in changed.items():
            setattr(self, name, value)
        if step < self.warmup:
            self.start, self.top = self.warmup, 1.0
        else:
            self.start, self.top = step, max(factor, self.floor)
        if self.kind == "cosine" and self.top == 0 and self.steps > step:
            raise ValueError(
                f"the run ended at a learning rate of 0, and {self.steps - step:.0f} more steps would train nothing: give a "
                "floor (--model.training.optimizer.min_lr), or start a new run from its weights (--model.pretrained)"
            )
        labels = {"kind": "schedule", "steps": "end of the schedule", "warmup": "warm-up steps", "floor": "min_lr / lr"}
        return [f"{labels[name]} {_number(old)} -> {_number(new)}" for name, (old, new) in changed.items()]


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def take_over(optimizer: Optimizer, schedule: LambdaLR, options: Asked, step: int) -> list[str]:
    """Apply the current options to an optimizer and a schedule that were restored from a checkpoint, in place.

    If no option changed, the learning rates stay bit-identical.

    Args:
        optimizer: optimizer with the options and learning rates of the checkpoint.
        schedule: schedule of the checkpoint.
        options: optimizer options of the current configuration.
        step: number of completed optimizer steps.

    Returns:
        One string for each changed option, with its old and its new value.

    Raises:
        ValueError: if the rest of the run would train at a learning rate of zero.
    """
    factor: Any = schedule.lr_lambdas[0]  # one object serves all groups
    changed = factor.follow(options.schedule, step)
    for index, (group, group_options) in enumerate(zip(optimizer.param_groups, options.groups, strict=True)):
        for name, value in group_options.items():
            previous_value = group[name]
            # A checkpoint may hold the betas as a list.
            if tuple(previous_value) != tuple(value) if name == "betas" else previous_value != value:
                changed.append(f"{name} of {group['name']} {previous_value} -> {value}")
                group[name] = value
        # The schedule's copy of the peak rates, from which it computes the rates of later steps.
        schedule.base_lrs[index] = group["initial_lr"]
        if changed:
            group["lr"] = group["initial_lr"] * schedule.lr_lambdas[index](schedule.last_epoch)
    if changed:
        set_last_rates(schedule, [group["lr"] for group in optimizer.param_groups])
    return changed


@dataclass(frozen=True)
class Asked:
    """Optimizer options of the current configuration, to apply in place of those that a checkpoint restores.

    Attributes:
        groups: options of each parameter group, such as its initial learning rate, in the order of the optimizer's groups.
        schedule: learning-rate schedule.
    """

    groups: list[dict[str, Any]]
    schedule: Schedule


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    steps: float,
    steps_per_epoch: float,
    layers: Iterable[Iterable[str]] = (),
) -> tuple[Optimizer, LambdaLR]:
    """Build the optimizer of a model and its learning-rate schedule.

    Args:
        model: model to train.
        config: options of the optimizer and its schedule.
        steps: number of optimizer steps of the complete run; infinite if the run has no end.
        steps_per_epoch: number of optimizer steps per epoch, for ``warmup_epochs``.
        layers: prefixes of the parameter names of each layer, from input to output, for layer decay.

    Returns:
        Optimizer and schedule.

    Raises:
        ValueError: if the schedule is cosine and the number of steps is infinite, or if CAME gets sharded parameters.
    """
    factor = make_schedule(config, steps, steps_per_epoch)
    if factor.warmup >= steps:
        log.warning(
            "the warm-up of %d steps is longer than the run of %d: the learning rate never reaches lr",
            factor.warmup,
            steps,
        )
    optimizer = _make(parameter_groups(model, config, layers), config)
    return optimizer, LambdaLR(optimizer, [factor] * len(optimizer.param_groups))


def asked_options(
    model: nn.Module,
    config: OptimizerConfig,
    steps: float,
    steps_per_epoch: float,
    layers: Iterable[Iterable[str]] = (),
) -> Asked:
    """Compute the options of each parameter group and the schedule of a run, without building an optimizer.

    Args:
        model: model to train.
        config: options of the optimizer and its schedule.
        steps: number of optimizer steps of the complete run; infinite if the run has no end.
        steps_per_epoch: number of optimizer steps per epoch, for ``warmup_epochs``.
        layers: prefixes of the parameter names of each layer, from input to output, for layer decay.

    Raises:
        ValueError: if the schedule is cosine and the number of steps is infinite.
    """
    common: dict[str, Any] = {"betas": config.betas or BETAS[config.kind]}
    common |= {"eps": config.eps} if config.kind == "adamw" else {}
    groups = [
        {"initial_lr": group["lr"], "weight_decay": group["weight_decay"], **common}
        for group in parameter_groups(model, config, layers)
    ]
    return Asked(groups, make_schedule(config, steps, steps_per_epoch))


def make_schedule(config: OptimizerConfig, steps: float, steps_per_epoch: float) -> Schedule:
    """Build the learning-rate schedule of a run.

    Args:
        config: options of the optimizer and its schedule.
        steps: number of optimizer steps of the complete run; infinite if the run has no end.
        steps_per_epoch: number of optimizer steps per epoch, for ``warmup_epochs``.

    Raises:
        ValueError: if the schedule is cosine and the number of steps is infinite.
    """
    if config.schedule == "cosine" and not math.isfinite(steps):
        raise ValueError("schedule 'cosine' needs an end: set trainer.max_epochs or trainer.max_steps")
    return Schedule(config, steps, config.warmup_steps or round(config.warmup_epochs * steps_per_epoch))


def _make(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    betas = config.betas or BETAS[config.kind]
    if config.kind == "adamw":
        return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps)  # type: ignore[arg-type]  # two of them
    if any(is_shard(parameter) for group in groups for parameter in group["params"]):
        raise ValueError("optimizer.kind=came does not support sharded parameters; train with ddp, or with adamw")
    from pytorch_optimizer import CAME  # not needed for AdamW

    class MatrixCAME(CAME):
        """CAME optimizer that stores factored second moments for matrices only.

        Other parameters keep full second moments. For convolution kernels of a few pixels, CAME's four factors would together
        take more memory than the full tensor.
        """

        @staticmethod
        def get_options(shape: tuple[int, ...]) -> bool:
            return len(shape) == 2

    optimizer: Optimizer = MatrixCAME(groups, lr=config.lr, betas=betas)
    return optimizer
