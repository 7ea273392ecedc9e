"""The model card that an export leaves beside the weights: ``README.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from mhla_kernels.version import __version__

from lightning_mhla.callbacks.page import duration
from lightning_mhla.training.module import TrainingModule

PAPER = "https://arxiv.org/abs/2601.07832"


MARK = "<!-- lightning export "


def is_own(text: str) -> bool:
    """Whether a card is as :func:`write_card` wrote it."""
    before, mark, digest = text.rpartition(MARK)
    return bool(mark) and digest.strip() == f"{_digest(before)} -->"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_card(
    module: TrainingModule, content: Mapping[str, Any], path: Path, folder: str, loading: str, license_name: str | None
) -> None:
    """Write a card: what the model is, how to load it, data, metrics, configuration, versions, licence.

    Args:
        module: that was exported.
        content: its checkpoint, without the tensors.
        path: path of the card.
        folder: name of the folder of the export.
        loading: Python that loads it, with ``FOLDER`` for its path.
        license_name: identifier of the model's licence; None where it is not stated.
    """
    memory, data = (_options(content.get(key)) for key in ("hyper_parameters", "datamodule_hyper_parameters"))
    name = type(module).__name__
    network = getattr(module, "network", module)
    count = sum(parameter.numel() for parameter in network.parameters())
    header = {"library_name": "lightning-mhla", "tags": ["mhla", "linear-attention"]}
    header |= {"license": license_name} if license_name else {}
    article = "An" if name[0] in "AEIOU" else "A"
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {folder}",
        f"{article} `{name}` of {count:,} parameters, trained with lightning-mhla{_attention(memory)}.",
        f"## Loading\n\n```python\n{loading.replace('FOLDER', folder)}\n```",
        f"## Training data\n\n{_data(content, data)}",
        f"## Metrics\n\n{_metrics(content)}",
        f"## Training\n\n{content.get('global_step', 0):,} optimiser steps, {content.get('epoch', 0) + 1} epochs"
        f"{_spent(content)}. Options of the model and its optimiser:\n\n```yaml\n{_yaml(memory)}```",
        f"## Versions\n\nlightning-mhla {__version__}, Lightning {content.get('pytorch-lightning_version', 'unknown')}"
        + (
            f" (training); torch {torch_version}"
            if (torch_version := _report(content).get("versions", {}).get("torch"))
            else ""
        )
        + ".",
        f"## Licence\n\n{license_name or 'Not stated. Name it with `lightning export --license IDENTIFIER`.'}",
    ]
    text = "\n\n".join(parts) + "\n\n"
    path.write_text(f"{text}{MARK}{_digest(text)} -->\n")


def _options(memory: Any) -> dict[str, Any]:
    """Options that a checkpoint remembers, and the class that they are of."""
    found = {key: value for key, value in (memory or {}).items() if not key.startswith("_")}
    class_path = (memory or {}).get("_class_path")
    return {"class_path": class_path, "init_args": found} if class_path else found


def _attention(memory: Mapping[str, Any]) -> str:
    options = memory.get("init_args", memory)
    kind = (options.get("attention") or {}).get("kind")
    kinds = dict.fromkeys(options.get("layer_kinds") or [kind])
    named = ", ".join(f"`{kind}`" for kind in kinds if kind)
    return f"; attention: {named}{f' ([paper]({PAPER}))' if 'mhla' in kinds else ''}" if named else ""


def _report(content: Mapping[str, Any]) -> dict[str, Any]:
    return dict((content.get("callbacks") or {}).get("RunReport") or {})


def _data(content: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if not data:
        return "The checkpoint does not say which."
    return f"```yaml\n{_yaml(data)}```"


def _metrics(content: Mapping[str, Any]) -> str:
    rows = [(name, *points[-1]) for name, points in _report(content).get("points", {}).items() if points]
    if not rows:
        return "The checkpoint holds none; `lightning validate` measures them."
    lines = [f"| `{name}` | {value:.4g} | {step:,} |" for name, step, value in rows]
    return "\n".join(["| metric | value | step |", "| --- | ---: | ---: |", *lines])


def _spent(content: Mapping[str, Any]) -> str:
    seconds = _report(content).get("seconds")
    return f", {duration(seconds)}" if seconds else ""


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Plain, sort_keys=False, allow_unicode=True)


class _Plain(yaml.SafeDumper):
    """Writes what it has no YAML for as text."""


_Plain.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))
