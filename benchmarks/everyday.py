"""Time of everyday work on a CPU compared with peers: training on texts, vision, image loading, generation, ``lightning fit``.

    lightning bench everyday --out benchmarks/results
    lightning bench everyday --only vision --profile

Each comparison alternates between this package and its peer in one process, with torch's default number of threads. Only
``lightning fit`` runs in a separate process. The ratio of a run is the peer's time divided by this package's time. The table
has the median, smallest and largest ratio of the runs. ``--profile`` adds the ten operators of torch that take most of the time
in one run of this package.

The comparisons are:

    text N          two training steps of a model with exponential mixing (4 layers of width 256) on 4,096 tokens, in sequences
                    of N tokens; peer: a Llama of transformers of equal size
    bound of text N the same, but attention adds queries, keys and values, which costs nearly nothing. No attention with these
                    projections can make the model faster in relation to the peer
    vision          ten passes of the attention layer of DINOv2-S on 16 images of 257 tokens; peer: the same layer with softmax
    images          one epoch of 1,500 JPEG files of 500 x 375 pixels; peer: torchvision's ImageFolder with the same transform
    generation B    decoding of 64 tokens of each of B sequences after 8,192 tokens; peer: transformers' Llama with its cache
    fit             lightning fit with validation, pictures and checkpoints; peer: a loop that only trains the same model on the
                    same data
"""

# Longer than other modules because every comparison builds the same work for this package and for its peer.

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from mhla_tasks.classification import ImageNetShards, Mnist
from mhla_tasks.classification.data import AugmentConfig
from mhla_tasks.language import PythonSource
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks import layers
from benchmarks.generation import SIZE, build
from benchmarks.machine import describe
from benchmarks.throughput import build as build_configured
from lightning_mhla import GenerationCache
from lightning_mhla.attention.base import Attention
from lightning_mhla.system.files import write_json

ROOT = Path(__file__).parents[1]
Work = Callable[[], float]
"""Function that does a fixed amount of work once, and returns its duration in seconds."""
BATCH_TOKENS, PATCHES = 4096, 16
CONTEXT, STEPS, IMAGES = 8192, 64, 1500
FITS = {
    "classification/mnist": (186, ["--trainer.max_epochs", "3"]),
    "language/stdlib": (
        150,
        ["--trainer.max_steps=150", "--trainer.val_check_interval=150", "--trainer.limit_val_batches=0.5"],
    ),
}
"""Configurations to fit, each with the number of training steps of the bare loop and the options of ``lightning fit`` for as
many steps."""


def timed(function: Callable[[], object]) -> Work:
    """Wrap a function so that a call returns the duration of the function in seconds."""

    def work() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return work


def llama(context: int) -> LlamaForCausalLM:
    """Build transformers' Llama with random weights, in the size of the models of :mod:`benchmarks.generation`.

    Args:
        context: maximum number of tokens of a sequence.
    """
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SIZE["vocab_size"],
            hidden_size=SIZE["dim"],
            intermediate_size=SIZE["mlp_width"],
            num_hidden_layers=SIZE["depth"],
            num_attention_heads=SIZE["heads"],
            max_position_embeddings=context,
            tie_word_embeddings=True,
        )
    )


def without_attention(model: nn.Module) -> nn.Module:
    """Replace the attention of each layer by the sum of queries, keys and values. Its projections and its gate remain."""
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.rotary = None
            layer.attend = lambda inputs: inputs.q + inputs.k + inputs.v  # type: ignore[method-assign]
    return model


