"""Measured on this machine: forms, which ``form="auto"`` takes before it asks the shipped costs, and launches of kernels.

Written by ``lightning tune``, a file of each for a device and its versions in the user's cache.
"""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch

from mhla_kernels.backend import ChosenForm
from mhla_kernels.verdicts import cache_folder, environment, forget, launches_path


class Setting(NamedTuple):
    """A call of the operator as far as the cheaper form depends on it.

    Attributes:
        backend: ``"torch"`` or ``"triton"``.
        dtype: dtype of q, without ``torch.``.
        rows: B * H.
        tokens: N.
        blocks: M.
        key_width: Dk.
        value_width: Dv.
        causal: as of the call, like the next one.
        normalize: see there.
        mixing: the kind of coefficients.
    """

    backend: str
    dtype: str
    rows: int
    tokens: int
    blocks: int
    key_width: int
    value_width: int
    causal: bool
    normalize: bool
    mixing: str

    def __str__(self) -> str:
        flags = [name for name in ("causal", "normalize") if getattr(self, name)]
        size = f"{self.rows}x{self.tokens}/{self.blocks}", f"{self.key_width}x{self.value_width}"
        return " ".join([self.backend, self.dtype, *size, self.mixing, *flags])


recorded: list[Setting] | None = None
"""While a list, takes the setting of every call with ``form="auto"``."""


def path_of(device_type: str) -> Path:
    """Of the measured forms for the first device of a type."""
    found = {"torch": torch.__version__, "device": processor_name()}
    if device_type != "cpu":
        found = environment(f"{device_type}:0")
    return cache_folder() / "forms" / f"{sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]}.json"


def has_forms(device_type: str) -> bool:
    """Whether :func:`tuned_form` has anything to say, or to record, for a type of device."""
    return recorded is not None or bool(_forms(device_type))


def tuned_form(device_type: str, *setting: str | int | bool) -> ChosenForm | None:
    """The form that was measured to be faster for a :class:`Setting`, None where none was."""
    given = Setting(*setting)  # type: ignore[arg-type]
    if recorded is not None:
        recorded.append(given)
    return _forms(device_type).get(given)


class Launch(NamedTuple):
    """How a kernel is scheduled: warps of a program, and stages of its loops' pipeline."""

    warps: int
    stages: int


trying: dict[str, Launch] | None = None
"""While a dict, what is being measured; it takes the launches that are asked for and are not in it."""


def tuned_launch(device: str, kernel: str, shipped: Launch) -> Launch:
    """How to launch a kernel, named with its dtype, widths and form: as measured, or as shipped."""
    if trying is not None:
        return trying.setdefault(kernel, _launches(device).get(kernel, shipped))
    return _launches(device).get(kernel, shipped)


def keep_launches(device: str, launches: dict[str, Launch]) -> Path:
    """Add measured launches to those that are kept; the file. Kernels that are launched otherwise are tried again."""
    path = launches_path(device)
    _launches.cache_clear()
    _write(
        path, json.dumps({name: list(launch) for name, launch in {**_launches(device), **launches}.items()}, indent=1)
    )
    _launches.cache_clear()
    forget()
    return path


@lru_cache
def _launches(device: str) -> dict[str, Launch]:
    try:
        kept = json.loads(launches_path(device).read_text())
        return {str(name): Launch(int(warps), int(stages)) for name, (warps, stages) in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.part")
    aside.write_text(text + "\n")
    aside.replace(path)


def keep_forms(device_type: str, forms: dict[Setting, ChosenForm]) -> Path:
    """Add measured forms to those that are kept; the file."""
    path = path_of(device_type)
    _forms.cache_clear()
    kept = [{**setting._asdict(), "form": form} for setting, form in {**_forms(device_type), **forms}.items()]
    _write(path, "[\n" + ",\n".join(f" {json.dumps(row)}" for row in kept) + "\n]")
    _forms.cache_clear()
    return path


@lru_cache
def _forms(device_type: str) -> dict[Setting, ChosenForm]:
    if device_type != "cpu" and (device_type != "cuda" or not torch.cuda.is_available()):
        return {}
    try:
        rows = json.loads(path_of(device_type).read_text())
        return {Setting(**{name: row[name] for name in Setting._fields}): row["form"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError):  # not there, torn, or of another version
        return {}


def processor_name() -> str:
    """Of the CPU, as its maker writes it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
