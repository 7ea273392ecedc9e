"""What a result depends on: machine, versions, date. And how a time is taken."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Machine, thread count, versions and date, for a result file."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "date": date.today().isoformat(),
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def milliseconds(call: Callable[[], object], device: torch.device, seconds: float, least: int = 3) -> float:
    """Median time of ``call`` in milliseconds, after one warm-up, over at least ``least`` calls and ``seconds``."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    first = once()
    times = [once() for _ in range(max(least, min(50, int(seconds * 1e3 / max(first, 1e-3)))))]
    return median(times)