def text(model: nn.Module, tokens: int) -> tuple[Work, Work]:
    """Return functions that time two training steps of a language model on a batch of 4,096 tokens.

    Args:
        model: language model of this package.
        tokens: number of tokens of a sequence.

    Returns:
        Functions for ``model``, and for transformers' Llama.
    """
    batch = torch.randint(SIZE["vocab_size"], (BATCH_TOKENS // tokens, tokens))

    def steps(network: nn.Module) -> Work:
        optimizer = torch.optim.AdamW(network.train().parameters(), lr=1e-4)

        def run() -> None:
            for _ in range(2):
                optimizer.zero_grad()
                network(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()

        return timed(run)

    return steps(model), steps(llama(tokens))


def vision(part: str) -> tuple[Work, Work]:
    """Return functions that time ten passes of an attention layer on images of 257 tokens.

    Args:
        part: ``"forward"`` for forward passes, or ``"both"`` for forward and backward passes.

    Returns:
        Functions for MHLA and for softmax attention.
    """
    functions = layers.calls(PATCHES)

    def ten(kind: str) -> Work:
        return timed(lambda: [functions[kind, part]() for _ in range(10)])

    return ten("mhla"), ten("softmax")


def images(workers: int, folder: Path) -> tuple[Work, Work]:
    """Return functions that time one epoch of reading the images in a folder.

    Args:
        workers: number of worker processes.
        folder: folder with a subfolder of images for each class.

    Returns:
        Functions for this package's data module, and for torchvision's ImageFolder with the same transform.
    """
    plain = AugmentConfig(auto_augment=None, color_jitter=0.0, random_erasing=0.0)
    data = ImageNetShards(str(folder), str(folder), batch_size=50, num_workers=workers, augment=plain)
    data.setup("fit")
    transform = data._augmented()
    peer = DataLoader(ImageFolder(str(folder), transform), 50, shuffle=True, num_workers=workers, drop_last=True)

    def read(loader: Callable[[], Any]) -> Work:
        return timed(lambda: [None for _ in loader()])

    return read(data.train_dataloader), read(lambda: peer)


def write_images(folder: Path, count: int) -> None:
    """Write random JPEG files of 500 x 375 pixels that resemble photographs in structure, into ten class folders.

    Args:
        folder: folder of the class folders.
        count: number of files.
    """
    random = np.random.default_rng(0)
    for index in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        grain = random.normal(0, 8, (375, 500, 3))
        pixels = np.clip(np.asarray(coarse, dtype=np.float64) + grain, 0, 255).astype(np.uint8)
        place = folder / f"class{index % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{index}.jpg", quality=90)


@torch.inference_mode()
def generation(rows: int) -> tuple[Work, Work]:
    """Return functions that time the decoding of 64 tokens for each of several sequences that share a context.

    The sequences begin with a context of 8,192 tokens. Each call appends its tokens to the sequences of the earlier calls.

    Args:
        rows: number of sequences.

    Returns:
        Functions for a model of this package with exponential mixing, and for transformers' Llama.
    """
    context = torch.randint(SIZE["vocab_size"], (1, CONTEXT))
    token = torch.zeros(rows, 1, dtype=torch.long)

    def steps(model: Any, cache: Any) -> Work:
        for piece in context.split(2048, 1):
            model(piece, past_key_values=cache, logits_to_keep=1, use_cache=True)
        if isinstance(cache, GenerationCache):
            cache.select([0] * rows)
        else:
            cache.batch_repeat_interleave(rows)

        @torch.inference_mode()
        def run() -> None:
            last = token
            for _ in range(STEPS):
                last = model(last, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

        return timed(run)

    room = CONTEXT + 100 * STEPS
    return steps(build("exponential", room), GenerationCache(SIZE["depth"])), steps(llama(room).eval(), DynamicCache())


class TrainingClock(Callback):
    """Callback that writes the duration of a training in seconds, including validation and callbacks, to a file.

    Args:
        path: path of the file.
    """

    def __init__(self, path: str) -> None:
        self.path, self._start = Path(path), 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the timer."""
        self._start = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the seconds since the start of training to the file."""
        self.path.write_text(str(time.perf_counter() - self._start))


def fit(config: str, folder: Path) -> tuple[Work, Work]:
    """Return functions that time the training of a configuration.

    Args:
        config: name of the configuration, a key of :data:`FITS`.
        folder: folder for the runs.

    Returns:
        Functions for ``lightning fit`` in a separate process, without its start-up, and for a loop in this process without
        logs, validation, pictures and checkpoints.
    """
    count, options = FITS[config]

    def trainer() -> float:
        clock, run = folder / "seconds", folder / f"run{time.monotonic_ns()}"
        added = {"class_path": "benchmarks.everyday.TrainingClock", "init_args": {"path": str(clock)}}
        command = [
            sys.executable,
            "-m",
            "mhla_tasks",
            "fit",
            "--config",
            str(ROOT / f"configs/{config}.yaml"),
            *options,
        ]
        command += ["--trainer.callbacks+", json.dumps(added), "--run_dir", str(run), "--allow", "benchmarks.everyday"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
        return float(clock.read_text())

    def bare() -> float:
        torch.manual_seed(0)
        module: Any = build_configured(ROOT / f"configs/{config}.yaml", compiled=False)[0]
        module.configure_model()
        is_text = config.startswith("language")
        data: Any = PythonSource(batch_size=8, context=512, vocab_size=2048) if is_text else Mnist(augment=False)
        data.prepare_data()
        data.setup("fit")
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

        def batches() -> Iterator[dict[str, torch.Tensor]]:
            while True:
                yield from data.train_dataloader()

        stream, start = batches(), time.perf_counter()
        for _ in range(count):
            batch = next(stream)
            if is_text:
                logits = module.network(batch["tokens"][:, :-1]).logits
                loss = F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
            else:
                loss = F.cross_entropy(module.network(batch["image"]), batch["label"], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        return time.perf_counter() - start

    return trainer, bare


def comparisons(stack: ExitStack) -> dict[str, Callable[[], tuple[Work, Work]]]:
    """Return a function for each comparison, by name, which prepares it and returns the timed functions of both sides.

    Args:
        stack: exit stack that removes the temporary folder of the comparisons when it closes.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def pictures(workers: int) -> tuple[Work, Work]:
        if not (folder / "images").exists():
            write_images(folder / "images", IMAGES)
        return images(workers, folder / "images")

    return {
        "text 512": lambda: text(build("exponential", 512), 512),
        "text 4096": lambda: text(build("exponential", 4096), 4096),
        "bound of text 512": lambda: text(without_attention(build("exponential", 512)), 512),
        "bound of text 4096": lambda: text(without_attention(build("exponential", 4096)), 4096),
        "vision": lambda: vision("forward"),
        "vision training": lambda: vision("both"),
        "images, 0 workers": lambda: pictures(0),
        "images, 2 workers": lambda: pictures(2),
        "generation 1": lambda: generation(1),
        "generation 16": lambda: generation(16),
        **{f"fit {config}": partial(fit, config, folder) for config in FITS},
    }


def shares_of_time(work: Work) -> dict[str, float]:
    """Return the ten operators of torch that take most of the CPU time in one run, with their shares from 0 to 1."""
    with profile(activities=[ProfilerActivity.CPU]) as run:
        work()
    events = run.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    longest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:10]
    return {event.key: round(event.self_cpu_time_total / total, 3) for event in longest}


def main() -> None:
    """Measure all chosen comparisons, write JSON after each, and print a table."""
    parser = argparse.ArgumentParser(prog="lightning bench everyday", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="beginnings of the names of the comparisons to make")
    parser.add_argument("--runs", type=int, default=5, help="runs of each side (default: 5)")
    parser.add_argument("--profile", action="store_true", help="add the longest operators of this package's run")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder of the results")
    options = parser.parse_args()
    console, rows = Console(width=150), []
    table = Table(title="peer's time / this package's time: median of the runs (smallest to largest)")
    for title in ("comparison", "ours, s", "peer, s", "ratio"):
        table.add_column(title, justify="left" if title == "comparison" else "right")
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for name, prepare in comparisons(stack).items():
            if options.only and not name.startswith(tuple(options.only)):
                continue
            ours, peer = prepare()
            if not name.startswith("fit"):
                ours(), peer()  # the first run allocates memory
            pairs = [(ours(), peer()) for _ in range(options.runs)]
            ratios = sorted(of_peer / of_ours for of_ours, of_peer in pairs)
            row: dict[str, Any] = {"name": name, "seconds": pairs, "ratio": median(ratios)}
            if options.profile and not name.startswith("fit"):
                row["profile"] = shares_of_time(ours)
            rows.append(row)
            medians = (f"{median(side):.3f}" for side in zip(*pairs, strict=True))
            table.add_row(name, *medians, f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
            content = {"machine": describe(torch.device("cpu")), "rows": rows}
            write_json(options.out / "everyday-cpu.json", content, indent=1)
    console.print(table)
    for row in rows:
        if "profile" in row:
            console.print(f"{row['name']}: " + ", ".join(f"{key} {share:.0%}" for key, share in row["profile"].items()))


if __name__ == "__main__":
    main()
