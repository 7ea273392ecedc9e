"""Time of one attention layer of a vision transformer by image size, for each kind of attention, compared with softmax.

    lightning bench layers --out benchmarks/results
    lightning bench layers --sides 16 --runs 9

The layer is that of DINOv2-S and DeiT-S: width 384, 6 heads, a class token and square images in 4 x 4 blocks, with projections.
It is computed in float32 with one thread, whose processor time is measured. ``mhla_window`` has learned features and the class
token as a sink, as ``lightning linearize`` sets it. The kinds alternate, and medians of the runs are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from lightning_mhla import AttentionConfig, BlockLayout
from lightning_mhla.attention import build_attention
from lightning_mhla.system.files import write_json

KINDS = {
    "softmax": AttentionConfig(kind="softmax"),
    "linear": AttentionConfig(kind="linear"),
    "mhla": AttentionConfig(kind="mhla", block_grid=[4, 4]),
    "mhla_window": AttentionConfig(
        kind="mhla_window", block_grid=[4, 4], mixing="exponential", feature_map="learned", options={"sinks": 1}
    ),
}
DIM, HEADS, BLOCKS = 384, 6, (4, 4)
TOKENS = 4096
"""Approximate number of tokens in a batch, which determines the number of images: at least one."""


def calls(side: int) -> dict[tuple[str, str], Callable[[], object]]:
    """Return functions that run an attention layer of each kind on a batch of square images.

    Args:
        side: number of tokens along each side of an image.

    Returns:
        Functions by kind of attention and ``"forward"`` (forward pass) or ``"both"`` (forward and backward pass).
    """
    functions: dict[tuple[str, str], Callable[[], object]] = {}
    torch.manual_seed(0)
    x = torch.randn(max(1, TOKENS // side**2), side**2 + 1, DIM, requires_grad=True)
    for kind, config in KINDS.items():
        layer = build_attention(config, DIM, HEADS, BlockLayout((side, side), blocks=BLOCKS, prefix_tokens=1))
        leaves = [x, *layer.parameters()]

        def forward(layer: Any = layer) -> object:
            with torch.no_grad():
                return layer(x)

        def both(layer: Any = layer, leaves: Any = leaves) -> object:
            return torch.autograd.grad(layer(x).square().mean(), leaves)

        functions[kind, "forward"], functions[kind, "both"] = forward, both
    return functions


def measure(side: int, runs: int) -> dict[str, Any]:
    """Measure the processor time of all kinds of attention for one image size.

    Args:
        side: number of tokens along each side of an image.
        runs: number of runs of each layer.

    Returns:
        Number of tokens and of images; and, under ``forward_ms`` and ``both_ms``, the milliseconds of each run by kind.
    """
    functions = calls(side)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in functions}
    for run in range(runs + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if run:  # the first run allocates memory
                times[name].append(round(1e3 * (time.process_time() - start), 2))
    row: dict[str, Any] = {"tokens": side**2 + 1, "images": max(1, TOKENS // side**2)}
    for part in ("forward", "both"):
        row[f"{part}_ms"] = {kind: times[kind, part] for kind in KINDS}
    return row


def main() -> None:
    """Measure, print a table of times relative to softmax, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sides", type=int, nargs="+", default=[14, 16, 24, 37, 54], help="tokens along each side of an image"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each layer (default: 5)")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(side, options.runs) for side in options.sides]
    table = Table(title="time of an attention layer, softmax = 1: forward pass, and both passes")
    for title in ("tokens", *KINDS):
        table.add_column(title, justify="right")
    for row in rows:
        cells = []
        for kind in KINDS:
            shares = [median(row[part][kind]) / median(row[part]["softmax"]) for part in ("forward_ms", "both_ms")]
            cells.append(", ".join(f"{share:.2f}" for share in shares))
        table.add_row(f"{row['tokens']:,}", *cells)
    Console().print(table)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {**describe(torch.device("cpu")), "width": DIM, "heads": HEADS, "blocks": BLOCKS, "rows": rows}
        write_json(options.out / "layers-cpu.json", content, indent=1)


if __name__ == "__main__":
    main()
