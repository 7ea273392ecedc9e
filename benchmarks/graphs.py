"""Compilation of swapped models: graph breaks, graphs at two input sizes with fullgraph, and time of a step.

    lightning bench graphs --out benchmarks/results --before OLDER_CHECKOUT

Every host is compiled before its first call and run at two sizes, both in its original form and with its attention replaced.
Outputs are compared with those of the same model uncompiled. Steps (forward and backward) are timed uncompiled and compiled by
inductor. ``--before`` runs the same program on an older checkout, whose results fill the columns "before".
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.machine import describe, milliseconds
from lightning_mhla import AttentionConfig, swap_attention
from lightning_mhla.system.files import write_json

SIZES = 2


class Model(NamedTuple):
    """Model of a host library that is compiled with its original and with replaced attention.

    Attributes:
        build: function that builds the model.
        inputs: function that returns keyword arguments of the model for an input size with index 0 or 1.
        attention: configuration of the attention that replaces the original one.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    attention: AttentionConfig


GRID = AttentionConfig(block_grid=[2, 2])
TEXT = AttentionConfig(block_size=16, mixing="exponential")
WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(vocab_size=512, num_key_value_heads=2, max_position_embeddings=512, use_cache=False, **WIDTHS)
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(vocab_size=512, max_position_embeddings=512, attention_probs_dropout_prob=0.0, **WIDTHS)
    )


def _tokens(size: int, padded: bool = False) -> dict[str, Any]:
    length = (192, 256)[size]
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, : length // 4] = 0
    ids = {"input_ids": torch.randint(0, 512, (2, length))}
    return ids | ({"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if padded else {})


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(image_size=64, patch_size=8, attention_probs_dropout_prob=0.0, **WIDTHS))


def _dinov2() -> nn.Module:
    from transformers import Dinov2Config, Dinov2Model

    options = {name: value for name, value in WIDTHS.items() if name != "intermediate_size"}
    return Dinov2Model(Dinov2Config(image_size=64, patch_size=8, attention_probs_dropout_prob=0.0, **options))


def _images(size: int, **options: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, (64, 96)[size]), **options}


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, img_size=96, depth=2, dynamic_img_size=True, **options)

    return build


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(num_layers=2, num_attention_heads=2, attention_head_dim=48, text_dim=16, ffn_dim=128)


