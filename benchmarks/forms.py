"""Faster form for each shape, and whether form="auto" chooses it; on a CPU also the best tile of the chunked form.

    lightning bench forms
    lightning bench forms --device cpu

The constants in ``mhla_kernels/forms/cost.json`` and ``TILE`` in ``mhla_kernels/forms/chunked.py`` are based on its results.
"""

from __future__ import annotations

import argparse

import torch
from mhla_kernels import mhla_attention
from mhla_kernels.forms import chunked
from mhla_kernels.forms.cost import cheapest_form
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe, milliseconds
from benchmarks.shapes import LENGTHS, MODELS, Shape, inputs

LANGUAGE = [
    Shape(f"language N={n} C={c}", 4, 4, n, c, 128, 256, True)
    for n, c in ((64, 16), (128, 32), (128, 64), (256, 64), (512, 64))
]
IMAGES = [
    Shape(f"image N={n} C={c} D={width}", 16, 4, n, c, width, width, False)
    for n, c, width in (
        (64, 4, 16),
        (64, 16, 16),
        (64, 4, 64),
        (128, 8, 64),
        (196, 16, 64),
        (256, 16, 64),
        (256, 64, 72),
        (576, 36, 64),
        (1024, 64, 64),
    )
]


def both_ms(shape: Shape, form: str, device: torch.device, seconds: float) -> float:
    """Measure the median milliseconds of a form's forward and backward pass, in bfloat16 on a GPU and float32 on a CPU.

    Args:
        shape: sizes of the tensors.
        form: form of the operator.
        device: device of the tensors.
        seconds: approximate duration of the measurement in seconds.
    """
    q, k, v, mixing = inputs(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    cotangent = torch.ones_like(v)

    def run() -> object:
        out = mhla_attention(
            q,
            k,
            v,
            mixing,
            block_size=shape.block,
            causal=shape.causal,
            normalize=shape.normalized,
            form=form,  # type: ignore[arg-type]
        )
        return torch.autograd.grad(out, [q, k, v, mixing], cotangent)

    return milliseconds(run, device, seconds)


def compare_forms(shapes: list[Shape], device: torch.device, seconds: float, console: Console) -> Table:
    """Tabulate, for each shape, the times of both forms, the choice of ``form="auto"``, and the time that it loses."""
    table = Table(title="forward + backward, milliseconds (median)")
    for title in ("shape", "parallel", "chunked", "auto picks", "loses"):
        table.add_column(title, justify="left" if title == "shape" else "right")
    for shape in track(shapes, "measuring forms", console=console, transient=True):
        times = {form: both_ms(shape, form, device, seconds) for form in ("parallel", "chunked")}
        pick = cheapest_form(
            shape.tokens,
            shape.blocks,
            shape.key_width,
            shape.value_width,
            shape.causal,
            backend="triton" if device.type == "cuda" else "torch",
        )
        loss = times[pick] / min(times.values()) - 1
        table.add_row(shape.name, f"{times['parallel']:.2f}", f"{times['chunked']:.2f}", pick, f"{loss:.0%}")
    return table


def compare_tiles(seconds: float, console: Console) -> Table:
    """Tabulate the time of the chunked form in PyTorch for different tile sizes."""
    table = Table(title="chunked, causal, N=4096, Dk=128, Dv=256: milliseconds by tile")
    for title in ("tile", "C=256", "C=1024", "C=4096"):
        table.add_column(title, justify="right")
    original_tile, cpu = chunked.TILE, torch.device("cpu")
    for tile in track((32, 64, 128, 256), "measuring tiles", console=console, transient=True):
        chunked.TILE = tile
        times = [both_ms(Shape("", 1, 4, 4096, c, 128, 256, True), "chunked", cpu, seconds) for c in (256, 1024, 4096)]
        table.add_row(str(tile), *(f"{time:.0f}" for time in times))
    chunked.TILE = original_tile
    return table


def main() -> None:
    """Measure the forms and, on a CPU, the tiles, and print the tables."""
    parser = argparse.ArgumentParser(prog="lightning bench forms", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.25,
        help="approximate duration of each measurement in seconds (default: 0.25)",
    )
    parser.add_argument("--longest", type=int, default=8192, help="maximum number of tokens of a shape (default: 8192)")
    args = parser.parse_args()
    device, console = torch.device(args.device), Console(width=110)
    shapes = MODELS + LENGTHS if device.type == "cuda" else LANGUAGE + IMAGES
    shapes = [shape for shape in shapes if shape.tokens <= args.longest]
    console.print(compare_forms(shapes, device, args.seconds, console))
    if device.type == "cpu" and args.longest >= 4096:
        console.print(compare_tiles(args.seconds, console))
    console.print(", ".join(f"{key} {value}" for key, value in describe(device).items()))


if __name__ == "__main__":
    main()
