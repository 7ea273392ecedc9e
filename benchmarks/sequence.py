"""Bytes that sequence parallelism moves for each layer, compared with ring attention.

    lightning bench sequence --out benchmarks/results

In a forward pass of MHLA, each process receives the block summaries of the other processes (float32), or their k and v
(bfloat16) if those are fewer bytes. With exponential mixing it receives one sum for each term, process and side. In ring
attention it receives k and v of all other processes. In the backward pass, MHLA moves the gradients of the received tensors,
and ring attention moves k and v once more and their gradients in float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mhla_kernels.sequence_parallel import traffic
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from lightning_mhla.system.files import write_json


class LayerShape(NamedTuple):
    """Name and sizes of an attention layer. ``terms`` is the number of exponential mixing terms; None for dense mixing."""

    name: str
    batch: int
    heads: int
    tokens: int
    blocks: int
    key_width: int
    value_width: int
    causal: bool
    normalize: bool
    terms: int | None


SHAPES = [
    LayerShape("Wan2.1-1.3B, 81 frames 480x800", 1, 12, 31500, 150, 128, 128, False, False, None),
    LayerShape("Wan2.1-1.3B, 105 blocks", 1, 12, 31500, 105, 128, 128, False, False, None),
    LayerShape("LM 340M, 32k, blocks of 64, dense", 1, 4, 32768, 512, 128, 256, True, False, None),
    LayerShape("LM 340M, 32k, blocks of 256, dense", 1, 4, 32768, 128, 128, 256, True, False, None),
    LayerShape("LM 340M, 32k, exponential, 8 terms", 1, 4, 32768, 512, 128, 256, True, False, 8),
]
PROCESSES = (2, 4, 8)


def ring_bytes(shape: LayerShape, processes: int) -> tuple[int, int]:
    """Count the bytes that a process receives in ring attention, where k and v are bfloat16 and their gradients float32.

    Args:
        shape: sizes of the attention layer.
        processes: number of processes.

    Returns:
        Bytes in the forward pass, and in the backward pass.
    """
    share = -(-shape.tokens // processes) * (processes - 1)
    numbers = shape.batch * shape.heads * share * (shape.key_width + shape.value_width)
    return 2 * numbers, 2 * numbers + 4 * numbers


def measure(shape: LayerShape, processes: int) -> dict[str, Any]:
    """Compute the MiB that each process receives for one attention layer, in MHLA and in ring attention.

    Args:
        shape: sizes of the attention layer.
        processes: number of processes.
    """
    sizes = (shape.batch, shape.tokens, shape.heads, shape.key_width, shape.value_width, shape.blocks, processes)
    moved = traffic(*sizes, terms=shape.terms, causal=shape.causal, normalize=shape.normalize)
    forward = moved.summaries if moved.least == "summaries" else int(moved.tokens or 0)
    ring = ring_bytes(shape, processes)
    mib = 1 << 20
    return {
        "shape": shape.name,
        "processes": processes,
        "exchanged": "boundary sums" if shape.terms else {"summaries": "summaries", "tokens": "k and v"}[moved.least],
        "forward_mib": forward / mib,
        "backward_mib": forward / mib if moved.least == "summaries" else 2 * forward / mib,
        "ring_forward_mib": ring[0] / mib,
        "ring_backward_mib": ring[1] / mib,
    }


def main() -> None:
    """Compute the bytes for all shapes and numbers of processes, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for sequence-parallel.json")
    options = parser.parse_args()
    rows = [measure(shape, processes) for shape in SHAPES for processes in PROCESSES]
    table = Table("layer", "processes", "exchanged", "MHLA, forward + backward", "ring attention", "ring / MHLA")
    for row in rows:
        ours = row["forward_mib"] + row["backward_mib"]
        ring = row["ring_forward_mib"] + row["ring_backward_mib"]
        cells = (f"{ours:,.1f} MiB", f"{ring:,.1f} MiB", f"{ring / ours:.1f}")
        table.add_row(row["shape"], str(row["processes"]), row["exchanged"], *cells)
    Console(width=130).print(table)
    if options.out:
        result = {"machine": describe(torch.device("cpu")), "rows": rows}
        write_json(options.out / "sequence-parallel.json", result, indent=1)


if __name__ == "__main__":
    main()
