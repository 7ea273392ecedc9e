"""Which PyTorch form is faster where, and whether ``form="auto"`` picks it; and the best tile of the chunked form.

    python -m benchmarks.forms

The constants in ``mhla_kernels/cost.py`` and ``TILE`` in ``mhla_kernels/chunked.py`` were chosen with it.
"""

from __future__ import annotations

import torch
from mhla_kernels import chunked, mhla_attention
from mhla_kernels.cost import cheapest_form
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.attention import Shape, inputs
from benchmarks.machine import describe, milliseconds

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
    )
]


def both_ms(shape: Shape, form: str) -> float:
    """Median milliseconds of forward + backward."""
    q, k, v, mixing = inputs(shape, torch.device("cpu"), torch.float32)
    cotangent = torch.ones_like(v)

    def run() -> object:
        out = mhla_attention(
            q,
            k,
            v,
            mixing,
            block_size=shape.block,
            causal=shape.causal,
            normalize=not shape.causal,
            form=form,  # type: ignore[arg-type]
        )
        return torch.autograd.grad(out, [q, k, v, mixing], cotangent)

    return milliseconds(run, torch.device("cpu"), seconds=0.25)


def main() -> None:
    """Print both tables."""
    console = Console(width=110)
    table = Table(title="forward + backward, milliseconds (median)")
    for title in ("shape", "parallel", "chunked", "auto picks", "loses"):
        table.add_column(title, justify="left" if title == "shape" else "right")
    for shape in track(LANGUAGE + IMAGES, "measuring forms", console=console, transient=True):
        times = {form: both_ms(shape, form) for form in ("parallel", "chunked")}
        blocks = -(-shape.tokens // shape.block)
        pick = cheapest_form(blocks, shape.block, shape.key_width, shape.value_width, shape.causal)
        loss = times[pick] / min(times.values()) - 1
        table.add_row(shape.name, f"{times['parallel']:.2f}", f"{times['chunked']:.2f}", pick, f"{loss:.0%}")
    console.print(table)
    tiles = Table(title="chunked, causal, N=4096, Dk=128, Dv=256: milliseconds by tile")
    for title in ("tile", "C=256", "C=1024", "C=4096"):
        tiles.add_column(title, justify="right")
    kept = chunked.TILE
    for tile in track((32, 64, 128, 256), "measuring tiles", console=console, transient=True):
        chunked.TILE = tile
        times_ms = [both_ms(Shape("", 1, 4, 4096, c, 128, 256, True), "chunked") for c in (256, 1024, 4096)]
        tiles.add_row(str(tile), *(f"{time:.0f}" for time in times_ms))
    chunked.TILE = kept
    console.print(tiles)
    console.print(", ".join(f"{key} {value}" for key, value in describe(torch.device("cpu")).items()))


if __name__ == "__main__":
    main()
