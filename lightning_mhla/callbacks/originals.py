"""Weights that a run started from, and the scores of the model before the run replaced its attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mhla.system.redaction import redacted
from lightning_mhla.system.untrusted import read_json, read_yaml

ORIGINAL = "original"
"""Name of the original model in legends."""
RECORD = "run.json"
"""Name of the file, in the folder of a run, that records its metrics and versions."""
NOT_VALIDATED = ("batch_size", "num_workers", "seed", "augment", "train", "shards")
"""Options of a data module that do not change its validation samples."""


def original_scores(folder: Path) -> dict[str, float]:
    """Return the validation metrics of the model whose attention a run replaced, recorded when that model was trained.

    If the run started from a checkpoint whose name contains a step, the metrics are those of this step. If it started from
    ``last.ckpt`` or from the folder of a run, they are the latest ones. Metrics on different validation data cannot be compared
    with those of the run, and are not returned.

    Args:
        folder: folder of the run that replaced the attention, with ``config.yaml``.

    Returns:
        Metrics by name; empty if the run did not replace attention, if no run with the same validation data trained the
        original model, or if the name of the checkpoint does not show its step.
    """
    config = _options(folder)
    options, data = _model_options(config), config.get("data")
    if not isinstance(options.get("distillation"), Mapping):
        return {}
    start = options.get("pretrained") or options["distillation"].get("teacher")
    original = _run_of(Path(str(start))) if start and "://" not in str(start) else None
    if original is None or not data or _validated(_options(original).get("data")) != _validated(data):
        return {}
    try:
        metrics = read_json(original / RECORD)["metrics"]
        step = _loaded_step(Path(str(start)))
        chosen = {name: [value for at, value in points if step in (None, at)] for name, points in metrics.items()}
        return {str(name): float(values[-1]) for name, values in chosen.items() if values and values[-1] is not None}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):  # written by another version
        return {}


def pretrained_weights(folder: Path) -> str | None:
    """Return the path or name of the pretrained weights that ``config.yaml`` in a run's folder names.

    Args:
        folder: folder of the run.

    Returns:
        The path or name, without access tokens and passwords in a URL; None if there is no readable ``config.yaml``, or if it
        names no weights.
    """
    start = _model_options(_options(folder)).get("pretrained")
    return redacted(start) if isinstance(start, str) else None


def _loaded_step(path: Path) -> int | None:
    """Return the optimizer step in the name of a checkpoint; None for ``last.ckpt`` and for the folder of a run.

    Raises:
        ValueError: if the name of any other checkpoint does not contain a step.
    """
    if path.name == "last.ckpt" or (path.is_dir() and path.suffix != ".ckpt"):
        return None
    match = re.search(r"step=?(\d+)", path.name)
    if match is None:
        raise ValueError(f"the name of {path} has no step")
    return int(match[1])


def _options(folder: Path) -> Mapping[str, Any]:
    """Return the configuration of a run; an empty mapping if the run has no readable configuration."""
    path = folder / "config.yaml"
    try:
        content = read_yaml(path) if path.exists() else {}
    except ValueError:
        content = {}
    return content if isinstance(content, Mapping) else {}


def _model_options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the model in the configuration of a run; an empty mapping if there are none."""
    model = config.get("model")
    options = model.get("init_args") if isinstance(model, Mapping) else None
    return options if isinstance(options, Mapping) else {}


def _run_of(path: Path) -> Path | None:
    """Return ``path`` or the run folder at most two levels above it; None if none of these is the folder of a run."""
    return next((place for place in (path, *list(path.parents)[:2]) if (place / RECORD).is_file()), None)


def _validated(data: Any) -> Any:
    """Return the class path in the configuration of a data module, and the options that determine its validation samples.

    Two data modules validate on the same samples if the results for them are equal. A configuration that is not a mapping is
    returned unchanged.
    """
    if not isinstance(data, Mapping):
        return data
    options = data.get("init_args") or {}
    return data.get("class_path"), {name: value for name, value in options.items() if name not in NOT_VALIDATED}
