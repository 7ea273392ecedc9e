"""Training steps of the shipped configurations on this device, with random batches: samples per second and MFU.

    lightning bench throughput
    lightning bench throughput --configs language/mhla_340m_fineweb --compile on

Lightning's Trainer runs each configuration, compiled and uncompiled, with the model, optimizer and precision of its file.
Pretrained weights, encoders and VAEs are left out, since latents and captions are already encoded. Torch counts the operations
of a forward pass. A step counts as three times as many, because recomputation by checkpointing is not utilization. MFU is
relative to the peak that Lightning knows for the device. Batches that do not fit in memory are halved.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from mhla_tasks.commandline.sources import Source
from mhla_tasks.commandline.trust import allow_classes, allow_imports
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import describe
from lightning_mhla.system.files import write_json

ROOT = Path(__file__).parents[1]
CONFIGS = {
    "classification/digits": 64,
    "classification/deit_t_imagenet": 256,
    "classification/deit_s_imagenet": 256,
    "diffusion/digits": 64,
    "diffusion/dit_s2_256": 256,
    "diffusion/dit_xl2_256": 32,
    "language/stdlib": 16,
    "language/mhla_340m_fineweb": 16,
    "language/linear_340m_fineweb": 16,
    "language/softmax_340m_fineweb": 16,
    "language/mhla_340m_long": 1,
    "video/digits_finetune": 16,
    "video/wan_1_3b": 1,
}
"""Configurations, each with its batch size on a GPU with 80 GB."""

SMALL = {
    name: batch for name, batch in CONFIGS.items() if name.split("/")[1] in ("digits", "stdlib", "digits_finetune")
}
"""Configurations for a CPU, each with its batch size."""

LEFT_OUT = ("pretrained", "vae", "distillation")
"""Options of a model that are removed, because they would download files or run a second model."""
STEPS, WARM_UP = 12, 4


def build(path: Path, compiled: bool) -> tuple[LightningModule, dict[str, Any]]:
    """Build the model of a configuration file, without the options in :data:`LEFT_OUT`.

    Args:
        path: path of the configuration.
        compiled: whether to compile the model.

    Returns:
        The model and its configuration.
    """
    config = yaml.safe_load(path.read_text())
    model = config["model"]
    options = model["init_args"]
    for name in LEFT_OUT:
        options.pop(name, None)
    options.get("text", {}).pop("encoder", None)
    options["training"] = {**options.get("training", {}), "compile": compiled}
    allow_imports([])
    allow_classes([Source(str(path), {"model": model})])
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    module = parser.instantiate(parser.parse_object({"model": model})).model
    if hasattr(module, "flow"):  # the empty caption comes with the data
        module.flow = replace(module.flow, caption_dropout=0.0)
    return module, config


def make_batch(module: Any, config: dict[str, Any], samples: int) -> tuple[dict[str, Tensor], int]:
    """Draw a random batch with the shapes of the configuration's data.

    Args:
        module: module of the configuration.
        config: the configuration.
        samples: number of samples in the batch.

    Returns:
        The batch, and the number of tokens per sample.
    """
    options, kind = config["model"]["init_args"], type(module).__name__
    if kind == "ImageClassifier":
        size, patch = options["image_size"], options["shape"]["patch_size"]
        images = torch.randn(samples, options.get("channels", 3), size, size)
        return {"image": images, "label": torch.randint(options["num_classes"], (samples,))}, (size // patch) ** 2
    if kind == "ClassToImage":
        size, channels = options["sample_size"], options["channels"]
        latents = torch.randn(samples, channels, size, size)
        tokens = (size // options["shape"]["patch_size"]) ** 2
        return {"latent": latents, "label": torch.randint(options["num_classes"], (samples,))}, tokens
    if kind == "LanguageModel":
        length = options["context"]
        return {"tokens": torch.randint(options["vocab_size"], (samples, length + 1))}, length
    network = module.network.config
    sampling, patch = module.sampling, network.patch_size
    scale = (4, 8, 8) if network.in_channels == 16 else (1, 1, 1)  # strides of Wan's VAE; digits have no VAE
    lengths = (sampling.frames - 1) // scale[0] + 1, sampling.height // scale[1], sampling.width // scale[2]
    latents = torch.randn(samples, network.in_channels, *lengths)
    tokens = prod(length // step for length, step in zip(lengths, patch, strict=True))
    return {"latent": latents, "text": torch.randn(samples, 64, network.text_dim)}, tokens


class Clock(Callback):
    """Callback that measures the duration of every training step, and counts the floating-point operations of one step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.operations = 0
        self._start = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the timer of a step. Before the first step, count its floating-point operations."""
        if batch_idx == 0:
            counter = FlopCounterMode(display=False)
            with (
                torch.no_grad(),
                counter,
                trainer.strategy.precision_plugin.forward_context(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                pl_module.training_step(batch, 0)
            self.operations = 3 * counter.get_total_flops()
        _wait(pl_module.device)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the duration of the step in seconds, including that of the optimizer."""
        _wait(pl_module.device)
        self.seconds.append(time.perf_counter() - self._start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, samples: int, compiled: bool, steps: int) -> dict[str, Any]:
    """Train a configuration on random batches, and measure times, operations and memory of its steps.

    Args:
        name: name of the configuration.
        samples: number of samples in a batch.
        compiled: whether to compile the model.
        steps: number of training steps.
    """
    for quiet in ("lightning.pytorch", "lightning_mhla"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    torch.manual_seed(0)
    module, config = build(ROOT / f"configs/{name}.yaml", compiled)
    precision: Any = config["trainer"].get("precision", "32-true") if torch.cuda.is_available() else "32-true"
    clock = Clock()
    trainer = Trainer(
        max_steps=steps, precision=precision, accelerator="auto", devices=1, logger=False, callbacks=[clock],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=config["trainer"].get("gradient_clip_val"),
    )  # fmt: skip
    module.configure_model()
    batch, tokens = make_batch(module, config, samples)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader([batch] * steps, batch_size=None))  # type: ignore[arg-type]
    step_seconds = median(clock.seconds[min(WARM_UP, steps - 1) :])
    row: dict[str, Any] = {
        "config": name, "compile": compiled, "samples": samples, "tokens": tokens, "precision": precision,
        "seconds": step_seconds, "first_step_seconds": clock.seconds[0], "samples_per_second": samples / step_seconds,
        "tokens_per_second": samples * tokens / step_seconds, "operations": clock.operations,
        "TFLOPs": clock.operations / step_seconds / 1e12,
    }  # fmt: skip
    if torch.cuda.is_available():
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        dtype = torch.bfloat16 if str(precision).startswith("bf16") else torch.float32
        peak = get_available_flops(torch.device("cuda", 0), dtype)
        row["mfu"] = None if peak is None else clock.operations / step_seconds / peak
    return row


