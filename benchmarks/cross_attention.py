"""Replaced cross-attention: losses of a small text-to-image model, and times by the number of queries and of keys.

    lightning bench cross_attention
    lightning bench cross_attention --pretrain_steps 500 --steps 100 --seeds 1
    lightning bench cross_attention --parts generation

The first part trains a small SANA with softmax cross-attention on rendered scenes of colored digits with captions. It then
replaces the cross-attention by linear attention and by MHLA, and fine-tunes all weights of each model, and of the original one,
with the same data, steps and seeds. Losses are flow-matching losses on held-out scenes, with the same noise for every model.
The loss with captions of other scenes shows how much a model uses its text. The second part measures one layer, without its
projections, on one image and one text, in processor time of one thread, which other programs disturb little. The third part
measures a token that the decoder of a T5 writes. Its cross-attention reads the keys of the encoder's tokens, or the summaries
of their blocks. The time begins with the third token, so that the cost of computing the summaries is not counted.
"""

# Longer than other modules because the three parts share options, results and tables.

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from diffusers import SanaTransformer2DModel
from mhla_tasks.captioned.text import TextConfig, WordVectors
from mhla_tasks.text_to_image.scenes import HELD_OUT_SCENES, SceneSamples
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from benchmarks.machine import describe
from lightning_mhla import BlockLayout, CrossAttentionConfig, swap_attention
from lightning_mhla.attention import CrossProjections, build_cross_attention
from lightning_mhla.generative.flow import draw_flow_times, flow_point
from lightning_mhla.system.files import write_json

MODEL: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 4,
    "num_cross_attention_heads": 4, "cross_attention_head_dim": 16, "cross_attention_dim": 64, "caption_channels": 32,
    "sample_size": 32, "patch_size": 4, "interpolation_scale": 1,
}  # fmt: skip
"""Options of the model: 64 tokens of 4 x 4 pixels, heads of 16 features."""

TEXT = TextConfig(length=8, carry=0.5)
BATCH, SCENES, SHIFT, DRAWS = 32, 4000, 3.0, 4
PRETRAIN_RATE, RATE, WARMUP = 4e-3, 1e-3, 50
"""Learning rates of training and of fine-tuning, which decay linearly to 0, and their warm-up steps."""

SHARED: dict[str, Any] = {"key_block_size": 2, "key_tokens": TEXT.length, "feature_map": "learned"}
KINDS = {
    "softmax": None,
    "linear": CrossAttentionConfig(kind="linear", **SHARED),
    "mhla": CrossAttentionConfig(block_grid=[4, 4], mixing_per_head=True, **SHARED),
}
"""Cross-attention of each model; None for the original."""

READERS = {
    "softmax": ("softmax", False),
    "linear, keys": ("linear", False),
    "linear, summaries": ("linear", True),
    "mhla, keys": ("mhla", False),
    "mhla, summaries": ("mhla", True),
}
"""Variants of cross-attention in the third part, by name: the kind, and whether it reads summaries instead of keys."""

QUERIES, KEYS = (1024, 4096, 16384), (64, 512, 4096)
HEADS, WIDTH, BLOCKS = 4, 64, 16
"""Sizes of the layer in the second part: heads, width of a head, and maximum number of blocks of the image and of the text."""

DECODER: dict[str, Any] = {
    "d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 1024, "num_layers": 1, "num_decoder_layers": 6, "vocab_size": 512,
    "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0,
}  # fmt: skip
"""Options of the T5 in the third part."""

GENERATION = (
    "milliseconds of one thread for a written token, from the third one on, without the cost of computing the summaries: "
    "median (smallest to largest)"
)
"""Title of the table of the third part."""

TOKEN_BLOCK, WRITTEN = 64, 64
"""Number of tokens in a block, for queries and for keys, and number of tokens to write, in the third part."""


@dataclass(frozen=True)
class Scenes:
    """Images, ``[S, 3, 32, 32]`` in -1 .. 1, and embedded captions, ``[S, 8, 32]``, of S scenes."""

    images: Tensor
    texts: Tensor

    @classmethod
    def render(cls, train: bool, count: int) -> Scenes:
        """Render scenes of colored MNIST digits.

        Args:
            train: whether to use the training digits instead of the held-out ones.
            count: number of scenes S.
        """
        samples, encoder = SceneSamples(train), WordVectors(TEXT, MODEL["caption_channels"])
        items = [samples[index] for index in track(range(count), "rendering scenes", transient=True)]
        texts = encoder.encode([item["caption"] for item in items], torch.device("cpu"))
        return cls(torch.stack([item["image"] for item in items]), texts)


