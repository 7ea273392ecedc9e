"""Configurations of the two training runs of ``lightning linearize``, in the format of ``lightning fit``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_mhla import AttentionConfig
from mhla_tasks.classification.encoder import BIDIRECTIONAL as IMAGES
from mhla_tasks.language.encoder import BIDIRECTIONAL as TEXTS
from mhla_tasks.language.linearized import WINDOW
from mhla_tasks.tools.linearize.source import Domain, PretrainedSource

MODULES: dict[Domain, str] = {
    "language": "mhla_tasks.language.LinearizedModel",
    "text": "mhla_tasks.language.LinearizedTextEncoder",
    "image": "mhla_tasks.classification.encoder.LinearizedImageEncoder",
}
"""Training module of each kind of model."""

MONITORS: dict[Domain, tuple[str, str]] = {
    "language": ("val/perplexity", "min"),
    "text": ("val/cosine", "max"),
    "image": ("val/token_cosine", "max"),
}
"""Metric that measures quality for each kind of model, and whether higher (``max``) or lower (``min``) values are better."""

ATTENTION: dict[Domain, AttentionConfig] = {"language": WINDOW, "text": TEXTS, "image": IMAGES}
"""Default attention of the training module of each kind of model."""

DEFAULTS: dict[Domain, dict[str, Any]] = {
    "language": {"length": 1024, "batch_size": 4, "block_size": WINDOW.block_size, "match_lr": 0.03, "tune_lr": 1e-4},
    "text": {"length": 512, "batch_size": 16, "block_size": TEXTS.block_size, "match_lr": 0.01, "tune_lr": 5e-5},
    "image": {"length": 224, "batch_size": 16, "block_size": 4, "match_lr": 0.01, "tune_lr": 1e-5},
}
"""Defaults by kind of model.

``length`` is a number of tokens, or the side of an image in pixels; timm encoders have their own default. ``block_size`` is a
number of tokens, or the number of blocks along an image's side. ``match_lr`` and ``tune_lr`` are the peak learning rates of the
two runs.
"""

MATCH_SHARE = 0.25
"""Share of the training time for the first run, which matches single layers. The second run trains the complete model."""

CHECKS = 4
"""Number of validations in a training run."""


@dataclass(frozen=True)
class Settings:
    """Options of ``lightning linearize`` that determine the training.

    Attributes:
        train: files or folders of training data.
        val: files or folders of held-out data.
        kind: kind of the new attention, such as ``mhla_window``.
        block_size: number of tokens in a block; for images, the number of blocks along each side.
        length: number of tokens in a sample; for images, the side in pixels.
        batch_size: number of samples in a batch.
        keep: share of the layers that keep softmax attention, at least 0 and below 1.
        trained: parameters that the second run trains: ``all``; ``attention`` for the new attention layers with their
            projections; ``new`` for only the parameters that the replacement added; or ``lora`` for these parameters and
            low-rank adapters of the projections.
        match_lr: peak learning rate of the first run.
        tune_lr: peak learning rate of the second run.
        precision: precision of Lightning's Trainer, such as ``bf16-mixed``.
        accelerator: accelerator of Lightning's Trainer, such as ``gpu``.
        seed: seed of all random number generators.
        val_batches: number of held-out batches in a validation.
    """

    train: list[str]
    val: list[str]
    kind: str
    block_size: int
    length: int
    batch_size: int
    keep: float
    trained: str
    match_lr: float
    tune_lr: float
    precision: str
    accelerator: str
    seed: int
    val_batches: int


def data_options(source: PretrainedSource, settings: Settings, shards: Path) -> dict[str, Any]:
    """Return the configuration of the data module for both training runs, with ``class_path`` and ``init_args``.

    Args:
        source: pretrained model, which determines the tokenizer or the preprocessing of images.
        settings: options of ``lightning linearize``.
        shards: folder with tokenized text; used only for language models.
    """
    options: dict[str, Any]
    if source.domain == "language":
        options = {"train": f"{shards}/train-*.tar", "val": f"{shards}/val-*.tar", "context": settings.length}
        name = "mhla_tasks.language.TokenShards"
    elif source.domain == "text":
        options = {"train": settings.train, "val": settings.val, "tokenizer": source.path, "length": settings.length}
        options["val_passages"] = settings.val_batches * settings.batch_size
        name = "mhla_tasks.language.TextPassages"
    else:
        options = {"train": settings.train, "val": settings.val}
        if source.images is not None:
            options |= source.images.preprocessing.as_dict()
        options["image_size"] = settings.length
        options |= {name: paths[0] for name in ("train", "val") if len(paths := options[name]) == 1}  # a class folder
        name = "mhla_tasks.classification.ImageNetShards"
    return {"class_path": name, "init_args": {**options, "batch_size": settings.batch_size, "num_workers": 0}}


def attention_options(source: PretrainedSource, settings: Settings) -> dict[str, Any]:
    """Return the options, by name, of the attention that replaces the attention of a pretrained model.

    Args:
        source: pretrained model.
        settings: options of ``lightning linearize``.
    """
    options: dict[str, Any] = {"kind": settings.kind}
    if settings.kind != "softmax":
        options["feature_map"] = "learned"
    if settings.kind.startswith("mhla"):
        if source.domain == "image":
            options["block_grid"] = [settings.block_size, settings.block_size]
        else:
            options |= {"block_size": settings.block_size, "mixing": "exponential"}
    if settings.kind == (default := ATTENTION[source.domain]).kind:
        options["options"] = dict(default.options or {})
    return options


def matching(source: PretrainedSource, settings: Settings, data: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the configuration of the first training run, which matches each new attention layer to the original one.

    Args:
        source: pretrained model.
        settings: options of ``lightning linearize``.
        data: configuration of the data module.
        steps: number of optimizer steps.
    """
    model = _model(source, settings, source.path, steps)
    model["init_args"] |= {"train": "new", "training": _training(settings.match_lr, steps)}
    return _run(source, settings, model, data, steps)


