"""Facts about a run for its report: what is trained, on which machine, and which parts of the report were skipped and why."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning import LightningModule, Trainer

from lightning_mhla.attention import AttentionConfig
from lightning_mhla.callbacks.pictures import numbered_layers
from lightning_mhla.data.loader import ResumableLoader
from lightning_mhla.system.hyperparameters import plain
from lightning_mhla.system.numbers import plural
from lightning_mhla.system.redaction import redacted
from lightning_mhla.system.steps import steps_of_run


@runtime_checkable
class SkipsParts(Protocol):
    """Protocol for callbacks that can report which parts of their output a run skipped."""

    def skipped_parts(self, trainer: Trainer) -> list[str]:
        """Return one sentence for each skipped part of the callback's output, with the reason."""


def run_facts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Describe what a run trains, as plain data for ``run.json``.

    Args:
        trainer: trainer of the run.
        module: module that is trained.

    Returns:
        Dict with these entries:

        - ``model``, ``network`` and ``data``: class names of the module, its network and its data module. The name is empty if
          there is no network or data module.
        - ``data_options``: options of the data module that differ from their defaults, without secrets.
        - ``attention``: list with one dict for each group of equal attention layers. Its entries are ``kind``, ``layers``
          (number of layers) and ``options`` (options that differ from their defaults).
        - ``lr`` and ``batch_size``: peak learning rate and batch size; None if unknown.
        - ``hardware`` and ``precision``: descriptions as text.
        - ``usage``: commands that use the model, by purpose.
    """
    data = getattr(trainer, "datamodule", None)
    network = getattr(module, "network", None)
    rate = getattr(module, "lr", None)
    return {
        "model": type(module).__name__,
        "network": type(network).__name__ if network is not None else "",
        "data": type(data).__name__ if data is not None else "",
        "data_options": _changed_options(data) if data is not None else {},
        "attention": _attention(module),
        "lr": rate if isinstance(rate, int | float) else None,
        "batch_size": size if isinstance(size := getattr(data, "batch_size", None), int) else None,
        "hardware": _hardware(trainer),
        "precision": str(trainer.precision),
        "usage": dict(usage) if isinstance(usage := getattr(module, "usage", None), Mapping) else {},
    }


def _changed_options(data: Any) -> dict[str, Any]:
    """Return the hyperparameters of a data module that differ from the defaults of its constructor, without secrets.

    The batch size and options with the value None are left out.
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(type(data)).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    initial = plain(defaults)
    values: dict[str, Any] = {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in data.hparams.items()
    }
    options = plain(redacted(values))  # dataclasses would be taken for values without secrets
    return {
        name: _plain_value(value)
        for name, value in options.items()
        if value is not None
        and name[0] != "_"
        and name != "batch_size"
        # As plain values, because arrays cannot be compared to a truth value.
        and (name not in initial or _plain_value(initial[name]) != _plain_value(value))
    }


def _plain_value(value: Any) -> Any:
    """Convert a value to one that JSON can represent. Values without a counterpart in JSON, such as NaN, become text."""
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain_value(item) for name, item in value.items()}
    is_plain = value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def _attention(module: LightningModule) -> list[dict[str, Any]]:
    """Describe the attention layers of a model as a list of groups with ``kind``, ``options`` and the number of ``layers``."""
    groups: list[dict[str, Any]] = []
    for layer in numbered_layers(module).values():
        options = _attention_options(layer)
        group = next((group for group in groups if (group["kind"], group["options"]) == (layer.kind, options)), None)
        if group is None:
            group = {"kind": layer.kind, "options": options, "layers": 0}
            groups.append(group)
        group["layers"] += 1
    return groups


def _attention_options(layer: Any) -> dict[str, Any]:
    """Return the options, other than ``kind``, that an attention layer uses and that differ from the defaults for its kind."""
    config, ignored = layer.config, getattr(layer, "ignored", ())
    defaults = plain(asdict(AttentionConfig(config.kind)))
    return {
        name: _plain_value(value)
        for name, value in plain(asdict(config)).items()
        if name != "kind" and name not in ignored and value != defaults.get(name)
    }


