"""Time of the operator, each form, beside a loop over blocks and softmax attention.

    python -m benchmarks.attention --device cpu

The peers: ``loop``, one pass of Python over the blocks that sums the earlier summaries anew for each block, as the
paper's authors published it (their ``naive_chunk``, eager); ``softmax``, torch's scaled_dot_product_attention of equal
width, ``H * Dv / Dk`` heads of Dk.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from mhla_kernels import mhla_attention
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks.machine import describe, milliseconds

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@dataclass(frozen=True)
class Shape:
    """One row of the table; letters as in the operator's documentation, ``block`` tokens in a block."""

    name: str
    batch: int
    heads: int
    tokens: int
    block: int
    key_width: int
    value_width: int
    causal: bool


LANGUAGE = [Shape(f"LM 340M, N={n}", 1, 4, n, 64, 128, 256, True) for n in (512, 1024, 2048, 4096, 8192, 16384)]
IMAGES = [
    Shape("digits 8x8", 64, 4, 64, 4, 16, 16, False),
    Shape("DeiT-S 256 tokens", 4, 6, 256, 16, 64, 64, False),
    Shape("DiT-XL/2 512 px", 1, 16, 1024, 64, 72, 72, False),
    Shape("DiT-XL/2 1024 px", 1, 16, 4096, 256, 72, 72, False),
]


def loop_over_blocks(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, block: int) -> Tensor:
    """Causal MHLA without a normaliser, block after block in Python: the baseline. Shapes as :func:`mhla_attention`."""
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, block)) for x in (q, k, v))
    blocks = q.shape[2]
    visible = torch.ones(block, block, dtype=q.dtype, device=q.device).tril()
    summaries = torch.stack([k[:, :, i].transpose(-1, -2) @ v[:, :, i] for i in range(blocks)])
    out = torch.zeros_like(v)
    for i in range(blocks):
        earlier = (mixing[i, :i, None, None, None, None] * summaries[:i]).sum(0)
        scores = (q[:, :, i] @ k[:, :, i].transpose(-1, -2)) * visible
        out[:, :, i] = q[:, :, i] @ earlier + mixing[i, i] * (scores @ v[:, :, i])
    return out.flatten(2, 3).transpose(1, 2) * q.shape[-1] ** -0.5


def softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention, ``[B, H, N, D]``."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random q, k, v and mixing that want gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, device=device, dtype=dtype).requires_grad_()

    blocks = -(-shape.tokens // shape.block)
    token = (shape.batch, shape.tokens, shape.heads)
    q, k = random(*token, shape.key_width), random(*token, shape.key_width)
    mixing = torch.rand(blocks, blocks, generator=generator, device=device).requires_grad_()
    return q, k, random(*token, shape.value_width), mixing


def _methods(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Name to a call and the tensors that it is differentiated by."""
    q, k, v, mixing = inputs(shape, device, dtype)
    options: dict[str, Any] = {"block_size": shape.block, "causal": shape.causal, "normalize": not shape.causal}
    heads = shape.heads * shape.value_width // shape.key_width
    size = (shape.batch, heads, shape.tokens, shape.key_width)
    soft = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]

    def ours(form: str) -> Callable[[], Tensor]:
        return lambda: mhla_attention(q, k, v, mixing, form=form, **options)  # type: ignore[arg-type]

    methods = {"auto": (ours("auto"), [q, k, v, mixing]), "chunked": (ours("chunked"), [q, k, v, mixing])}
    if shape.tokens <= 4096:
        methods["parallel"] = (ours("parallel"), [q, k, v, mixing])
    if shape.causal:
        methods["loop"] = (lambda: loop_over_blocks(q, k, v, mixing, shape.block), [q, k, v, mixing])
    methods["softmax"] = (lambda: softmax(soft[0], soft[1], soft[2], shape.causal), soft)
    return methods


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of every method on one shape, forward and forward + backward."""
    rows = []
    for name, (call, wanted) in _methods(shape, device, dtype).items():
        with torch.no_grad():
            forward = milliseconds(call, device, seconds)
            cotangent = torch.ones_like(call())

        def both(call: Callable[[], Tensor] = call, wanted: list[Tensor] = wanted, g: Tensor = cotangent) -> object:
            return torch.autograd.grad(call(), wanted, g)

        rows.append(
            {**asdict(shape), "method": name, "forward_ms": forward, "both_ms": milliseconds(both, device, seconds)}
        )
    return rows


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """A row for each shape and method, with the ratios to the loop and to softmax."""
    table = Table(title="forward and forward + backward, milliseconds (median)")
    for title in ("shape", "method", "forward", "fwd+bwd", "loop / ours", "softmax / ours (fwd)", "softmax / ours"):
        table.add_column(title, justify="left" if title in ("shape", "method") else "right")
    for name in dict.fromkeys(row["name"] for row in rows):
        group = {row["method"]: row for row in rows if row["name"] == name}
        for method, row in group.items():
            loop = group.get("loop")
            soft = group["softmax"]
            table.add_row(
                name if method == "auto" else "",
                method,
                f"{row['forward_ms']:.2f}",
                f"{row['both_ms']:.2f}",
                f"{loop['both_ms'] / row['both_ms']:.1f}" if loop else "",
                f"{soft['forward_ms'] / row['forward_ms']:.1f}",
                f"{soft['both_ms'] / row['both_ms']:.1f}",
                end_section=method == "softmax",
            )
    console.print(table)


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Time against N for the causal language shape."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, key, label in zip(axes, ("forward_ms", "both_ms"), ("forward", "forward + backward"), strict=True):
        for method in ("loop", "softmax", "parallel", "chunked", "auto"):
            points = [(row["tokens"], row[key]) for row in rows if row["method"] == method and row["causal"]]
            style = "--" if method == "auto" else "-"
            axis.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=method)
        axis.set(xscale="log", yscale="log", xlabel="tokens N", title=label)
        axis.set_xticks([row["tokens"] for row in rows if row["method"] == "auto" and row["causal"]])
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds")
    axes[1].legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each figure")
    parser.add_argument("--longest", type=int, default=16384, help="leave out shapes of more tokens")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), help="folder for attention-*.json and .png"
    )
    args = parser.parse_args()

    device, dtype, console = torch.device(args.device), getattr(torch, args.dtype), Console(width=120)
    shapes = [shape for shape in LANGUAGE + IMAGES if shape.tokens <= args.longest]
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        for shape in progress.track(shapes, description="measuring"):
            rows += measure(shape, device, dtype, args.seconds)
    machine = describe(device)
    print_table(rows, console)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    args.out.mkdir(parents=True, exist_ok=True)
    result = args.out / f"attention-{device.type}.json"
    result.write_text(json.dumps({"machine": machine, "dtype": args.dtype, "rows": rows}, indent=1) + "\n")
    picture = result.with_suffix(".png")
    draw(
        rows,
        f"causal, H=4, Dk=128, Dv=256, C=64, {args.dtype}, {machine['device']}, {machine['threads']} threads",
        picture,
    )
    console.print(f"written: {result}, {picture}")


if __name__ == "__main__":
    main()
