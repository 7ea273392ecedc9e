"""Time of each form of the operator, compared with softmax and linear attention, a loop over blocks, and the minimal time.

    lightning bench attention
    lightning bench attention --device cpu
    lightning bench attention --authors ../MHLA

The peers are: ``softmax``, torch's scaled_dot_product_attention with ``H * Dv / Dk`` heads of width Dk, which is the same total
width (flash attention on a GPU); ``fla``, chunked linear attention of flash-linear-attention, if installed; ``loop``, a Python
loop over blocks that sums the earlier summaries again for each block, as in the code of the paper's authors (``naive_chunk``,
uncompiled); ``authors``, the authors' code itself, from a checkout.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import torch
from mhla_kernels import ExponentialMixing, mhla_attention
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks.machine import describe, milliseconds, peak_bytes
from benchmarks.peers import authors, flash_linear_attention, loop_over_blocks, softmax, softmax_backend
from benchmarks.shapes import LENGTHS, MODELS, SMALL, Rates, Shape, inputs, least_cost

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Method = tuple[Callable[[], Tensor], list[Tensor]]
OURS = ("auto", "parallel", "chunked", "exponential")
PEERS = ("softmax", "fla", "loop", "authors")
TERMS = 4
"""Number of terms of the exponential mixing that is measured."""

LONGEST_LOOP = 128
"""Largest number of blocks for which Python loops are measured on a GPU. Their time grows with the square of this number."""


def methods(shape: Shape, device: torch.device, dtype: torch.dtype, checkout: Path | None) -> dict[str, Method]:
    """Return the implementations of attention to compare, by name.

    Args:
        shape: sizes of the tensors.
        device: device of the tensors.
        dtype: dtype of q, k and v.
        checkout: folder with the code of the paper's authors; None to leave it out.

    Returns:
        For each implementation, a function without arguments that computes the outputs, and the tensors for which the
        backward pass computes gradients.
    """
    q, k, v, mixing = inputs(shape, device, dtype)
    options: dict[str, Any] = {"block_size": shape.block, "causal": shape.causal, "normalize": shape.normalized}
    leaves = [q, k, v, mixing]

    def ours(form: str) -> Callable[[], Tensor]:
        return lambda: mhla_attention(q, k, v, mixing, form=form, **options)  # type: ignore[arg-type]

    methods_by_name: dict[str, Method] = {"auto": (ours("auto"), leaves), "chunked": (ours("chunked"), leaves)}
    if shape.tokens <= 4096:
        methods_by_name["parallel"] = (ours("parallel"), leaves)
    if shape.causal:
        amplitude, decay = (torch.rand(TERMS, device=device).requires_grad_() for _ in range(2))
        exponential = ExponentialMixing(amplitude, decay)
        methods_by_name["exponential"] = (
            lambda: mhla_attention(q, k, v, exponential, form="chunked", **options),
            [q, k, v, exponential.amplitude, exponential.decay],
        )
        linear = flash_linear_attention() if device.type == "cuda" else None
        if linear is not None:
            methods_by_name["fla"] = (lambda: linear(q, k, v), leaves[:3])
        if device.type == "cpu" or shape.blocks <= LONGEST_LOOP:
            methods_by_name["loop"] = (lambda: loop_over_blocks(q, k, v, mixing, shape.block), leaves)
            if checkout is not None:
                run = authors(checkout)
                methods_by_name["authors"] = (lambda: run(q, k, v, mixing, shape.block), leaves)
    heads = shape.heads * shape.value_width // shape.key_width
    size = (shape.batch, heads, shape.tokens, shape.key_width)
    soft = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    backend = softmax_backend(device)
    methods_by_name["softmax"] = (lambda: softmax(soft[0], soft[1], soft[2], shape.causal, backend), soft)
    return methods_by_name


def measure(
    shape: Shape, device: torch.device, dtype: torch.dtype, seconds: float, rates: Rates, checkout: Path | None = None
) -> list[dict[str, Any]]:
    """Measure every implementation of attention on one shape.

    Args:
        shape: sizes of the tensors.
        device: device of the tensors.
        dtype: dtype of q, k and v.
        seconds: approximate duration of each measurement in seconds.
        rates: peak rates of the device, for the minimal time (floor).
        checkout: folder with the code of the paper's authors; None to leave it out.

    Returns:
        A row for each implementation: milliseconds and memory, and the error if it fails. On a GPU, rows of the operator in
        bfloat16 also have minimal milliseconds (floors) and rates.
    """
    rows = []
    for name, (call, leaves) in methods(shape, device, dtype, checkout).items():
        row: dict[str, Any] = {**asdict(shape), "normalize": shape.normalized, "method": name}
        if name == "softmax":
            row["backend"] = getattr(softmax_backend(device), "name", "chosen by torch")
        try:
            row |= _times(call, leaves, device, seconds)
        except Exception as error:  # an error must not prevent the measurement of the other methods
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if name in OURS and device.type == "cuda" and dtype == torch.bfloat16 and "error" not in row:
            row |= _against_floor(shape, row, rates, TERMS if name == "exponential" else None)
        rows.append(row)
    return rows


def _times(
    call: Callable[[], Tensor], leaves: list[Tensor], device: torch.device, seconds: float
) -> dict[str, float | int | None]:
    with torch.no_grad():
        forward = milliseconds(call, device, seconds)
        cotangent = torch.randn_like(call())

    def both() -> object:
        return torch.autograd.grad(call(), leaves, cotangent)

    return {
        "forward_ms": forward,
        "both_ms": milliseconds(both, device, seconds),
        "peak_bytes": peak_bytes(both, device),
    }


def _against_floor(shape: Shape, row: dict[str, Any], rates: Rates, terms: int | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key, backward in (("forward", False), ("both", True)):
        cost, time = least_cost(shape, rates, backward, terms), row[f"{key}_ms"]
        floor = cost.milliseconds(rates)
        figures |= {f"{key}_floor_ms": floor, f"{key}_over_floor": time / floor}
        figures |= {f"{key}_GBps": cost.bytes / time / 1e6, f"{key}_TFLOPs": cost.operations / time / 1e9}
    return figures


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a row for each shape and implementation, with the time of each peer divided by the time of the row.

    Args:
        rows: results of :func:`measure`.
        console: console to print to.
    """
    table = Table(title="milliseconds (median), forward | forward + backward; ratio: the peer's time over this row's")
    peers = [peer for peer in PEERS if any(row["method"] == peer for row in rows)]
    titles = ["shape", "method", "ms", "x floor", "GB/s", "TFLOP/s", *(f"{peer} /" for peer in peers), "peak MB"]
    for title in titles:
        table.add_column(title, justify="left" if title in ("shape", "method") else "right", no_wrap=True)

    def pair(row: dict[str, Any], suffix: str, digits: int) -> str:
        values = [row.get(f"{key}_{suffix}") for key in ("forward", "both")]
        return " | ".join("" if value is None else f"{value:.{digits}f}" for value in values) if any(values) else ""

    def ratio(row: dict[str, Any], peer: dict[str, Any] | None) -> str:
        if peer is None or "error" in peer or "error" in row:
            return ""
        return " | ".join(f"{peer[f'{key}_ms'] / row[f'{key}_ms']:.1f}" for key in ("forward", "both"))

    for name in dict.fromkeys(row["name"] for row in rows):
        group = {row["method"]: row for row in rows if row["name"] == name}
        for method, row in group.items():
            memory = row.get("peak_bytes")
            table.add_row(
                name if method == "auto" else "",
                method,
                row["error"][:30] if "error" in row else pair(row, "ms", 3),
                pair(row, "over_floor", 2),
                pair(row, "GBps", 0),
                pair(row, "TFLOPs", 0),
                *(ratio(row, group.get(peer)) for peer in peers),
                "" if memory is None else f"{memory / 1e6:.0f}",
                end_section=method == "softmax",
            )
    console.print(table)


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot the time per token over the number of tokens N, for the causal shapes with the shortest blocks.

    Args:
        rows: results of :func:`measure`.
        title: title of the figure.
        path: path of the picture.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    shown = [row for row in rows if row["causal"] and row["block"] == min(r["block"] for r in rows if r["causal"])]
    for axis, key, label in zip(axes, ("forward_ms", "both_ms"), ("forward", "forward + backward"), strict=True):
        for method in ("loop", "authors", "softmax", "fla", "parallel", "chunked", "exponential", "auto"):
            points = [
                (row["tokens"], 1e3 * row[key] / (row["batch"] * row["tokens"]))
                for row in shown
                if row["method"] == method and "error" not in row
            ]
            if points:
                style = "--" if method == "auto" else "-"
                axis.plot(*zip(*sorted(points), strict=True), style, marker="o", markersize=3, label=method)
        axis.set(xscale="log", yscale="log", xlabel="tokens N", title=label)
        axis.set_xticks(sorted({row["tokens"] for row in shown}))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds a token")
    axes[1].legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure all shapes, write JSON after each, and print and draw the results."""
    parser = argparse.ArgumentParser(prog="lightning bench attention", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of each measurement in seconds")
    parser.add_argument("--longest", type=int, default=32768, help="maximum number of tokens of a shape")
    parser.add_argument("--authors", type=Path, metavar="DIR", help="checkout of the authors' code, to measure it too")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="bandwidth for the floor, in TB/s")
    parser.add_argument("--rate", type=float, default=790, help="operations per second for the floor, in TFLOP/s")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), help="folder for attention-*.json and .png"
    )
    args = parser.parse_args()

    device, console = torch.device(args.device), Console(width=150)
    dtype_name = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    rates = Rates(args.bandwidth * 1e12, args.rate * 1e12)
    shapes = [shape for shape in (MODELS + LENGTHS if device.type == "cuda" else SMALL) if shape.tokens <= args.longest]
    machine = describe(device)
    args.out.mkdir(parents=True, exist_ok=True)
    result = args.out / f"attention-{device.type}.json"
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        for shape in progress.track(shapes, description="measuring"):
            rows += measure(shape, device, getattr(torch, dtype_name), args.seconds, rates, args.authors)
            content = {"machine": machine, "dtype": dtype_name, "rates": asdict(rates), "rows": rows}
            result.write_text(json.dumps(content, indent=1) + "\n")
    print_table(rows, console)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    picture = result.with_suffix(".png")
    draw(rows, f"causal, H=4, Dk=128, Dv=256, C=64, {dtype_name}, {machine['device']}", picture)
    console.print(f"written: {result}, {picture}")


if __name__ == "__main__":
    main()
