"""Check that a batch of any data module has the keys that a training module reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_batch(batch: Any, keys: tuple[str, ...], part: str) -> None:
    """Check that a batch has the keys that the steps of a training module read.

    If ``keys`` is not empty, and a batch for validation, test or prediction has no key ``valid``, the key is added: a bool
    tensor ``[B]``, True for each of the B samples, so that metrics count all samples.

    Args:
        batch: batch of any data module, modified in place.
        keys: required keys. A key such as ``a|b`` requires ``a`` or ``b``. If empty, only the type of the batch is checked.
        part: use of the batch: ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``.

    Raises:
        ValueError: if the batch is not a dict or lacks a key.
    """
    entries = batch if isinstance(batch, dict) else {}
    present_keys = [next((name for name in key.split("|") if name in entries), None) for key in keys]
    if None in present_keys or not isinstance(batch, dict):
        expected = ", ".join(key.replace("|", " or ") for key in keys)
        has = f"has only {', '.join(map(str, entries))}" if entries else f"is a {type(batch).__name__} without keys"
        raise ValueError(
            f"a {part} batch must be a dict with {expected}; this one {has}. docs/guides/data.md shows data modules of your own"
        )
    if keys and part != "training" and "valid" not in batch:
        devices = [value.device for value in batch.values() if isinstance(value, Tensor)]
        batch["valid"] = torch.ones(
            len(batch[present_keys[0]]), dtype=torch.bool, device=devices[0] if devices else None
        )
