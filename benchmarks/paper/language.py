"""Study of language modeling: perplexity on Python's standard library for each kind of attention, overall and by position."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from mhla_tasks.language import PythonSource
from mhla_tasks.language.causal import CausalLanguageModel
from mhla_tasks.language.export import load_checkpoint
from torch import Tensor

from benchmarks import generation
from benchmarks.paper.runs import ROOT
from benchmarks.paper.study import (
    Row,
    Study,
    attention,
    by_variant,
    conditions,
    markdown,
    remembered,
    spread,
    validated,
)
from lightning_mhla.system.figures import plain_numbers

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax"},
    "linear": {"kind": "linear"},
    "mhla, dense": {"kind": "mhla", "mixing": "dense", "mixing_per_head": False},
    "mhla, exponential": {"kind": "mhla", "mixing": "exponential", "mixing_per_head": False},
    "mhla, exponential per head": {"kind": "mhla", "mixing": "exponential", "mixing_per_head": True},
    **{kind: {"kind": kind} for kind in ("retention", "gla", "gated_deltanet", "mamba2")},
}
LONG, WINDOWS, BINS = 4096, 8, 16
"""Number of tokens in a long window of text, number of such windows, and number of points of a plotted curve."""

GENERATION = ROOT / "benchmarks/results/generation-cpu.json"


@torch.no_grad()
def losses_by_position(model: CausalLanguageModel, windows: list[Tensor]) -> Tensor:
    """Compute the mean loss at each position over windows of text.

    Args:
        model: language model.
        windows: tokens ``[N + 1]`` of each window.

    Returns:
        Loss in nats at each position, ``[N]``.
    """
    network = model.network
    network.extend(len(windows[0]) - 1)
    losses = [
        network(window[None, :-1], shift_labels=window[None, 1:], loss_reduction="none").loss[0] for window in windows
    ]
    return torch.stack(losses).double().mean(0)


def measure(checkpoint: Path) -> Row:
    """Measure a trained language model: held-out bits per byte, and perplexity by position in windows of 4,096 tokens."""
    model = load_checkpoint(checkpoint)
    memory = remembered(checkpoint)
    metrics = validated(model, PythonSource(**memory))
    trained = model.context
    source = PythonSource(**{**memory, "context": LONG}).windows("validate")
    windows = [source[index]["tokens"] for index in range(min(WINDOWS, len(source)))]
    losses = losses_by_position(model, windows)
    parts = {"trained": losses[:trained], "again": losses[trained : 2 * trained], "last": losses[-LONG // 4 :]}
    return {
        "bits_per_byte": metrics["bits_per_byte"],
        "perplexity": metrics["perplexity"],
        **{f"perplexity_{name}": math.exp(float(part.mean())) for name, part in parts.items()},
        "perplexity_by_position": [math.exp(float(part.mean())) for part in losses.chunk(BINS)],
        "parameters": sum(p.numel() for p in model.network.parameters()),
    }


def draw(rows: list[Row], path: Path) -> None:
    """Plot perplexity by position, averaged over seeds, with a curve for each kind of attention.

    Args:
        rows: results of the runs.
        path: path of the picture.
    """
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    for number, (name, runs) in enumerate(by_variant(rows).items()):
        means = [sum(point) / len(runs) for point in zip(*(row["perplexity_by_position"] for row in runs), strict=True)]
        positions = [(index + 0.5) * LONG / len(means) for index in range(len(means))]
        axis.plot(positions, means, label=name, linewidth=1.3, linestyle="--" if number > 9 else "-")
    axis.set(xlabel="position, tokens (trained on 512)", ylabel="perplexity per token", yscale="log")
    plain_numbers(axis)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def generated(folder: Path) -> str:
    """Return time per token and size of the state as Markdown, from the results of ``benchmarks.generation``.

    Args:
        folder: folder of the results page and its pictures.
    """
    content = json.loads(GENERATION.read_text())
    kinds = list(dict.fromkeys(row["kind"] for row in content["rows"]))
    contexts = sorted({row["context"] for row in content["rows"]})
    shown = [contexts[0], contexts[len(contexts) // 2], contexts[-1]]
    row_of = {(row["kind"], row["context"]): row for row in content["rows"]}
    lines = [
        [
            f"`{kind}`",
            *(
                f"{row_of[kind, n]['milliseconds_per_token']:.1f} ms, {row_of[kind, n]['state_bytes'] / 2**20:.1f} MiB"
                for n in shown
            ),
        ]
        for kind in kinds
    ]
    machine = content["machine"]
    generation.draw(content["rows"], folder / "pictures" / "results-generation.png")
    table = markdown(["attention", *(f"{n:,} tokens" for n in shown)], lines)
    return (
        "### Generation\n\nThe table shows the time per token and the size of the state of a model with "
        f"{content['model']['depth']} layers of width {content['model']['dim']}:\n\n{table}\n\n"
        "![Time per token and size of the state by context. Those of softmax grow with the context. The state of dense "
        "coefficients is half as large, and its time grows beyond 16,000 tokens. All other kinds keep both.]"
        "(pictures/results-generation.png)\n\n"
        f"`lightning bench generation --out benchmarks/results`; {machine['device']}, torch {machine['torch']}, "
        f"{machine['date']}."
    )


def section(rows: list[Row], folder: Path) -> str:
    """Return the results of the language study as Markdown, and draw a picture of perplexity by position.

    Args:
        rows: results of the runs.
        folder: folder of the results page and its pictures.
    """
    keys = {"bits_per_byte": 3, "perplexity": 2, "perplexity_trained": 2, "perplexity_again": 2, "perplexity_last": 2}
    header = ["attention", "bits per byte", "perplexity", "tokens 1 to 512 of 4,096", "513 to 1,024", "3,073 to 4,096"]
    lines = [
        [f"`{name}`", *(spread([row[key] for row in runs], digits) for key, digits in keys.items())]
        for name, runs in by_variant(rows).items()
    ]
    draw(rows, folder / "pictures" / "results-stdlib.png")
    picture = (
        "![Perplexity by position, up to 4,096 tokens, of models trained on 512. Softmax is best up to about 1,000 tokens, and "
        "falls behind MHLA, Gated DeltaNet and Mamba-2 between 1,000 and 1,500.](pictures/results-stdlib.png)"
    )
    return f"{markdown(header, lines)}\n\n{picture}\n\n{conditions(rows)}"


PRINTED = """\
| 340M, 10B tokens of FineWeb-Edu | WikiText perplexity | LAMBADA perplexity | commonsense, mean | MMLU | LongBench |
| --- | ---: | ---: | ---: | ---: | ---: |
| GLA | 41.47 | 86.98 | 46.0 | 22.9 | 6.53 |
| Transformer++ | 34.57 | 60.46 | 46.8 | 22.9 | 6.92 |
| Mamba (390M) | 38.32 | 62.43 | 46.4 | 23.5 | 6.97 |
| Mamba-2 | 35.40 | 58.51 | 47.0 | 23.0 | 6.62 |
| Gated DeltaNet (360M) | 35.01 | 60.16 | 46.9 | 23.0 | 6.86 |
| MHLA | 38.31 | 71.64 | 47.1 | 23.7 | 7.41 |

