"""Time of exponential mixing by block size, compared with linear attention, to see where the spanning form is faster.

    lightning bench short_blocks
    lightning bench short_blocks --forms chunked --runs 5 --tokens 4096

All tensors have 8 heads of width 64, and exponential mixing has 4 terms.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from mhla_kernels import ExponentialMixing, mhla_attention
from mhla_kernels.backend import ChosenForm, choose_backend
from mhla_kernels.forms.cost import cheapest_form
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.machine import describe, milliseconds

BLOCKS = (2, 4, 8, 16, 32, 64)
HEADS, WIDTH, TERMS = 8, 64, 4


def linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute bidirectional linear attention, as the peer of the operator.

    Args:
        q: queries, ``[B, N, H, D]``.
        k: keys, with the same shape.
        v: values, with the same shape.
        eps: number added to the normalizer.

    Returns:
        Outputs ``[B, N, H, D]``.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2) + eps)
    return out.transpose(1, 2).contiguous()


def times(call: Callable[..., Tensor], leaves: list[Tensor], runs: int, seconds: float) -> dict[str, list[float]]:
    """Measure the forward pass, and both passes together, of a function.

    Args:
        call: function of the tensors.
        leaves: tensors that require gradients.
        runs: number of runs.
        seconds: duration of a run in seconds.

    Returns:
        Milliseconds of a call in each run, sorted, for ``forward`` and for ``both``.
    """
    device, cotangent = leaves[0].device, torch.ones_like(leaves[2])

    def forward() -> object:
        with torch.no_grad():
            return call(*leaves)

    def both() -> object:
        return torch.autograd.grad(call(*leaves), leaves, cotangent)

    return {
        name: sorted(milliseconds(run, device, seconds) for _ in range(runs))
        for name, run in (("forward_ms", forward), ("both_ms", both))
    }


def measure(
    tokens: list[int], forms: list[str], runs: int, seconds: float, device: torch.device, console: Console
) -> list[dict[str, Any]]:
    """Measure linear attention at each length, and MHLA at each length, block size, direction and form.

    Args:
        tokens: numbers of tokens.
        forms: forms of the operator.
        runs: number of runs of each case.
        seconds: duration of a run in seconds.
        device: device of the tensors.
        console: console for the progress bar.

    Returns:
        A row for each case, with the sorted milliseconds of the runs.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    cases = [(n, causal, block) for n in tokens for causal in (True, False) for block in (0, *BLOCKS)]
    for n, causal, block in track(cases, "measuring", console=console, transient=True):
        if block == 0 and not causal:  # block 0 stands for linear attention, measured once
            continue
        generator = torch.Generator(device).manual_seed(0)
        shape = 1, n, HEADS, WIDTH
        tensors = [torch.rand(shape, generator=generator, device=device, dtype=dtype) for _ in range(3)]
        if block == 0:
            leaves = [x.requires_grad_() for x in tensors]
            rows.append({"tokens": n, "method": "linear attention", **times(linear_attention, leaves, runs, seconds)})
            continue
        tensors += [torch.rand(HEADS, TERMS, generator=generator, device=device) for _ in range(2)]
        leaves = [x.requires_grad_() for x in tensors]
        for form in forms:

            def call(q: Tensor, k: Tensor, v: Tensor, *mixing: Tensor, form: Any, block: int, causal: bool) -> Tensor:
                mixed = ExponentialMixing(mixing[0], mixing[1])
                return mhla_attention(q, k, v, mixed, block_size=block, causal=causal, form=form)

            run = partial(call, form=form, block=block, causal=causal)
            milliseconds = times(run, leaves, runs, seconds)
            rows.append({"tokens": n, "method": form, "block": block, "causal": causal, **milliseconds})
    return rows


def chosen(tokens: int, block: int, causal: bool, device: torch.device) -> ChosenForm:
    """Return the form of the operator that ``form="auto"`` chooses for exponential mixing.

    Args:
        tokens: number of tokens.
        block: number of tokens in a block.
        causal: whether attention is causal.
        device: device of the tensors.
    """
    mixing = ExponentialMixing(torch.rand(HEADS, TERMS), torch.rand(HEADS, TERMS))
    x = torch.empty(1, 1, 1, WIDTH, device=device)
    backend = choose_backend("auto", x, x, x, "auto")
    blocks = -(-tokens // block)
    work = mixing.work(blocks, causal, backend == "triton")
    terms = mixing.span_terms(causal)
    return cheapest_form(tokens, blocks, WIDTH, WIDTH, causal, work=work, terms=terms, backend=backend)


def print_table(rows: list[dict[str, Any]], forms: list[str], device: torch.device, console: Console) -> None:
    """Print a table with the median, minimum and maximum time of the runs, and the form that ``form="auto"`` chooses.

    Args:
        rows: results of :func:`measure`.
        forms: forms that were measured.
        device: device of the measurements.
        console: console to print to.
    """

    def text(values: list[float]) -> str:
        return f"{values[len(values) // 2]:.1f} ({values[0]:.1f} .. {values[-1]:.1f})"

    table = Table(
        title=f"{HEADS} heads of width {WIDTH}, {TERMS} exponentials; milliseconds, median (minimum .. maximum)"
    )
    titles = [f"{form} {part}" for form in forms for part in ("forward", "and backward")]
    for title in ("tokens", "direction", "C", *titles, "auto"):
        table.add_column(title, justify="left" if title in ("direction", "auto") else "right")
    for n in dict.fromkeys(row["tokens"] for row in rows):
        length_rows = [row for row in rows if row["tokens"] == n]
        cells = [text(length_rows[0][name]) for name in ("forward_ms", "both_ms")]
        table.add_row(str(n), "linear attention", "", *cells, *[""] * (len(titles) - 2), "")
        for causal, block in dict.fromkeys((row["causal"], row["block"]) for row in length_rows[1:]):
            row_by_method = {
                row["method"]: row for row in length_rows[1:] if (row["causal"], row["block"]) == (causal, block)
            }
            cells = [text(row_by_method[form][name]) for form in forms for name in ("forward_ms", "both_ms")]
            direction = "causal" if causal else "both ways"
            table.add_row(str(n), direction, str(block), *cells, chosen(n, block, causal, device))
    console.print(table)


def main() -> None:
    """Measure every case, print a table, and write JSON."""
    parser = argparse.ArgumentParser(prog="lightning bench short_blocks", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--forms", nargs="+", choices=get_args(ChosenForm), default=["chunked", "spanning"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="duration of each run in seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for short-blocks-DEVICE.json")
    args = parser.parse_args()
    device, console = torch.device(args.device), Console(width=150)
    rows = measure(args.tokens, args.forms, args.runs, args.seconds, device, console)
    print_table(rows, args.forms, device, console)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
    result = args.out / f"short-blocks-{device.type}.json"
    result.write_text(f'{{"machine": {json.dumps(describe(device))}, "rows": [\n{lines}\n]}}\n')
    console.print(f"written: {result}")


if __name__ == "__main__":
    main()
