"""Measurement of how much replacing each attention layer of a linearized model adds to its loss, for ``lightning layers``."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import LightningDataModule, Trainer

from lightning_mhla.checkpoints.former_names import stored_options
from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint
from lightning_mhla.swap import KEEP, REPLACE, layer_costs, original_attention, swapped_layers
from lightning_mhla.swap.swapping import host_of
from lightning_mhla.system.numbers import rounded
from lightning_mhla.training.encoders import EncoderDistillation
from lightning_mhla.training.linearize import TransferOptions
from mhla_tasks.commandline.trust import AllowError, find_class
from mhla_tasks.tools.export import load_trained


def measure(path: Path, keep: float, batches: int, accelerator: str = "auto") -> dict[str, Any]:
    """Measure how much each replaced attention layer adds to the loss, and choose layers that should keep softmax attention.

    The result describes a hybrid model, which keeps softmax attention in the layers whose replacement adds most to the loss.

    Args:
        path: path of a checkpoint of a LinearizedModel, a TimmClassifier or a linearized encoder, or of a run's folder, whose
            latest complete checkpoint is used.
        keep: share of the layers that keep softmax attention in the hybrid model, at least 0 and below 1.
        batches: number of batches of the run's validation data to measure on.
        accelerator: accelerator of Lightning's Trainer, such as ``cpu`` or ``gpu``.

    Returns:
        A dict with the entries below. The loss of an encoder is the distance of its vectors from those of the original encoder.
        Other losses are cross-entropies in nats. Every loss is a mean per token, image or sample, as ``unit`` states:

        * ``original``: loss with the original attention in all layers.
        * ``replaced``: loss with the new attention in all replaced layers.
        * ``hybrid``: loss of the hybrid model.
        * ``alone``: dict from the index of each replaced layer to the loss if only this layer has the new attention.
        * ``unit``: ``"token"`` for a language model, ``"image"`` for a classifier, ``"sample"`` for an encoder.
        * ``kept``: indices of the layers that keep softmax attention in the hybrid model.
        * ``layer_kinds``: ``keep`` or ``replace`` for each layer of the hybrid model, for the model's option of this name.

    Raises:
        FileNotFoundError: if no checkpoint exists at the path.
        ValueError: if the model has a different class or no replaced layers, if ``keep`` or ``batches`` is out of range, or if
            the data has no validation samples.
    """
    if not 0 <= keep < 1:
        raise ValueError(f"keep={keep} must be a share of the layers, from 0 to below 1")
    if batches < 1:
        raise ValueError(f"batches={batches} must be at least 1")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    module = load_trained(path)
    network: Any = getattr(module, "network", None)
    distillation = getattr(module, "distillation", None)
    if not isinstance(distillation, TransferOptions | EncoderDistillation) or not swapped_layers(network):
        raise ValueError(
            f"{path} contains a {type(module).__name__} without replaced pretrained layers: train a LinearizedModel, a "
            "LinearizedTextEncoder, a LinearizedImageEncoder, or a TimmClassifier with attention"
        )
    data = _data(path)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(
        accelerator=accelerator, devices=1, limit_val_batches=batches, enable_model_summary=False, **options
    )

    units = []

    def loss() -> float:
        (metrics,) = trainer.validate(module, data, verbose=False) or ({},)
        # Only language models log a perplexity; its logarithm is the loss per token.
        if "val/perplexity" in metrics:
            units.append("token")
            return math.log(metrics["val/perplexity"])
        if "val/loss" not in metrics:
            raise ValueError(f"the data of {path}, {type(data).__name__}, has no validation data to measure a loss on")
        units.append("image" if isinstance(distillation, TransferOptions) else "sample")
        return float(metrics["val/loss"])

    costs = layer_costs(network, loss)
    depth = len(host_of(network).layers(network))
    never_replaced = set(range(depth)) - set(swapped_layers(network))
    kept_layers = costs.worst(max(0, round(keep * depth) - len(never_replaced)))
    with original_attention(network, kept_layers):
        hybrid = loss()
    softmax_layers = {*kept_layers, *never_replaced}
    return {
        **vars(costs),
        "unit": units[0],
        "hybrid": hybrid,
        "kept": sorted(softmax_layers),
        "layer_kinds": [KEEP if index in softmax_layers else REPLACE for index in range(depth)],
    }


def table(costs: dict[str, Any]) -> str:
    """Format the result of :func:`measure` as a text table for the terminal.

    Args:
        costs: dict that :func:`measure` returned.
    """
    measured = "distance, mean" if costs["unit"] == "sample" else f"nats per {costs['unit']}"
    lines = [f"{measured:<19} against the original"]
    rows: Sequence[tuple[str, float]] = [
        ("original", costs["original"]),
        *((f"layer {index} new", value) for index, value in costs["alone"].items()),
        ("all new", costs["replaced"]),
        (f"layer {', '.join(map(str, costs['kept']))} kept" if costs["kept"] else "no layer kept", costs["hybrid"]),
    ]
    for name, value in rows:
        difference = value - costs["original"]
        lines.append(f"{name:<18} {rounded(value):>9}  {'+' * (difference >= 0)}{rounded(difference)}")
    return "\n".join([*lines, f"layer_kinds: [{', '.join(costs['layer_kinds'])}]", ""])


def _data(path: Path) -> LightningDataModule:
    """Create the data module of a run from the class name and the options stored in its checkpoint.

    Args:
        path: path of the checkpoint or of the run's folder.

    Raises:
        ValueError: if the checkpoint does not name a data module, or importing the class of the data module is not allowed.
    """
    memory = dict(read_header(resolve_checkpoint(path)).get("datamodule_hyper_parameters") or {})
    class_path = str(memory.get("_class_path", ""))
    if not class_path:
        raise ValueError(f"{path} does not name the data it was trained on: train the model with lightning fit")
    try:
        kind = find_class(class_path, (LightningDataModule,))
    except AllowError as error:
        raise ValueError(f"{path} was trained on data of the class {class_path[:80]}: {error}") from error
    arguments = {key: value for key, value in memory.items() if not key.startswith("_")}
    return kind(**stored_options("data", kind, arguments, path))