def losses(model: nn.Module, images: Tensor, texts: Tensor, generator: torch.Generator) -> Tensor:
    """Compute the flow-matching loss of each image, ``[B]``, at random timesteps.

    Args:
        model: model that predicts the velocity.
        images: images, ``[B, 3, 32, 32]``.
        texts: embedded captions, ``[B, 8, 32]``; tokens of zeros are masked.
        generator: source of the timesteps and the noise.
    """
    times = draw_flow_times("logit_normal", SHIFT, len(images), generator, torch.device("cpu"))
    noise = torch.randn(images.shape, generator=generator)
    noisy, velocity = flow_point(images, noise, times)
    mask = (texts != 0).any(-1)
    predicted = model(noisy, encoder_hidden_states=texts, timestep=times, encoder_attention_mask=mask).sample
    return (predicted - velocity).square().flatten(1).mean(1)


@torch.no_grad()
def evaluate(model: nn.Module, scenes: Scenes, wrong_captions: bool = False) -> float:
    """Compute the mean loss on scenes, with several draws of timestep and noise for each scene.

    The draws are the same for every model.

    Args:
        model: model to evaluate.
        scenes: scenes to compute the loss on.
        wrong_captions: whether each image gets the caption of a different scene.
    """
    generator, values = torch.Generator().manual_seed(1), []
    texts = scenes.texts.roll(1, 0) if wrong_captions else scenes.texts
    for _ in range(DRAWS):
        values += [
            losses(model, images, captions, generator)
            for images, captions in zip(scenes.images.split(100), texts.split(100), strict=True)
        ]
    return float(torch.cat(values).mean())


def train(model: nn.Module, scenes: Scenes, steps: int, rate: float, seed: int, title: str) -> None:
    """Train all weights of a model in place.

    Args:
        model: model to train.
        scenes: training data.
        steps: number of optimizer steps.
        rate: peak learning rate.
        seed: seed of the order of the scenes, the timesteps and the noise.
        title: title of the progress bar.
    """
    order, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (steps - step) / max(steps - WARMUP, 1), 1.0)
    )
    for _ in track(range(steps), title, transient=True):
        chosen = torch.from_numpy(order.integers(len(scenes.images), size=BATCH))
        optimizer.zero_grad()
        losses(model, scenes.images[chosen], scenes.texts[chosen], generator).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def train_models(pretrain_steps: int, steps: int, seeds: int) -> dict[str, Any]:
    """Train the original model, replace its cross-attention, and fine-tune each model with each seed.

    Args:
        pretrain_steps: training steps of the original model.
        steps: steps of fine-tuning.
        seeds: number of seeds of fine-tuning.

    Returns:
        Losses, by the names under which they are written to JSON.
    """
    torch.manual_seed(0)
    training, held_out = Scenes.render(True, SCENES), Scenes.render(False, HELD_OUT_SCENES)
    original = SanaTransformer2DModel(**MODEL)
    train(original, training, pretrain_steps, PRETRAIN_RATE, 0, "training the original")
    rows = []
    for name, config in KINDS.items():
        model = copy.deepcopy(original)
        if config is not None:
            swap_attention(model, config, cross=True)
        row: dict[str, Any] = {
            "attention": name,
            "swapped": evaluate(model, held_out),
            "tuned": [],
            "wrong_captions": [],
        }
        for seed in range(seeds):
            tuned = copy.deepcopy(model)
            train(tuned, training, steps, RATE, seed + 1, f"fine-tuning {name}, seed {seed}")
            row["tuned"].append(evaluate(tuned, held_out))
            row["wrong_captions"].append(evaluate(tuned, held_out, wrong_captions=True))
        rows.append(row)
    pretrained = {"original": evaluate(original, held_out), "wrong_captions": evaluate(original, held_out, True)}
    return {"pretrain_steps": pretrain_steps, "steps": steps, "before": pretrained, "rows": rows}