MMLU at 23% is below chance (25%)."""

STUDIES = (
    Study(
        "stdlib",
        "Language: Python's standard library",
        "configs/language/stdlib.yaml",
        {name: attention(**options) for name, options in KINDS.items()},
        measure,
        section,
        ("--trainer.max_steps=300", "--trainer.val_check_interval=300"),
        setting=(
            "The models have width 128, 4 layers, 4 heads and a vocabulary of 2,048 tokens, and train for 300 steps of "
            "8 x 512 tokens of the standard library. They are scored on held-out files, and on windows of 4,096 tokens "
            "of these files, for which `extend_mixing` extends dense coefficients."
        ),
        reading=(
            "**What the figures say.** Within the trained length softmax is best, Gated DeltaNet second, and MHLA with "
            "exponential coefficients third, level with Mamba-2; linear attention, retention and GLA are a tenth of a "
            "bit behind MHLA. Far beyond it, the order changes: at tokens 3,073 to 4,096, the perplexity of softmax is 1.7 "
            "times that of its first 512 tokens, while that of MHLA, Gated DeltaNet and Mamba-2 does not exceed that "
            "of their first 512. Exponential coefficients, whose state has constant size, are no worse than dense "
            "ones, and coefficients per head are no better.\n\n"
            "**What they do not say.** They do not show which kind is best after long training: 300 steps are 1.2 "
            "million tokens. The section on contexts of 2,048 tokens shows how softmax performs with its rotary "
            "positions scaled to longer texts. Gated DeltaNet and Mamba-2 have their own short convolution; MHLA and the "
            "others have none here."
        ),
        printed=PRINTED,
        full=tuple(
            f"configs/language/{name}_340m_fineweb.yaml"
            for name in ("mhla", "gla", "gated_deltanet", "mamba", "mamba2", "transformer")
        ),
        after=generated,
    ),
)
