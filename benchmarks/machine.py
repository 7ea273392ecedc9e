"""Description of the machine for result files, and measurement of time and memory."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Return the device, the number of threads, versions and the date, for a result file."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flash-linear-attention", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        versions["cuda"] = torch.version.cuda or ""
    return {"date": date.today().isoformat(), "device": name, "threads": torch.get_num_threads(), **versions}


def processor_name() -> str:
    """Return the name of the CPU as its manufacturer states it, or that of its architecture if unknown."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def milliseconds(call: Callable[[], object], device: torch.device, seconds: float, least: int = 3) -> float:
    """Measure the median time of a function in milliseconds, after warm-up calls.

    On a GPU, the function is captured in a CUDA graph, whose replays are timed between events. The time therefore excludes
    launches from Python.

    Args:
        call: function to measure.
        device: device on which the function computes.
        seconds: approximate duration of the measurement in seconds. There are at most 50 calls on a CPU, and 200 on a GPU.
        least: minimum number of calls.
    """
    if device.type == "cuda":
        return _graph_milliseconds(call, seconds, least)

    def once() -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    first = min(once() for _ in range(2))  # the very first call also loads code and allocates memory
    return median(once() for _ in range(max(least, min(50, int(seconds * 1e3 / max(first, 1e-3))))))


def _graph_milliseconds(call: Callable[[], object], seconds: float, least: int) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # capture needs warm-up calls on a stream that is not the default one
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()

    def once() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    first = median(once() for _ in range(3))
    return median(once() for _ in range(max(least, min(200, int(seconds * 1e3 / max(first, 1e-3))))))


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Measure the peak GPU memory that a function allocates, in bytes, beyond earlier allocations; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    earlier = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - earlier
