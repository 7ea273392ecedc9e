"""Complete diffusion transformers: time and memory of a training step, for each kind of attention and each image size.

    lightning bench models --out benchmarks/results                      # on a GPU if there is one
    lightning bench models --device cpu --models S/2 --pixels 256 512

A step is a forward and backward pass of DiT's objective, for DiT-S/2 and DiT-XL/2 on latents of 256, 512 and 1,024 pixels (256,
1,024 and 4,096 tokens) with M = 16 blocks. A GPU computes in bfloat16, a CPU in float32, one image at a time. Each measurement
runs in its own process, whose peak memory is recorded. Rows that a result file already has are kept, so a stopped benchmark
resumes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mhla_tasks.diffusion import DiT
from mhla_tasks.diffusion.process import ProcessConfig, make_process

from benchmarks.machine import describe
from lightning_mhla import AttentionConfig
from lightning_mhla.system.files import write_json

KINDS = ("softmax", "linear", "mhla")
MODELS = {"S/2": "S", "XL/2": "XL"}
PIXELS = (256, 512, 1024)
MINUTE = 60.0
GPU_IMAGES = {
    ("S/2", 256): 256,
    ("S/2", 512): 64,
    ("S/2", 1024): 16,
    ("XL/2", 256): 32,
    ("XL/2", 512): 8,
    ("XL/2", 1024): 2,
}
"""Batch size for a GPU with 80 GB by model and image size in pixels. All batches of a model have the same number of tokens."""


def training_step(model: str, pixels: int, kind: str, images: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs a forward and backward pass of a diffusion transformer on random latents.

    Args:
        model: size of the model, such as ``S/2``.
        pixels: height and width of the images in pixels.
        kind: kind of attention.
        images: batch size.
        device: device of the model.
    """
    torch.manual_seed(0)
    attention = AttentionConfig(kind=kind, block_grid=[4, 4])
    size: Any = MODELS[model]
    network = DiT(pixels // 8, 4, 1000, attention, size=size, out_channels=8).to(device)
    process = make_process(ProcessConfig())
    clean = torch.randn(images, 4, pixels // 8, pixels // 8, device=device)
    labels = torch.randint(0, 1000, (images,), device=device)
    times = torch.randint(0, 1000, (images,), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = process.losses(network, clean, torch.randn_like(clean), times, labels).mean()
        loss.backward()
        network.zero_grad(set_to_none=True)

    return step


def measure(model: str, pixels: int, kind: str, images: int, device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure the median seconds of a training step, images per second, and peak memory in bytes.

    A step that takes more than a minute is not repeated.

    Args:
        model: size of the model, such as ``S/2``.
        pixels: height and width of the images in pixels.
        kind: kind of attention.
        images: batch size.
        device: device of the model.
        seconds: approximate duration of the measurement in seconds, after the first step.
    """
    step = training_step(model, pixels, kind, images, device)

    def once() -> float:
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = once()
    if device.type == "cuda":
        once()
        torch.cuda.reset_peak_memory_stats()
        first = once()
    again = 0 if first > MINUTE else max(1, min(50, round(seconds / first)))
    times = [once() for _ in range(again)] or [first]
    peak = (
        torch.cuda.max_memory_allocated()
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    step_seconds = median(times)
    return {
        "model": model,
        "pixels": pixels,
        "tokens": (pixels // 16) ** 2,
        "kind": kind,
        "images": images,
        "seconds": step_seconds,
        "images_per_second": images / step_seconds,
        "peak_bytes": peak,
    }


def measure_apart(
    model: str, pixels: int, kind: str, images: int, device: torch.device, seconds: float
) -> dict[str, Any]:
    """Run :func:`measure` with the same arguments in a separate process.

    Returns:
        The result of :func:`measure`; if the process fails, a row with the last line of its error output as ``failed``.
    """
    case = json.dumps([model, pixels, kind, images, str(device), seconds])
    command = [sys.executable, "-m", "benchmarks.models", "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        return {"model": model, "pixels": pixels, "kind": kind, "images": images, "failed": reason[0]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results as a Markdown table.

    It has a line for each model and image size, a column for each kind of attention, and the ratio of mhla to softmax.
    """
    lines = [
        "| model | pixels | tokens | batch size | softmax | linear | mhla | mhla / softmax |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    cases = {(row["model"], row["pixels"], row["images"]): (row["pixels"] // 16) ** 2 for row in rows}
    for (model, pixels, images), tokens in cases.items():
        row_by_kind = {
            row["kind"]: row for row in rows if (row["model"], row["pixels"], row["images"]) == (model, pixels, images)
        }
        cells = [_cell(row_by_kind.get(kind)) for kind in KINDS]
        speed = {kind: row["images_per_second"] for kind, row in row_by_kind.items() if "seconds" in row}
        ratio = f"{speed['mhla'] / speed['softmax']:.2f}" if {"mhla", "softmax"} <= set(speed) else ""
        lines.append(f"| {' | '.join([f'DiT-{model}', f'{pixels:,}', f'{tokens:,}', str(images), *cells, ratio])} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return f"failed: {row['failed']}"
    seconds, memory = row["seconds"] / row["images"], row["peak_bytes"] / 2**30
    speed = f"{1 / seconds:.3g} images/s" if seconds < 0.1 else f"{seconds:.3g} s an image"
    return f"{speed}, {memory:.1f} GiB"


def main() -> None:
    """Measure the combinations that the result file does not have yet, write JSON after each, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pixels", nargs="+", type=int, default=list(PIXELS))
    parser.add_argument("--images", type=int, help="batch size (default: 1 on a CPU, sizes that fill 80 GB on a GPU)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="approximate duration of each measurement in seconds (default: 10)"
    )
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        model, pixels, kind, images, name, seconds = json.loads(args.case)
        print(json.dumps(measure(model, pixels, kind, images, torch.device(name), seconds)))
        return
    device = torch.device(args.device)
    path = None if args.out is None else args.out / f"models-{device.type}.json"
    machine = describe(device)
    previous = json.loads(path.read_text()) if path is not None and path.exists() else {}
    # Rows count again only if device, threads and versions are equal; the date may differ.
    undated, previous_machine = ({**facts, "date": None} for facts in (machine, previous.get("machine", {})))
    rows = [row for row in previous["rows"] if "seconds" in row] if previous_machine == undated else []
    done = {(row["model"], row["pixels"], row["kind"], row["images"]) for row in rows}
    for model in args.models:
        for pixels in args.pixels:
            images = args.images or (GPU_IMAGES.get((model, pixels), 1) if device.type == "cuda" else 1)
            for kind in KINDS:
                if (model, pixels, kind, images) in done:
                    continue
                rows.append(measure_apart(model, pixels, kind, images, device, args.seconds))
                rows.sort(key=lambda row: (list(MODELS).index(row["model"]), row["pixels"], KINDS.index(row["kind"])))
                if path is not None:
                    write_json(path, {"machine": machine, "rows": rows}, indent=2)
    print(table(rows))


if __name__ == "__main__":
    main()
