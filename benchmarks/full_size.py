"""Models at full size with each kind of attention: parameters, operations, memory of a training step, times on a GPU.

Without a GPU nothing is computed. Torch counts the operations of a forward pass on the meta device. Torch's memory tracker
follows a training step of fake tensors on a CPU (the operator's PyTorch form, bfloat16 autocast, blocks recomputed, AdamW in
float32) for models of a few depths. Memory grows linearly with the depth, so larger depths are extrapolated. With a GPU, a
benchmark also measures the attention of one layer, a forward pass of the model (a sampling step without guidance) and a
training step. Each time is a median, after two warm-up calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import describe
from lightning_mhla.system.files import write_json

Row = dict[str, Any]


@dataclass(frozen=True)
class FullSize:
    """Model at full size that is measured with several variants of attention.

    Args:
        variants: kinds of attention of the layers, repeated to the depth, by the name of the variant. The first variant is the
            reference for the others.
        layers: number of blocks of the model.
        build: function that builds the model on the default device, from the kinds of the layers and the number of blocks.
        inputs: function that draws one random sample on a device.
        call: function that applies the model to a sample.
        layer: function that returns the attention of the last layer.
        tracked: depths (numbers of blocks) at which memory is tracked; the time that tracking takes grows with their square.
    """

    variants: Mapping[str, list[str]]
    layers: int
    build: Callable[[list[str], int], Any]
    inputs: Callable[[str], tuple[Tensor, ...]]
    call: Callable[..., Tensor]
    layer: Callable[[Any], Any]
    tracked: tuple[int, int, int] = (3, 6, 9)


def count(case: FullSize, kinds: list[str]) -> Row:
    """Count the parameters of a model, and the floating-point operations of its forward pass (two for each multiply-add).

    Args:
        case: model to count.
        kinds: kinds of attention of the layers, repeated to the depth.
    """
    with torch.device("meta"):
        model = case.build(kinds, case.layers)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        case.call(model, *case.inputs("meta"))
    return {"parameters": sum(p.numel() for p in model.parameters()), "forward_flops": counter.get_total_flops()}


def track(case: FullSize, kinds: list[str], layers: int) -> int:
    """Track the memory of training steps of a model, and return the peak in bytes.

    Args:
        case: model to track.
        kinds: kinds of attention of the layers, repeated to the depth.
        layers: number of blocks of the model.
    """
    with FakeTensorMode():
        model = case.build(kinds, layers).train()
        model.enable_gradient_checkpointing()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        sample = case.inputs("cpu")
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *sample)
        with tracker:
            for _ in range(2):  # the state of the optimizer exists from the second step on
                training_step(case, model, sample, "cpu")
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return next(size for kind, size in peak.items() if str(kind).lower().endswith("total"))


def peak_memory(case: FullSize, kinds: list[str]) -> Row:
    """Return the peak memory of a training step in bytes, extrapolated from smaller depths for deep models.

    Args:
        case: model to track.
        kinds: kinds of attention of the layers, repeated to the depth.

    Raises:
        SystemExit: if memory does not grow linearly with the depth.
    """
    tracked = case.tracked
    if case.layers <= tracked[-1]:
        return {"peak_bytes": track(case, kinds, case.layers)}
    peaks = [track(case, kinds, layers) for layers in tracked]
    step = peaks[2] - peaks[1]
    if abs(step - (peaks[1] - peaks[0])) > 0.005 * step:
        raise SystemExit(f"error: models of {tracked} blocks take {peaks} bytes, which does not grow linearly")
    blocks = tracked[2] - tracked[1]
    return {
        "peak_bytes": peaks[2] + step * (case.layers - tracked[2]) // blocks,
        "tracked_peak_bytes": dict(zip(map(str, tracked), peaks, strict=True)),
    }


def training_step(case: FullSize, model: Any, sample: tuple[Tensor, ...], device: str) -> None:
    """Run a forward and backward pass of a model in bfloat16 autocast on a type of device, such as ``"cuda"``."""
    with torch.autocast(device, dtype=torch.bfloat16):
        out = case.call(model, *sample)
    out.float().square().mean().backward()


def measure(case: FullSize, kinds: list[str]) -> Row:
    """Measure a model on the GPU: milliseconds of the last layer's attention, a forward pass, and a training step.

    Args:
        case: model to measure.
        kinds: kinds of attention of the layers, repeated to the depth.
    """
    with torch.device("cuda"):
        model = case.build(kinds, case.layers)
    sample = case.inputs("cuda")
    layer, recorded = case.layer(model), []
    hook = layer.register_forward_pre_hook(lambda module, args: recorded.append(args))
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        case.call(model, *sample)
        hook.remove()
        arguments = recorded[0]
        row = {
            "layer_ms": milliseconds(lambda: layer(*arguments)),
            "forward_ms": milliseconds(lambda: case.call(model, *sample)),
        }
    model.enable_gradient_checkpointing()

    def step() -> None:
        training_step(case, model, sample, "cuda")
        model.zero_grad(set_to_none=True)

    torch.cuda.reset_peak_memory_stats()
    row["training_ms"] = milliseconds(step, 3)
    row["training_peak_bytes_without_optimizer"] = torch.cuda.max_memory_allocated()
    return row


def milliseconds(run: Callable[[], Any], times: int = 5) -> float:
    """Measure the median time of a function on the GPU in milliseconds, after two warm-up calls.

    Args:
        run: function to call.
        times: number of calls to measure.
    """
    spent = []
    for _ in range(times + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - start) * 1e3)
    return median(spent[2:])


def table(rows: list[Row]) -> str:
    """Format the results as a Markdown table, in which figures have their ratio to the first row beside them."""
    timed = all("forward_ms" in row for row in rows)
    head = ["attention", "parameters", "forward pass", "training step, peak memory"]
    head += ["layer", "forward pass, time", "training step, time"] if timed else []
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    base = rows[0]
    digits = 1 if base["forward_flops"] > 1e13 else 3
    for row in rows:
        cells = [
            f"`{row['variant']}`",
            f"{row['parameters'] / 1e9:.3f}B",
            f"{row['forward_flops'] / 1e12:.{digits}f} TFLOP ({base['forward_flops'] / row['forward_flops']:.2f}x fewer)",
            f"{row['peak_bytes'] / 2**30:.1f} GiB",
        ]
        if timed:
            keys = ("layer_ms", "forward_ms", "training_ms")
            cells += [f"{row[key]:,.1f} ms ({base[key] / row[key]:.2f}x faster)" for key in keys]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(case: FullSize, name: str, out: Path | None, described: Mapping[str, Any]) -> None:
    """Count operations and memory of every variant, measure times if there is a GPU, print a table, and write JSON.

    Args:
        case: model and its variants.
        name: name of the JSON file, without ``-meta.json`` or ``-cuda.json``.
        out: folder of the JSON file; None to write no file.
        described: sizes to record in the file.
    """
    rows: list[Row] = []
    cuda = torch.cuda.is_available()
    for variant, kinds in case.variants.items():
        row = {"variant": variant, **count(case, kinds), **peak_memory(case, kinds)}
        rows.append(row | (measure(case, kinds) if cuda else {}))
        print(f"{variant}: {row['forward_flops'] / 1e12:.3f} TFLOP, {row['peak_bytes'] / 2**30:.1f} GiB", flush=True)
    device = torch.device("cuda" if cuda else "cpu")
    print(table(rows))
    if out is not None:
        result = {"machine": describe(device), "layers": case.layers, **described, "rows": rows}
        write_json(out / f"{name}-{'cuda' if cuda else 'meta'}.json", result, indent=2)