def _hardware(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return name if trainer.world_size == 1 else f"{trainer.world_size} x {name}"
    threads = plural(torch.get_num_threads(), "thread")
    processes = "" if trainer.world_size == 1 else f"{trainer.world_size} processes, each with "
    return f"{device.type.upper()}, {processes}{threads}{_processor()}"


def _processor() -> str:
    """Return the name of the processor, preceded by a comma; empty if the system does not report the name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((f", {line.partition(':')[2].strip()}" for line in lines if line.startswith("model name")), "")


def skipped_parts(
    trainer: Trainer, points: Mapping[str, list[tuple[int, float]]], validated_step: int | None
) -> list[str]:
    """Return one sentence for each part that is missing from the report of a run, with the reason.

    Args:
        trainer: trainer of the run, at its end.
        points: (step, value) pairs of the validation metrics, by name.
        validated_step: optimizer step of the last validation in this process, even if it logged no metrics; None if there was
            no validation.
    """
    parts = _skipped_validation(trainer, points, validated_step)
    loader = trainer.train_dataloader
    if isinstance(loader, ResumableLoader) and loader.skipped:
        process = " of the first process" if trainer.world_size > 1 else ""
        (first, *_) = loader.skipped.values()
        parts.append(f"{plural(len(loader.skipped), 'broken training sample')}{process}, such as {redacted(first)}.")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # the trainer's own list
        if isinstance(callback, SkipsParts):
            parts += callback.skipped_parts(trainer)
    return parts


def never_validated(trainer: Trainer) -> list[str]:
    """Return one sentence with the reason if a run never validates; an empty list otherwise."""
    if trainer.enable_validation:
        return []
    reason = "limit_val_batches is 0" if trainer.limit_val_batches == 0 else "the data has no validation set"
    return [f"No validation: {reason}."]


def _skipped_validation(
    trainer: Trainer, points: Mapping[str, list[tuple[int, float]]], validated_step: int | None
) -> list[str]:
    if parts := never_validated(trainer):
        return parts
    last = max((values[-1][0] for values in points.values() if values), default=validated_step or 0)
    step = trainer.global_step
    logged_nothing = ["The validation logged no metrics."] if validated_step is not None and not points else []
    if last == step:
        return logged_nothing
    reason = _validation_period(trainer)
    if not last:
        return [f"No validation: {reason}."]
    text = f"The last {plural(step - last, 'step')} had no validation: {reason}."
    return [text, *logged_nothing] if logged_nothing else [f"{text} The metrics are those of step {last:,}."]


def _validation_period(trainer: Trainer) -> str:
    """Explain in a clause why a run did not end with a validation and, if possible, which option to change."""
    epochs, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    if epochs is None or interval not in (1.0, None):
        unit = " of an epoch" if isinstance(interval, float) else ""
        return (
            f"val_check_interval={interval}{unit} does not end where the {_length(trainer)} end; set "
            "--trainer.val_check_interval to a number of batches that divides the run"
        )
    if not trainer.is_last_batch:
        return (
            "the run ended inside an epoch; for a validation at its end, set --trainer.check_val_every_n_epoch=null and "
            "--trainer.val_check_interval to a number of batches that divides the run"
        )
    done = plural(trainer.current_epoch, "epoch")
    if epochs > trainer.current_epoch:
        return f"check_val_every_n_epoch={epochs} is more than the {done} of the run; set --trainer.check_val_every_n_epoch=1"
    return f"check_val_every_n_epoch={epochs} does not divide the {done} of the run"


def _length(trainer: Trainer) -> str:
    steps = steps_of_run(trainer)
    return plural(int(steps), "step") if math.isfinite(steps) else plural(trainer.global_step, "step")
