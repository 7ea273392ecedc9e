"""VLT and DiG: time of a forward and backward pass for each kind of attention and each image size.

    lightning bench architectures --device cpu --out benchmarks/results
    lightning bench architectures --models VLT-T --pixels 224 384
    lightning bench architectures --count --models VLT-T VLT-S VLT-B VLT-L DiG-S/2 DiG-B/2 DiG-L/2 DiG-XL/2

The defaults are VLT-T at 224, 384 and 512 pixels and DiG-S/2 on latents of 256, 512 and 1,024 pixels, one image at a time
(``--images``). The table also has the billions of multiply-adds of the forward pass, which torch counts on the meta device. For
times and multiply-adds, it has the growth per pixel from the smallest size to the largest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mhla_tasks.diffusion.dig import DiGConfig
from mhla_tasks.diffusion.model import DiT
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import describe, milliseconds
from benchmarks.paper.study import markdown
from lightning_mhla import AttentionConfig
from lightning_mhla.system.files import write_json
from lightning_mhla.vision import VLT, StageConfig
from lightning_mhla.vision.stages import RAVLT

PIXELS = {"VLT": (224, 384, 512), "DiG": (256, 512, 1024)}
"""Image sizes in pixels by model family."""
MODELS = ("VLT-T", "VLT-S", "VLT-B", "VLT-L", "DiG-S/2", "DiG-B/2", "DiG-L/2", "DiG-XL/2")
DIG_KINDS: dict[str, tuple[AttentionConfig, DiGConfig]] = {
    "softmax": (AttentionConfig(kind="softmax"), DiGConfig(causal=False, directions="one")),
    "linear": (AttentionConfig(kind="linear"), DiGConfig(causal=False, directions="one")),
    "gla": (AttentionConfig(kind="gla"), DiGConfig()),
    "mhla": (AttentionConfig(kind="mhla", block_grid=[4, 4]), DiGConfig(causal=False, directions="one")),
}
KINDS = {"VLT": ("softmax", "linear", "rala", "mala", "mhla"), "DiG": tuple(DIG_KINDS)}


def network(model: str, kind: str, pixels: int) -> nn.Module:
    """Build a VLT or DiG with one kind of attention for square images.

    Args:
        model: name of the model, such as ``VLT-T``.
        kind: kind of attention.
        pixels: height and width of the images in pixels.
    """
    size: Any = model.partition("-")[2].removesuffix("/2")
    if model.startswith("VLT"):
        return VLT(pixels, 1000, AttentionConfig(**{**RAVLT, "kind": kind}), StageConfig(size=size))
    attention, dig = DIG_KINDS[kind]
    return DiT(pixels // 8, 4, 1000, attention, size=size, dig=dig, out_channels=8)


def inputs(model: str, pixels: int, images: int, device: torch.device) -> tuple[Tensor, ...]:
    """Draw random inputs for a model that :func:`network` has built.

    Args:
        model: name of the model.
        pixels: height and width of the images in pixels.
        images: batch size.
        device: device of the inputs.
    """
    if model.startswith("VLT"):
        return (torch.randn(images, 3, pixels, pixels, device=device),)
    times, labels = (torch.zeros(images, device=device, dtype=dtype) for dtype in (torch.float32, torch.int64))
    return torch.randn(images, 4, pixels // 8, pixels // 8, device=device), times, labels


def step(module: nn.Module, tensors: tuple[Tensor, ...]) -> Callable[[], None]:
    """Return a function that runs a forward and backward pass of a model.

    Args:
        module: model.
        tensors: arguments of the model.
    """

    def once() -> None:
        module(*tensors).square().mean().backward()
        module.zero_grad(set_to_none=False)

    return once


def count(model: str, kind: str, pixels: int) -> dict[str, Any]:
    """Count the parameters of a model, and the billions of multiply-adds in its forward pass for one image.

    Args:
        model: name of the model, such as ``VLT-T``.
        kind: kind of attention.
        pixels: height and width of the image in pixels.
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        module = network(model, kind, pixels).eval()
        module(*inputs(model, pixels, 1, torch.device("meta")))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    gmacs = counter.get_total_flops() / 2e9
    return {"model": model, "kind": kind, "pixels": pixels, "parameters": parameters, "gmacs": gmacs}


