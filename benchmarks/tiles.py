"""Time of the operator with different tile sizes of its Triton kernels, one change at a time, and its kernels by time.

    lightning bench tiles --out benchmarks/results/nvidia-h200

The tile sizes in ``mhla_kernels/triton_backend/config.py`` are based on its results. Each row changes one choice for all
launches of a kernel: the number of warps or of pipeline stages, or a side of the tile. Kernels are compiled in parallel first.
A change that exceeds the shared memory, or that the time limit leaves no time for, has no row. On a CPU, the kernels are
interpreted at one small size, as a test of this program.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from mhla_kernels import ExponentialMixing, mhla_attention
from mhla_kernels.triton_backend import config
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention import TERMS
from benchmarks.machine import describe, milliseconds
from benchmarks.shapes import LENGTHS, MODELS, Shape, inputs
from lightning_mhla.system.files import write_json

TINY = Shape("tiny", 1, 1, 32, 8, 16, 16, True)
SHORT = Shape("LM 340M, 2k, C=16", 16, 4, 2048, 16, 128, 256, True)
SHAPES = {shape.name: shape for shape in [*MODELS, *LENGTHS, SHORT]}

CHANGES: dict[str, list[dict[str, int]]] = {
    "attend": [
        {"stages": 1},
        {"stages": 2},
        {"stages": 3},
        {"warps": 8},
        {"rows": 128, "warps": 8},
        {"rows": 32},
        {"columns": 32},
        {"columns": 64},
        {"columns": 128},
        {"slice": 32},
        {"slice": 32, "stages": 3},
        {"slice": 64},
        {"slice": 128},
    ],
    "summary": [{"tokens": 32}, {"tokens": 64}, {"warps": 2}, {"warps": 4}, {"warps": 8}, {"stages": 2}, {"stages": 3}],
    "mix": [{"stages": 3}, {"warps": 8}, {"columns": 64}, {"columns": 256}, {"rows": 64}, {"rows": 128}, {"terms": 64}],
    "mixing_gradient": [{"stages": 2}, {"warps": 2}, {"warps": 4}, {"warps": 8}, {"columns": 32}, {"columns": 128}],
    "pair": [{"columns": 32}, {"warps": 8}, {"stages": 1}, {"stages": 3}],
    "scan": [{"columns": 256}, {"columns": 512}, {"columns": 1024}],
}
"""Changes to the tiles that a function of ``config`` returns, such as ``attend_tiles``, by the beginning of its name."""

PLAN = (
    ("DeiT-S 224", "parallel", ("attend", "pair")),
    ("DiT-XL/2 256 px", "parallel", ("attend", "pair")),
    ("LM 340M, 2k", "chunked", ("attend", "summary", "mix", "mixing_gradient")),
    ("LM 340M, 2k", "exponential", ("scan",)),
    (SHORT.name, "spanning", ("attend",)),
    ("DiT-XL/2 512 px", "chunked", ("attend", "summary", "mixing_gradient")),
    ("SANA-0.6B 1024 px", "chunked", ("summary",)),
    ("LM 340M, 32k, C=64", "chunked", ("mix", "mixing_gradient")),
    ("Wan2.1-1.3B 480x800, 105 blocks", "chunked", ("attend", "mix")),
)
"""Shapes, forms and kernels to measure. ``exponential`` is the chunked form with exponential mixing."""


@dataclass(frozen=True)
class TileJob:
    """Measurement of the operator: name of the shape, form, and changed tiles of a kernel.

    ``kernel`` and ``change`` are empty for unchanged tiles.
    """

    shape: str
    form: str
    kernel: str
    change: dict[str, int]


def jobs() -> list[TileJob]:
    """List all measurements of :data:`PLAN`: each form as it is, then with each change."""
    todo = []
    for shape, form, kernels in PLAN:
        todo.append(TileJob(shape, form, "", {}))
        todo += [TileJob(shape, form, kernel, change) for kernel in kernels for change in CHANGES[kernel]]
    return todo


def changed(job: TileJob) -> AbstractContextManager[Any]:
    """Return a context manager in which launches of a job's kernel use the changed tiles."""
    name = f"{job.kernel or 'attend'}_tiles"
    choose = getattr(config, name)
    return mock.patch.object(config, name, lambda *sizes, **options: replace(choose(*sizes, **options), **job.change))


