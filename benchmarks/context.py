"""Longer than in training: perplexity by position of the models that benchmarks.language trained on short windows.

    python -m benchmarks.context --runs runs/report-language --out benchmarks/results

Held-out Python in windows of 8,192 tokens of many files. Dense mixing is continued by ``extend_mixing``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from mhla_tasks.language import LanguageModel, PythonSource
from mhla_tasks.language.export import load_checkpoint
from rich.progress import track
from torch import Tensor

from benchmarks.language import VARIANTS
from benchmarks.machine import describe
from benchmarks.pictures import plain_numbers
from benchmarks.runs import newest_checkpoint, slug


@torch.no_grad()
def losses_by_position(model: LanguageModel, windows: list[Tensor]) -> Tensor:
    """Mean loss in nats at each position, ``[N]``, of windows ``[N + 1]``."""
    network = model.network
    network.extend(len(windows[0]) - 1)
    total = torch.zeros(len(windows[0]) - 1, dtype=torch.float64)
    for window in track(windows, "windows", transient=True):
        total += network(window[None, :-1], shift_labels=window[None, 1:], loss_reduction="none").loss[0]
    return total / len(windows)


def in_bins(losses: Tensor, bins: int) -> list[float]:
    """Perplexity in stretches of equal length."""
    return [math.exp(float(part.mean())) for part in losses.chunk(bins)]


def draw(rows: list[dict[str, Any]], trained: int, path: Path) -> None:
    """One curve for each model; the length of training is marked."""
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        width = row["tokens"] / len(row["perplexity"])
        positions = [(i + 0.5) * width for i in range(len(row["perplexity"]))]
        axis.plot(positions, row["perplexity"], label=row["variant"], linewidth=1.3)
    axis.axvline(trained, color="grey", linestyle="--", linewidth=1)
    axis.text(trained * 1.05, 0.93, f"trained on {trained}", color="grey", transform=axis.get_xaxis_transform())
    axis.set(xlabel="position, tokens", ylabel="perplexity per token", xscale="log", yscale="log")
    plain_numbers(axis)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/report-language"), help="what benchmarks.language wrote"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of a window (default: 8192)")
    parser.add_argument("--bins", type=int, default=64, help="points of a curve (default: 64)")
    parser.add_argument("--out", type=Path, help="folder for JSON and picture")
    args = parser.parse_args()
    rows, trained = [], 0
    print("| attention | as long as trained | as long again | last eighth |\n| --- | ---: | ---: | ---: |")
    for name in VARIANTS:
        checkpoint = newest_checkpoint(args.runs / slug(name))
        if checkpoint is None:
            continue
        model = load_checkpoint(checkpoint)
        trained = model.context
        content = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
        memory = content["datamodule_hyper_parameters"]
        options = {key: value for key, value in memory.items() if not key.startswith("_")}
        source = PythonSource(**{**options, "context": args.tokens}).windows("validate")
        losses = losses_by_position(model, [source[i]["tokens"] for i in range(len(source))])
        parts = [losses[:trained], losses[trained : 2 * trained], losses[-args.tokens // 8 :]]
        cells = [f"{math.exp(float(part.mean())):.2f}" for part in parts]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        rows.append(
            {"variant": name, "windows": len(source), "tokens": args.tokens, "perplexity": in_bins(losses, args.bins)}
        )
    if args.out and rows:
        args.out.mkdir(parents=True, exist_ok=True)
        result = {"machine": describe(torch.device("cpu")), "trained_on": trained, "rows": rows}
        (args.out / "context-stdlib.json").write_text(json.dumps(result, indent=2) + "\n")
        draw(rows, trained, args.out / "context-stdlib.png")


if __name__ == "__main__":
    main()
