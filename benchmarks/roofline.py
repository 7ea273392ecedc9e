"""The operator compared with its matrix products alone: the share of the batched-product rate that it reaches on a CPU.

    lightning bench roofline --out benchmarks/results

For each shape, ``torch.bmm`` computes only the matrix products of the parallel form and of the chunked form, on contiguous
tensors, without masks, feature maps, normalizers or copies. The shorter of the two times is the bound of a forward pass. A
backward pass has two products for each of these, so the bound of both passes is three times as large. The share is the bound
divided by the time of the operator. It can exceed 1 if the operator needs fewer operations: in causal attention, half of some
products is masked. All measurements alternate, and medians of the runs are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mhla_kernels import mhla_attention
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.shapes import SMALL, Shape, inputs
from lightning_mhla.system.files import write_json


def products(shape: Shape) -> dict[str, Callable[[], list[Tensor]]]:
    """Return functions that compute only the matrix products of a forward pass of the operator, by form.

    Args:
        shape: sizes of the call.
    """
    rows, n, m, c = shape.batch * shape.heads, shape.tokens, shape.blocks, shape.block
    k, v = shape.key_width, shape.value_width
    queries, keys, values = torch.rand(rows, n, k), torch.rand(rows, k, n), torch.rand(rows, n, v)
    scores = torch.rand(rows, n, n) if n <= 4096 else None
    block_queries, block_keys, block_values = (
        torch.rand(rows * m, c, k),
        torch.rand(rows * m, k, c),
        torch.rand(rows * m, c, v),
    )
    mixing, summaries = torch.rand(rows, m, m), torch.rand(rows, m, k * v)
    mixed, block_scores = torch.rand(rows * m, k, v), torch.rand(rows * m, c, c)

    def parallel() -> list[Tensor]:
        assert scores is not None
        return [torch.bmm(queries, keys), torch.bmm(scores, values)]

    def chunked() -> list[Tensor]:
        out = [torch.bmm(block_keys, block_values), torch.bmm(mixing, summaries), torch.bmm(block_queries, mixed)]
        if shape.causal:  # pairs inside a block
            out += [torch.bmm(block_queries, block_keys), torch.bmm(block_scores, block_values)]
        return out

    return {"chunked": chunked} | ({} if scores is None else {"parallel": parallel})


def measure(shape: Shape, runs: int) -> dict[str, Any]:
    """Measure the operator and its products on one shape.

    Args:
        shape: sizes of the call.
        runs: number of runs of each function.

    Returns:
        A row with the milliseconds of every run by function, and the shares of the bound for the forward pass and both passes.
    """
    q, k, v, mixing = inputs(shape, torch.device("cpu"), torch.float32)
    cotangent = torch.randn_like(v)

    def forward() -> Tensor:
        return mhla_attention(q, k, v, mixing, block_size=shape.block, causal=shape.causal, normalize=shape.normalized)

    def without_gradient() -> Tensor:
        with torch.no_grad():
            return forward()

    functions: dict[str, Callable[[], object]] = {
        "forward": without_gradient,
        "both": lambda: torch.autograd.grad(forward(), [q, k, v, mixing], cotangent),
        **products(shape),
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    for run in range(runs + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if run:  # the first run allocates memory
                times[name].append(round(1e3 * (time.perf_counter() - start), 3))
    bound = min(median(times[form]) for form in ("chunked", "parallel") if form in times)
    shares = {"forward": bound / median(times["forward"]), "both": 3 * bound / median(times["both"])}
    return {**asdict(shape), "milliseconds": times, "share": shares}


def main() -> None:
    """Measure all shapes, print a table, and write JSON."""
    parser = argparse.ArgumentParser(prog="lightning bench roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each function (default: 5)")
    parser.add_argument("--longest", type=int, default=8192, help="maximum number of tokens of a shape (default: 8192)")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args()
    rows = [measure(shape, options.runs) for shape in SMALL if shape.tokens <= options.longest]
    table = Table(title="time of the matrix products alone / time of the operator")
    for title in ("shape", "products, ms", "forward, ms", "share", "both, ms", "share of both"):
        table.add_column(title, justify="left" if title == "shape" else "right")
    for row in rows:
        times = {name: median(values) for name, values in row["milliseconds"].items()}
        bound = min(times[form] for form in ("chunked", "parallel") if form in times)
        cells = [f"{bound:.2f}", f"{times['forward']:.2f}", f"{row['share']['forward']:.2f}", f"{times['both']:.2f}"]
        table.add_row(row["name"], *cells, f"{row['share']['both']:.2f}")
    Console(width=120).print(table)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {"machine": describe(torch.device("cpu")), "rows": rows}
        write_json(options.out / "roofline-cpu.json", content, indent=1)


if __name__ == "__main__":
    main()