def tuning(
    source: PretrainedSource,
    settings: Settings,
    data: dict[str, Any],
    steps: int,
    matched: str,
    layer_kinds: list[str] | None,
) -> dict[str, Any]:
    """Return the configuration of the second training run, which trains the complete model.

    Args:
        source: pretrained model.
        settings: options of ``lightning linearize``.
        data: configuration of the data module.
        steps: number of optimizer steps.
        matched: path of the checkpoint of the first run, from which the second run starts.
        layer_kinds: ``keep`` or ``replace`` for each layer; None to replace all layers.
    """
    model = _model(source, settings, matched, 0)
    model["init_args"] |= {"train": settings.trained, "training": _training(settings.tune_lr, steps)}
    if layer_kinds is not None:
        model["init_args"]["layer_kinds"] = layer_kinds
    return _run(source, settings, model, data, steps)


def _model(source: PretrainedSource, settings: Settings, pretrained: str, layer_steps: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "pretrained": pretrained,
        "attention": attention_options(source, settings),
        "distillation": {"layer_steps": layer_steps, "teacher": source.path},
    }
    if source.domain == "language":
        options["context"] = settings.length
    if source.images is not None:
        options["pooling"] = source.images.pooling
    return {"class_path": MODULES[source.domain], "init_args": options}


def _training(rate: float, steps: int) -> dict[str, Any]:
    warmup = max(1, steps // 10)
    return {"optimizer": {"lr": rate, "weight_decay": 0.0, "warmup_steps": warmup, "min_lr": rate / 20}}


def _run(
    source: PretrainedSource, settings: Settings, model: dict[str, Any], data: dict[str, Any], steps: int
) -> dict[str, Any]:
    monitor, mode = MONITORS[source.domain]
    checkpoint = {"monitor": monitor, "mode": mode, "save_last": True}
    return {
        "seed_everything": settings.seed,
        "model": model,
        "data": data,
        "trainer": {
            "max_steps": steps,
            "accelerator": settings.accelerator,
            "devices": 1,
            "precision": settings.precision,
            "gradient_clip_val": 1.0,
            "log_every_n_steps": max(1, steps // 50),
            "val_check_interval": max(1, steps // CHECKS),
            "check_val_every_n_epoch": None,
            "limit_val_batches": 1.0 if source.domain == "text" else settings.val_batches,
            "num_sanity_val_steps": 0,
            "callbacks": [
                {"class_path": "ModelCheckpoint", "init_args": checkpoint},
                {"class_path": "lightning_mhla.callbacks.LearningCurves"},
                {"class_path": "lightning_mhla.callbacks.RunReport"},
            ],
        },
    }
