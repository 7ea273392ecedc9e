"""Wan2.1-1.3B with each kind of attention: parameters, operations, memory of a training step, and times on a GPU.

    lightning bench wan --out benchmarks/results

81 frames of 480 x 800 pixels: a latent of 21 x 60 x 100, 31,500 tokens, MHLA in 3 x 5 x 10 blocks, gated, as configs/video
has it. Without a GPU nothing is computed: torch counts the operations of a forward pass on the meta device, and
torch's memory tracker follows a training step of fake tensors on a CPU (one clip, the operator's PyTorch form, bfloat16
autocast, blocks recomputed, AdamW in float32), for 3, 6 and 9 blocks: every three more take the same more, which gives the
rest. With a GPU it also measures one layer's attention and the whole model, forward alone (a step of sampling, without
guidance) and a training step; each of them the median of several, after two that do not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mhla_tasks.video.model import TransformerConfig, build_transformer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import describe
from lightning_mhla import AttentionConfig
from lightning_mhla.system.files import write_whole

VARIANTS = {
    "softmax": ["keep"],
    "linear": ["linear"],
    "mhla": ["mhla"],
    "mhla in 2 of 3 layers": ["keep", "mhla", "mhla"],
}
"""Kinds of the layers, repeated to the depth."""

ATTENTION = AttentionConfig(block_grid=[3, 5, 10], normalize=False, gate=True)
LATENT = (16, 21, 60, 100)
TEXT = 512

TRACKED = (3, 6, 9)
"""Blocks of the models that the memory tracker follows; its own time grows with their square."""

Row = dict[str, Any]


def build(kinds: list[str], shape: TransformerConfig) -> Any:
    """The transformer on the current default device."""
    return build_transformer(shape, ATTENTION, kinds)


def inputs(shape: TransformerConfig, latent: tuple[int, ...], device: torch.device | str) -> tuple[Tensor, ...]:
    """One clip's latent, its time, and its caption."""
    clip = torch.zeros(1, *latent, device=device)
    return clip, torch.full((1,), 500.0, device=device), torch.zeros(1, TEXT, shape.text_dim, device=device)


def count(kinds: list[str], shape: TransformerConfig, latent: tuple[int, ...]) -> Row:
    """Parameters, and floating-point operations of a forward pass (two for each multiply-add)."""
    with torch.device("meta"):
        model = build(kinds, shape)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs(shape, latent, "meta"))
    return {"parameters": sum(p.numel() for p in model.parameters()), "forward_flops": counter.get_total_flops()}


def track(kinds: list[str], shape: TransformerConfig, latent: tuple[int, ...]) -> int:
    """Peak bytes of the second training step."""
    with FakeTensorMode():
        model = build(kinds, shape).train()
        model.enable_gradient_checkpointing()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        given = inputs(shape, latent, "cpu")
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *given)
        with tracker:
            for _ in range(2):
                training_step(model, given, "cpu")
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return next(size for kind, size in peak.items() if str(kind).lower().endswith("total"))


def peak_memory(kinds: list[str], shape: TransformerConfig, latent: tuple[int, ...]) -> Row:
    """Peak bytes of a training step, for a model of any depth from those of :data:`TRACKED`.

    Raises:
        SystemExit: when memory does not grow evenly with the depth.
    """
    if shape.num_layers <= TRACKED[-1]:
        return {"peak_bytes": track(kinds, shape, latent)}
    peaks = [track(kinds, replace(shape, num_layers=layers), latent) for layers in TRACKED]
    step = peaks[2] - peaks[1]
    if abs(step - (peaks[1] - peaks[0])) > 0.001 * step:
        raise SystemExit(f"error: models of {TRACKED} blocks take {peaks} bytes, which do not grow evenly")
    blocks = TRACKED[2] - TRACKED[1]
    return {
        "peak_bytes": peaks[2] + step * (shape.num_layers - TRACKED[2]) // blocks,
        "tracked_peak_bytes": dict(zip(map(str, TRACKED), peaks, strict=True)),
    }


def training_step(model: Any, given: tuple[Tensor, ...], device: str) -> None:
    """Forward and backward in bfloat16 autocast."""
    with torch.autocast(device, dtype=torch.bfloat16):
        out = model(*given).sample
    out.float().square().mean().backward()


def measure(kinds: list[str], shape: TransformerConfig, latent: tuple[int, ...]) -> Row:
    """Milliseconds on a GPU: attention of the last layer, the whole model forward, and a training step."""
    with torch.device("cuda"):
        model = build(kinds, shape)
    given = inputs(shape, latent, "cuda")
    layer, seen = model.blocks[-1].attn1, []
    hook = layer.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        model(*given)
        hook.remove()
        arguments = seen[0]
        row = {
            "layer_ms": milliseconds(lambda: layer(*arguments)),
            "forward_ms": milliseconds(lambda: model(*given)),
        }
    model.enable_gradient_checkpointing()

    def step() -> None:
        training_step(model, given, "cuda")
        model.zero_grad(set_to_none=True)

    torch.cuda.reset_peak_memory_stats()
    row["training_ms"] = milliseconds(step, 3)
    row["training_peak_bytes_without_optimizer"] = torch.cuda.max_memory_allocated()
    return row


def milliseconds(run: Callable[[], Any], times: int = 5) -> float:
    """Median time of ``run`` on the GPU."""
    spent = []
    for _ in range(times + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - start) * 1e3)
    return median(spent[2:])


def table(rows: list[Row]) -> str:
    """Markdown, each figure over softmax's beside it."""
    timed = all("forward_ms" in row for row in rows)
    head = ["attention", "parameters", "forward pass", "training step, peak memory"]
    head += ["layer", "forward pass, time", "training step, time"] if timed else []
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    base = rows[0]
    for row in rows:
        cells = [
            f"`{row['variant']}`",
            f"{row['parameters'] / 1e9:.3f}B",
            f"{row['forward_flops'] / 1e12:.1f} TFLOP ({base['forward_flops'] / row['forward_flops']:.2f}x fewer)",
            f"{row['peak_bytes'] / 2**30:.1f} GiB",
        ]
        if timed:
            keys = ("layer_ms", "forward_ms", "training_ms")
            cells += [f"{row[key]:,.1f} ms ({base[key] / row[key]:.2f}x faster)" for key in keys]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--layers", type=int, default=30, help="blocks of the transformer (default: 30)")
    parser.add_argument("--latent", type=int, nargs=4, default=LATENT, help="channels, frames, rows, columns")
    args = parser.parse_args()
    shape, latent, cuda = TransformerConfig(num_layers=args.layers), tuple(args.latent), torch.cuda.is_available()
    rows: list[Row] = []
    for name, kinds in VARIANTS.items():
        row = {"variant": name, **count(kinds, shape, latent), **peak_memory(kinds, shape, latent)}
        rows.append(row | (measure(kinds, shape, latent) if cuda else {}))
        print(f"{name}: {row['forward_flops'] / 1e12:.1f} TFLOP, {row['peak_bytes'] / 2**30:.1f} GiB", flush=True)
    device = torch.device("cuda" if cuda else "cpu")
    print(table(rows))
    if args.out is not None:
        result = {"machine": describe(device), "layers": args.layers, "latent": list(latent), "rows": rows}
        write_whole(args.out / f"wan-1.3b-{'cuda' if cuda else 'meta'}.json", json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