def _diffusers(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        heads = {"num_attention_heads": 2, "attention_head_dim": 48, "in_channels": 4, "num_layers": 2}
        return getattr(diffusers, name)(**heads, sample_size=16, **options)

    return build


def _latents(size: int, **options: Any) -> dict[str, Any]:
    side = (16, 24)[size]
    return {"hidden_states": torch.randn(2, 4, side, side), "timestep": torch.tensor([9, 9]), **options}


def _captioned(size: int, **options: Any) -> dict[str, Any]:
    return _latents(size, encoder_hidden_states=torch.randn(2, 5, 16), **options)


SANA = {
    "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 48, "cross_attention_dim": 96,
    "caption_channels": 16, "patch_size": 1,
}  # fmt: skip
PIXART = {
    "out_channels": 8, "cross_attention_dim": 96, "caption_channels": 16, "norm_num_groups": 1, "patch_size": 2,
    "use_additional_conditions": False,
}  # fmt: skip
MODELS: dict[str, Model] = {
    "Llama": Model(_llama, _tokens, TEXT),
    "Llama with padding": Model(_llama, lambda size: _tokens(size, padded=True), TEXT),
    "Llama with cache": Model(_llama, lambda size: _tokens(size) | {"use_cache": True}, TEXT),
    "Llama with window": Model(_llama, _tokens, AttentionConfig(kind="mhla_window", block_size=16, mixing="exponential")),
    "BERT": Model(_bert, _tokens, TEXT),
    "BERT with padding": Model(_bert, lambda size: _tokens(size, padded=True), TEXT),
    "ViT": Model(_vit, lambda size: _images(size, interpolate_pos_encoding=True), GRID),
    "DINOv2": Model(_dinov2, _images, GRID),
    "timm ViT": Model(_timm("vit_tiny_patch16_224"), lambda size: {"x": torch.randn(2, 3, 96, (96, 128)[size])}, GRID),
    "timm EVA": Model(
        _timm("eva02_tiny_patch14_224"), lambda size: {"x": torch.randn(2, 3, 84, (84, 112)[size])}, GRID
    ),
    "DiT": Model(
        _diffusers("DiTTransformer2DModel", patch_size=2, num_embeds_ada_norm=10),
        lambda size: _latents(size, class_labels=torch.tensor([1, 2])),
        GRID,
    ),
    "PixArt": Model(
        _diffusers("PixArtTransformer2DModel", **PIXART),
        lambda size: _captioned(size, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
        GRID,
    ),
    "SANA": Model(_diffusers("SanaTransformer2DModel", **SANA), _captioned, GRID),
    "Wan": Model(
        _wan,
        lambda size: {
            "hidden_states": torch.randn(1, 16, 3, 16, (16, 24)[size]),
            "encoder_hidden_states": torch.randn(1, 5, 16),
            "timestep": torch.tensor([9]),
        },
        AttentionConfig(block_grid=[1, 2, 2], normalize=False),
    ),
}  # fmt: skip


def _first(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else next(iter(output.values()))


def _built(model: Model, swapped: bool) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    built = model.build().eval()
    if swapped:
        swap_attention(built, model.attention)
    return built


def traced(model: Model, swapped: bool) -> dict[str, Any]:
    """Count the graph breaks and graphs of a compiled model, and compare its outputs with those of the uncompiled model.

    Graphs are counted and outputs compared with ``fullgraph=True``, at each input size.

    Args:
        model: model to compile.
        swapped: whether to replace its attention.

    Returns:
        A row with ``breaks`` (graph breaks, or the name of an error), ``graphs`` (number of graphs after each size),
        ``difference`` (largest absolute difference of the outputs) and ``error`` (message if compilation fails, else None).
    """
    from torch._dynamo.utils import counters

    row: dict[str, Any] = {"graphs": [], "difference": 0.0, "error": None}
    built, inputs = _built(model, swapped), [model.inputs(size) for size in range(SIZES)]
    try:
        row["breaks"] = torch._dynamo.explain(built)(**inputs[0]).graph_break_count
    except Exception as error:
        row["breaks"] = f"{type(error).__name__}"
    built = _built(model, swapped)
    counters.clear()
    compiled = torch.compile(built, fullgraph=True, backend="aot_eager")
    try:
        for arguments in inputs:
            out = _first(compiled(**arguments))
            row["graphs"].append(counters["stats"]["unique_graphs"])
            row["difference"] = max(row["difference"], float((out - _first(built(**arguments))).abs().max()))
    except Exception as error:
        row["error"] = str(error).strip().splitlines()[0][:120]
    return row


def timed(model: Model, swapped: bool, seconds: float) -> dict[str, float | None]:
    """Measure the milliseconds of a forward and backward pass at the first size, uncompiled and compiled by inductor.

    Args:
        model: model to measure.
        swapped: whether to replace its attention.
        seconds: approximate duration of each measurement in seconds.

    Returns:
        Times ``eager_ms`` and ``compiled_ms``; None for one that fails.
    """
    times: dict[str, float | None] = {}
    for name in ("eager", "compiled"):
        built: Any = _built(model, swapped).train()
        arguments = model.inputs(0)
        try:
            if name == "compiled":
                built = torch.compile(built)

            def step(run: Any = built, arguments: dict[str, Any] = arguments) -> None:
                _first(run(**arguments)).float().square().mean().backward()

            times[f"{name}_ms"] = milliseconds(step, torch.device("cpu"), seconds)
        except Exception:
            times[f"{name}_ms"] = None
    return times


def measure(names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Measure each model with its original and with replaced attention.

    Args:
        names: names of the models.
        seconds: duration of each timing in seconds; 0 to measure no times.
    """
    rows = []
    for name in names:
        for swapped in (False, True):
            row = {"model": name, "swapped": swapped, **traced(MODELS[name], swapped)}
            rows.append(row | (timed(MODELS[name], swapped, seconds) if seconds else {}))
    return rows


def _commit(folder: Path) -> str:
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def older_rows(checkout: Path, names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Run this benchmark with the packages of an older checkout, and return its rows.

    Args:
        checkout: folder of the older checkout.
        names: names of the models.
        seconds: duration of each timing in seconds; 0 to measure no times.
    """
    program = Path(__file__).resolve()
    code = f"import runpy, sys; sys.argv = {[str(program), '--rows', ','.join(names), '--seconds', str(seconds)]!r}; "
    code += f"runpy.run_path({str(program)!r}, run_name='__main__')"
    paths = os.pathsep.join(str(checkout / part) for part in ("", "kernels", "tasks"))
    with tempfile.NamedTemporaryFile("r", suffix=".json") as stream:
        environment = {**os.environ, "PYTHONPATH": paths, "GRAPHS_ROWS": stream.name}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=checkout)
        rows: list[dict[str, Any]] = json.load(stream)
    return rows


def print_table(rows: list[dict[str, Any]], older: list[dict[str, Any]], console: Console) -> None:
    """Print a row for each model, with columns for the results of an older checkout.

    Args:
        rows: results of this checkout.
        older: results of the older checkout; empty without one.
        console: console to print to.
    """
    table = Table(title="graph breaks, graphs after one and two sizes with fullgraph, ms of a step")
    for title in ("model", "breaks", "before", "fullgraph", "before", "eager", "before", "inductor", "before"):
        table.add_column(title, justify="left" if title == "model" else "right")

    def one(row: dict[str, Any] | None) -> tuple[str, str, str, str]:
        if row is None:
            return ("", "", "", "")
        graphs = "fails" if row["error"] else ", ".join(map(str, row["graphs"]))
        times = (row.get(name) for name in ("eager_ms", "compiled_ms"))
        return (str(row["breaks"]), graphs, *("" if ms is None else f"{ms:.1f}" for ms in times))  # type: ignore[return-value]

    old = {(row["model"], row["swapped"]): row for row in older}
    for row in rows:
        pairs = zip(one(row), one(old.get((row["model"], row["swapped"]))), strict=True)
        table.add_row(
            row["model"] + (", swapped" if row["swapped"] else ""), *(cell for pair in pairs for cell in pair)
        )
    console.print(table)


def main() -> None:
    """Measure the chosen models, write JSON, and print a table."""
    parser = argparse.ArgumentParser(prog="lightning bench graphs", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only models whose name contains this text")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="duration of each timing in seconds; 0 for no timings"
    )
    parser.add_argument("--before", type=Path, default=None, help="checkout of an older version to compare with")
    parser.add_argument("--rows", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for graphs-cpu.json")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if args.rows:
        rows = measure(args.rows.split(","), args.seconds)
        Path(os.environ["GRAPHS_ROWS"]).write_text(json.dumps(rows))
        return
    names = [name for name in MODELS if args.only in name]
    load = os.getloadavg()[0]
    rows, older = measure(names, args.seconds), []
    content: dict[str, Any] = {"machine": describe(torch.device("cpu")), "commit": _commit(Path(__file__).parent)}
    content |= {"load_average": [load, os.getloadavg()[0]], "rows": rows}
    if args.before is not None:
        older = older_rows(args.before, names, args.seconds)
        content["before"] = {"commit": _commit(args.before), "rows": older}
    write_json(args.out / "graphs-cpu.json", content, indent=1)
    print_table(rows, older, Console(width=150))


if __name__ == "__main__":
    main()