def layer_call(kind: str, queries: int, keys: int, backward: bool) -> Callable[[], object]:
    """Return a function that computes one layer, without its projections, for one image and one text.

    Args:
        kind: kind of attention.
        queries: number of tokens of the image. A block is a sixteenth of them, but at least 16 tokens.
        keys: number of tokens of the text, divided into blocks in the same way.
        backward: whether the function also computes gradients.
    """
    generator = torch.Generator().manual_seed(0)
    layouts = [BlockLayout((count,), block_size=max(16, count // BLOCKS)) for count in (queries, keys)]
    config = CrossAttentionConfig(kind=kind, feature_map="relu")
    layer = build_cross_attention(config, HEADS * WIDTH, HEADS, *layouts, projections=False)
    q, k, v = (torch.randn(1, count, HEADS, WIDTH, generator=generator) for count in (queries, keys, keys))
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    projections = CrossProjections(lambda _: q, lambda _: (k, v), lambda out: out)

    def call() -> object:
        with torch.set_grad_enabled(backward):
            # The projections ignore these inputs, of which only the sizes matter.
            out = layer(q.detach().flatten(2), k.detach().flatten(2), projections=projections)
            return torch.autograd.grad(out.sum(), leaves) if backward else out

    return call


def time_layers(queries: list[int], keys: list[int], runs: int) -> list[dict[str, Any]]:
    """Measure the processor time of one layer, for each kind of attention and each pair of lengths.

    The kinds alternate in each run.

    Args:
        queries: numbers of tokens of the image.
        keys: numbers of tokens of the text.
        runs: number of measurements of each time.

    Returns:
        A row for each kind and pair of lengths, with sorted milliseconds of the forward pass and of both passes together.
    """
    rows: dict[tuple[int, int, str], dict[str, Any]] = {}
    cases = [(n, m) for n in queries for m in keys]
    for n, m in track(cases, "measuring", transient=True):
        for part, backward in (("forward_ms", False), ("both_ms", True)):
            calls = {kind: layer_call(kind, n, m, backward) for kind in KINDS}
            times: dict[str, list[float]] = {kind: [] for kind in calls}
            for _ in range(runs + 1):
                for kind, call in calls.items():
                    begin = time.process_time()
                    call()
                    times[kind].append(1e3 * (time.process_time() - begin))
            for kind in calls:
                row = rows.setdefault((n, m, kind), {"queries": n, "keys": m, "attention": kind})
                row[part] = sorted(times[kind][1:])  # the first call allocates memory
    return list(rows.values())


def writer(kind: str, keys: int, summaries: bool) -> Callable[[], float]:
    """Return a function that generates tokens with a T5 of random weights, and returns the milliseconds of one token.

    The time does not include the first two tokens. The second one computes the summaries.

    Args:
        kind: kind of cross-attention; ``"softmax"`` for the original.
        keys: number of tokens of the encoder's output, which is random.
        summaries: whether cross-attention may read summaries instead of keys.
    """
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**DECODER)).eval()
    if kind != "softmax":
        blocks = CrossAttentionConfig(kind=kind, block_size=TOKEN_BLOCK, key_block_size=TOKEN_BLOCK, key_tokens=keys)
        for layer in swap_attention(model, blocks, cross=True).values():
            layer.summarizes = summaries  # type: ignore[misc]
    states = BaseModelOutput(last_hidden_state=torch.randn(1, keys, DECODER["d_model"]))

    @torch.no_grad()
    def write() -> float:
        cache, token, begin = None, torch.zeros(1, 1, dtype=torch.int64), 0.0
        for position in range(WRITTEN):
            if position == 2:  # the first token fills the cache, and the second one computes the summaries
                begin = time.process_time()
            out = model(encoder_outputs=states, decoder_input_ids=token, past_key_values=cache, use_cache=True)
            cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        return 1e3 * (time.process_time() - begin) / (WRITTEN - 2)

    return write


def time_generation(keys: list[int], runs: int) -> list[dict[str, Any]]:
    """Measure the processor time of a written token for each variant of cross-attention. The variants alternate in each run.

    Args:
        keys: numbers of tokens of the encoder's output.
        runs: number of runs of each variant.

    Returns:
        A row for each number of tokens and variant, with the sorted milliseconds of a token.
    """
    rows = []
    for count in track(keys, "writing", transient=True):
        writers = {name: writer(kind, count, summaries) for name, (kind, summaries) in READERS.items()}
        times: dict[str, list[float]] = {name: [] for name in writers}
        for _ in range(runs):
            for name, write in writers.items():
                times[name].append(write())
        rows += [{"keys": count, "attention": name, "token_ms": sorted(values)} for name, values in times.items()]
    return rows


def generation_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table of the times of a written token: a row of titles, then a row for each number of tokens.

    Args:
        rows: results of :func:`time_generation`.
    """
    table = [["tokens of the encoder", *READERS]]
    for count in dict.fromkeys(row["keys"] for row in rows):
        by_name = {row["attention"]: row["token_ms"] for row in rows if row["keys"] == count}
        cells = (f"{x[len(x) // 2]:.1f} ({x[0]:.1f} to {x[-1]:.1f})" for x in (by_name[name] for name in READERS))
        table.append([f"{count:,}", *cells])
    return table


def loss_table(result: dict[str, Any]) -> list[list[str]]:
    """Return the table of losses: a row of titles, then a row for each kind of attention.

    Args:
        result: result of :func:`train_models`.
    """

    def spread(values: list[float]) -> str:
        return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")

    rows = [["cross-attention", "before", "swapped", "fine-tuned", "fine-tuned, wrong captions"]]
    for row in result["rows"]:
        pretrained = f"{result['before']['original']:.4f}"
        swapped = "" if row["attention"] == "softmax" else f"{row['swapped']:.4f}"
        rows.append([row["attention"], pretrained, swapped, spread(row["tuned"]), spread(row["wrong_captions"])])
    return rows


def time_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table of the times of a layer: a row of titles, then a row for each pair of lengths.

    Args:
        rows: results of :func:`time_layers`.
    """
    table = [["tokens of the image", "tokens of the text", *KINDS]]
    for n, m in dict.fromkeys((row["queries"], row["keys"]) for row in rows):
        by_kind = {row["attention"]: row for row in rows if (row["queries"], row["keys"]) == (n, m)}
        medians = [
            [by_kind[kind][part][len(by_kind[kind][part]) // 2] for part in ("forward_ms", "both_ms")] for kind in KINDS
        ]
        table.append([f"{n:,}", f"{m:,}", *(f"{forward:.1f} / {both:.1f}" for forward, both in medians)])
    return table


def main() -> None:
    """Run the chosen parts, print their tables, and write JSON."""
    parser = argparse.ArgumentParser(prog="lightning bench cross_attention", description=__doc__.splitlines()[0])
    parser.add_argument("--pretrain_steps", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=200, help="steps of fine-tuning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--queries", type=int, nargs="+", default=list(QUERIES))
    parser.add_argument("--keys", type=int, nargs="+", default=list(KEYS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--encoder_tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--parts", nargs="+", choices=("losses", "generation"), default=["losses", "generation"])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for cross-*-cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)  # so that processor time is the time of the layer
    if "losses" in args.parts:
        result: dict[str, Any] = {"machine": describe(torch.device("cpu"))}
        result["model"] = {**MODEL, "text": asdict(TEXT), "batch": BATCH, "scenes": SCENES, "rate": RATE}
        result["times"] = time_layers(args.queries, args.keys, args.runs)
        result["losses"] = train_models(args.pretrain_steps, args.steps, args.seeds)
        tables = {
            "held-out loss, mean over the seeds": loss_table(result["losses"]),
            f"{HEADS} heads of width {WIDTH}; milliseconds of one thread, forward / forward and backward": time_table(
                result["times"]
            ),
        }
        write_result(args.out / "cross-attention-cpu.json", result, tables)
    if "generation" in args.parts:
        result = {"machine": describe(torch.device("cpu")), "model": DECODER, "block": TOKEN_BLOCK, "written": WRITTEN}
        result["rows"] = time_generation(args.encoder_tokens, args.runs)
        write_result(args.out / "cross-generation-cpu.json", result, {GENERATION: generation_table(result["rows"])})


def write_result(path: Path, result: dict[str, Any], tables: dict[str, list[list[str]]]) -> None:
    """Print tables, and write a result to a JSON file.

    Args:
        path: path of the JSON file.
        result: content of the JSON file.
        tables: rows of each table by its heading. The first row of a table contains the titles of its columns.
    """
    console = Console(width=130)
    for title, rows in tables.items():
        table = Table(*rows[0], title=title)
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result, indent=1)
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