def measure_or_halve(name: str, samples: int, compiled: bool, steps: int) -> dict[str, Any]:
    """Measure a configuration, and halve the batch size until a batch fits in memory.

    Args:
        name: name of the configuration.
        samples: number of samples in the first batch to try.
        compiled: whether to compile the model.
        steps: number of training steps.

    Returns:
        The result of :func:`measure`, or a row with the error if it fails for a different reason.
    """
    while True:
        try:
            return measure(name, samples, compiled, steps)
        except torch.OutOfMemoryError as error:
            if samples == 1:
                return {"config": name, "compile": compiled, "samples": 1, "failed": str(error).splitlines()[0]}
            samples //= 2
        except Exception as error:
            return {
                "config": name,
                "compile": compiled,
                "samples": samples,
                "failed": f"{type(error).__name__}: {error}",
            }
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            torch._dynamo.reset()


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a row for each configuration, compiled or uncompiled."""
    table = Table(title="training steps with random batches")
    for title in (
        "configuration",
        "compiled",
        "at once",
        "samples/s",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "first step s",
        "GB",
    ):
        table.add_column(title, justify="left" if title == "configuration" else "right")
    for row in rows:
        cells = [row["config"], "yes" if row["compile"] else "", str(row["samples"])]
        if "failed" in row:
            table.add_row(*cells, row["failed"][:60])
            continue
        mfu, memory = row.get("mfu"), row.get("peak_bytes")
        table.add_row(
            *cells, f"{row['samples_per_second']:.1f}", f"{row['tokens_per_second']:,.0f}", f"{row['TFLOPs']:.3g}",
            "" if mfu is None else f"{mfu:.0%}", f"{row['first_step_seconds']:.1f}",
            "" if memory is None else f"{memory / 1e9:.1f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Measure the configurations that the result file does not have yet, and exit with status 1 if one failed.

    JSON is written after each configuration.
    """
    parser = argparse.ArgumentParser(prog="lightning bench throughput", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--configs", nargs="+", help="configurations, such as language/stdlib (default: those that suit the device)"
    )
    parser.add_argument("--compile", choices=("both", "on", "off"), default="both")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--samples", type=int, help="batch size")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for throughput.json")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    machine, path = describe(torch.device("cuda" if gpu else "cpu")), args.out / "throughput.json"
    previous = json.loads(path.read_text()) if path.exists() else {}
    same = {**previous.get("machine", {}), "date": None} == {**machine, "date": None}
    rows = [row for row in previous["rows"] if "failed" not in row] if same else []
    done = {(row["config"], row["compile"], row["asked"], row["steps"]) for row in rows}
    sizes = CONFIGS if gpu else SMALL
    for name in args.configs or list(sizes):
        for compiled in {"both": (False, True), "on": (True,), "off": (False,)}[args.compile]:
            batch_size = args.samples or sizes.get(name, 1)
            if (name, compiled, batch_size, args.steps) not in done:
                result = measure_or_halve(name, batch_size, compiled, args.steps)
                rows.append({**result, "asked": batch_size, "steps": args.steps})
                write_json(path, {"machine": machine, "rows": rows}, indent=1)
    print_table(rows, Console(width=150))
    sys.exit(1 if any("failed" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
