"""Options of models by their plain names, such as ``dim`` and ``ema_decay``, for tests that set many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from mhla_tasks.classification.module import VisionShape
from mhla_tasks.diffusion.module import DiTShape
from mhla_tasks.language.module import DecoderShape

from lightning_mhla.training.options import TrainingOptions

GROUPS = {"shape": (VisionShape, DiTShape, DecoderShape), "training": (TrainingOptions,)}


def grouped(base: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Add options to a copy of ``base``, in which those of the shape and of the training are in groups."""
    result = dict(base or {})
    for name, value in options.items():
        group = next(
            (g for g, kinds in GROUPS.items() if any(name in (f.name for f in fields(k)) for k in kinds)), None
        )
        if group is None:
            result[name] = value
        else:
            plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            result[group] = {**result.get(group, {}), name: plain}
    return result