def prepare(
    shape: Shape, form: str, device: torch.device
) -> tuple[Callable[[], torch.Tensor], Callable[[], tuple[torch.Tensor, ...]]]:
    """Return a function that computes the outputs of the operator, and a function that computes its gradients.

    Args:
        shape: sizes of the random tensors, in bfloat16.
        form: form of the operator, or ``exponential``.
        device: device of the tensors.
    """
    q, k, v, matrix = inputs(shape, device, torch.bfloat16)
    mixing: Any = matrix
    leaves = [q, k, v, matrix]
    if form in ("exponential", "spanning"):
        amplitude, decay = (torch.rand(TERMS, device=device).requires_grad_() for _ in range(2))
        mixing, leaves = ExponentialMixing(amplitude, decay), [q, k, v, amplitude, decay]
    options: dict[str, Any] = {"block_size": shape.block, "causal": shape.causal, "normalize": shape.normalized}

    def forward() -> torch.Tensor:
        name: Any = "chunked" if form == "exponential" else form
        return mhla_attention(q, k, v, mixing, form=name, backend="triton", **options)

    cotangent = torch.randn_like(v)
    return forward, lambda: torch.autograd.grad(forward(), leaves, cotangent)


def build(job: TileJob) -> tuple[TileJob, str | None]:
    """Compile the kernels of a job, by running the job on a small batch.

    Returns:
        The job, and a description of the error if a kernel cannot be compiled or run; otherwise None.
    """
    try:
        with changed(job):
            prepare(replace(SHAPES[job.shape], batch=1), job.form, torch.device("cuda"))[1]()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, for example: there is no such tile
        return job, f"{type(error).__name__}: {str(error)[:200]}"
    return job, None


def measure(job: TileJob, shape: Shape, device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure the milliseconds of a forward pass, and of a forward and a backward pass, with the tiles of a job.

    Args:
        job: form of the operator, and changed tiles.
        shape: sizes of the tensors.
        device: device of the tensors.
        seconds: approximate duration of each measurement in seconds.
    """
    with changed(job):
        forward, both = prepare(shape, job.form, device)
        with torch.no_grad():
            forward_ms = milliseconds(forward, device, seconds)
        return {**asdict(job), "forward_ms": forward_ms, "both_ms": milliseconds(both, device, seconds)}


def kernels_by_time(shape: Shape, form: str) -> list[tuple[str, float]]:
    """Return the GPU kernels of a forward and backward pass, each with its time in microseconds, the slowest first.

    Args:
        shape: sizes of the tensors.
        form: form of the operator, or ``exponential``.
    """
    both = prepare(shape, form, torch.device("cuda"))[1]
    both()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        both()
        torch.cuda.synchronize()
    times = [(event.name, event.device_time) for event in run.events() if event.device_time]
    return sorted(times, key=lambda pair: -pair[1])


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the rows, each with its time relative to that of the same operator without a change."""
    table = Table(title="milliseconds; ratio to the tiles as they are")
    for title in ("shape", "form", "kernel", "change", "forward", "both", "ratio"):
        table.add_column(title, justify="right" if title in ("forward", "both", "ratio") else "left")
    unchanged = {(row["shape"], row["form"]): row["both_ms"] for row in rows if not row["kernel"]}
    for row in rows:
        change = ", ".join(f"{name} {size}" for name, size in row["change"].items())
        ratio = row["both_ms"] / unchanged[row["shape"], row["form"]]
        times = (f"{row['forward_ms']:.3f}", f"{row['both_ms']:.3f}", f"{ratio:.2f}")
        table.add_row(row["shape"], row["form"], row["kernel"], change, *times)
    console.print(table)


def main() -> None:
    """Measure all jobs that fit into the time limit, write JSON, and print a table."""
    parser = argparse.ArgumentParser(prog="lightning bench tiles", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.05, help="duration of a measurement (default: 0.05)")
    parser.add_argument("--minutes", type=float, default=5.0, help="time limit, compilation included (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for tiles-*.json")
    args = parser.parse_args()
    console, device = Console(width=150), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deadline = time.monotonic() + 60 * args.minutes
    profiles: list[dict[str, Any]] = []
    if device.type == "cpu":
        todo = [
            TileJob(TINY.name, "chunked", kernel, {"stages": 1} if kernel else {}) for kernel in ("", "attend", "mix")
        ]
        ready, shapes = todo, {TINY.name: TINY}
    else:
        todo, ready, shapes = jobs(), [], SHAPES
        for name, form in dict.fromkeys((job.shape, job.form) for job in todo):
            profiles.append({"shape": name, "form": form, "microseconds": kernels_by_time(SHAPES[name], form)})
        # CUDA has started in this process, and a forked process could not use it.
        with get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
            for job, error in pool.imap(build, todo):
                if error is None:
                    ready.append(job)
                else:
                    console.print(f"no row: {job}: {error}", highlight=False)
                if time.monotonic() > deadline - 25 * args.minutes:  # leave time to measure
                    break
    rows = []
    for job in ready:
        if time.monotonic() > deadline:
            break
        rows.append(measure(job, shapes[job.shape], device, args.seconds))
    print_table(rows, console)
    console.print(f"{len(rows)} of {len(todo)} measured", highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)
    result = args.out / f"tiles-{device.type}.json"
    write_json(result, {"machine": describe(device), "profiles": profiles, "rows": rows}, indent=1)
    console.print(f"written: {result}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