def measure(model: str, kind: str, pixels: int, images: int, device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure the milliseconds per image of a forward and backward pass of one model.

    Args:
        model: name of the model.
        kind: kind of attention.
        pixels: height and width of the images in pixels.
        images: batch size.
        device: device of the model.
        seconds: approximate duration of the measurement in seconds.
    """
    torch.manual_seed(0)
    module = network(model, kind, pixels).to(device)
    elapsed = milliseconds(step(module, inputs(model, pixels, images, device)), device, seconds)
    return {"images": images, "milliseconds": elapsed / images}


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results as a Markdown table: a line for each kind, a column for each size, and the growth per pixel."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        model_rows = [row for row in rows if row["model"] == model]
        sizes = sorted({row["pixels"] for row in model_rows})
        growths = {name: title for name, title in GROWTHS.items() if len(sizes) > 1 and name in model_rows[0]}
        lines = []
        for kind in dict.fromkeys(row["kind"] for row in model_rows):
            row_by_size = {row["pixels"]: row for row in model_rows if row["kind"] == kind}
            parameters = f"{row_by_size[sizes[0]]['parameters'] / 1e6:.2f}M"
            lines.append(
                [
                    f"`{kind}`",
                    parameters,
                    *(cell(row_by_size[size]) for size in sizes),
                    *(growth(row_by_size, name) for name in growths),
                ]
            )
        header = [model, "parameters", *(f"{size:,} pixels" for size in sizes), *growths.values()]
        parts.append(markdown(header, lines))
    return "\n\n".join(parts)


def cell(row: dict[str, Any]) -> str:
    """Format a cell of the table: the time, if measured, and billions of multiply-adds."""
    time = f"{row['milliseconds']:.0f} ms, " if "milliseconds" in row else ""
    return f"{time}{row['gmacs']:.2f}G"


GROWTHS = {"milliseconds": "time over pixels", "gmacs": "operations over pixels"}
"""Names of the figures whose growth with the image size is shown, each with the title of its column."""


def growth(row_by_size: dict[int, dict[str, Any]], name: str) -> str:
    """Format the growth of a figure per pixel, as the ratio of its value at the largest size to that at the smallest.

    Args:
        row_by_size: results by image size, the height or width in pixels.
        name: name of the figure in the results, such as ``milliseconds``.
    """
    small, large = min(row_by_size), max(row_by_size)
    return f"{row_by_size[large][name] / row_by_size[small][name] / (large / small) ** 2:.2f}"


def main() -> None:
    """Measure every combination of model, image size and kind of attention, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["VLT-T", "DiG-S/2"])
    parser.add_argument(
        "--pixels", nargs="+", type=int, help="sizes of images in pixels (default: those of the models)"
    )
    parser.add_argument("--images", type=int, default=1, help="batch size (default: 1)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="approximate duration of each measurement in seconds (default: 5)"
    )
    parser.add_argument(
        "--count", action="store_true", help="only count parameters and operations; do not measure times"
    )
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    args = parser.parse_args()
    device = torch.device("meta" if args.count else args.device)
    rows = []
    for model in args.models:
        for pixels in args.pixels or PIXELS[model[:3]]:
            for kind in KINDS[model[:3]]:
                print(f"{model}, {kind}, {pixels} pixels", file=sys.stderr)
                counted = count(model, kind, pixels)
                rows.append(
                    counted
                    if args.count
                    else {**counted, **measure(model, kind, pixels, args.images, device, args.seconds)}
                )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        content = {"machine": describe(device), "rows": rows}
        write_json(args.out / f"architectures-{device.type}.json", content, indent=2)
    print(table(rows))


if __name__ == "__main__":
    main()
