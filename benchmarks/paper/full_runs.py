"""GPU hours of the configurations of full size: counted operations, divided by an assumed rate.

Nothing is computed and no weights are read: the modules are built on torch's meta device, which has shapes but no values. For
images and video, torch counts the operations of a forward pass of one sample. For language models, the module counts them
(``flops_per_token``). A backward pass counts as two forward passes, and recomputed activations, validation and the encoding of
latents do not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning import LightningModule
from mhla_tasks.classification import ImageClassifier
from mhla_tasks.commandline.trust import find_class
from mhla_tasks.diffusion import ClassToImage
from mhla_tasks.language.causal import CausalLanguageModel
from mhla_tasks.text_to_image import TextToImage
from mhla_tasks.video import VideoDiffusion
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import describe
from benchmarks.paper.runs import ROOT
from lightning_mhla.system.files import write_json

Row = dict[str, Any]

COUNTED = ROOT / "benchmarks/results/full-runs.json"
"""File with a row of :func:`count` for each configuration."""

PEAK = 989e12
"""Floating-point operations per second of an NVIDIA H100 SXM in bfloat16, without sparsity (NVIDIA's data sheet)."""

UTILIZATION = 0.3
"""Assumed share of :data:`PEAK` that training reaches."""

ASSUMED = (
    f"GPU hours of models of full size are counted operations of training, divided by {UTILIZATION:.0%} of the "
    f"{PEAK / 1e12:.0f} TFLOP/s of an NVIDIA H100 SXM in bfloat16. The share is an assumption, and small models reach less."
)
"""Sentences that say how GPU hours are computed."""

IMAGENET = 1_281_167
"""Number of training images of ImageNet-1K, for configurations that state epochs."""

SANA_SIDE, WAN_SIDE, WAN_FRAMES = 32, 8, 4
"""Pixels per latent pixel along a side for the autoencoders of SANA and of Wan, and frames per latent frame for that of Wan."""


def build(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """Build the module of a configuration on the meta device, and return it with the configuration.

    Args:
        path: path of a configuration of ``lightning fit``. The weights from which it starts are not read.
    """
    configuration = yaml.safe_load(path.read_text())
    model = configuration["model"]
    options = {name: value for name, value in model["init_args"].items() if name != "pretrained"}
    with torch.device("meta"):
        module = find_class(model["class_path"], (LightningModule,))(**options)
    return module.eval(), configuration


def _images(module: ImageClassifier) -> tuple[Tensor, ...]:
    return (torch.zeros(1, 3, module.hparams["image_size"], module.hparams["image_size"]),)


def _class_latents(module: ClassToImage) -> tuple[Tensor, ...]:
    network = module.network
    return torch.zeros(1, network.channels, *network.sides), torch.zeros(1), torch.zeros(1, dtype=torch.long)


def _captioned(module: Any, *sizes: int) -> tuple[Tensor, ...]:
    text = torch.zeros(1, module.captions.config.length, module.captions.width)
    return torch.zeros(1, module.network.config.in_channels, *sizes), torch.zeros(1), text


def _image_latents(module: TextToImage) -> tuple[Tensor, ...]:
    return _captioned(module, module.sampling.height // SANA_SIDE, module.sampling.width // SANA_SIDE)


def _clip_latents(module: VideoDiffusion) -> tuple[Tensor, ...]:
    size = module.sampling
    frames = (size.frames - 1) // WAN_FRAMES + 1
    return _captioned(module, frames, size.height // WAN_SIDE, size.width // WAN_SIDE)


INPUTS: dict[type, Callable[[Any], tuple[Tensor, ...]]] = {
    ImageClassifier: _images, ClassToImage: _class_latents, TextToImage: _image_latents, VideoDiffusion: _clip_latents,
}  # fmt: skip
"""Functions that make the input of one sample, by class of module."""


def training_flops(module: Any) -> float:
    """Return the number of floating-point operations of training on one sample (two for each multiply-add)."""
    if isinstance(module, CausalLanguageModel):
        return module.flops_per_token * module.context
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*INPUTS[type(module)](module))
    return 3.0 * counter.get_total_flops()


def count(config: str) -> Row:
    """Count the samples of a run of full size, and the operations of training on one of them.

    Args:
        config: path of the configuration in this repository.

    Returns:
        Dict with ``config``, ``parameters``, ``samples`` and ``flops_per_sample``.
    """
    module, configuration = build(ROOT / config)
    trainer, batch_size = configuration["trainer"], configuration["data"]["init_args"]["batch_size"]
    steps = trainer.get("max_steps")
    samples = trainer["max_epochs"] * IMAGENET if steps is None else steps * batch_size
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return {"config": config, "parameters": parameters, "samples": samples, "flops_per_sample": training_flops(module)}


def write_counts(configs: Iterable[str]) -> None:
    """Count all configurations, and write the rows to :data:`COUNTED`."""
    write_json(
        COUNTED, {"machine": describe(torch.device("cpu")), "rows": [count(config) for config in configs]}, indent=1
    )


def read_counts(configs: Sequence[str]) -> list[Row]:
    """Read the rows of some configurations from :data:`COUNTED`.

    Raises:
        SystemExit: if the file lacks one of them.
    """
    rows = {row["config"]: row for row in json.loads(COUNTED.read_text())["rows"]}
    if missing := [config for config in configs if config not in rows]:
        raise SystemExit(f"error: {COUNTED} lacks {', '.join(missing)}; count them with: lightning paper --count")
    return [rows[config] for config in configs]


def gpu_hours(row: Row) -> float:
    """Return the hours on one GPU for a row of :func:`count`, at the assumed utilization."""
    return float(row["samples"] * row["flops_per_sample"] / (PEAK * UTILIZATION) / 3600)


def table(rows: Iterable[Row]) -> str:
    """Format rows of :func:`count` as a Markdown table."""
    lines = ["| `lightning fit --config` | parameters | training samples | TFLOP for each | H100 hours |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        size, flops = row["parameters"] / 1e6, row["flops_per_sample"] / 1e12
        lines.append(
            f"| `{row['config']}` | {size:,.0f} M | {row['samples'] / 1e6:,.3g} M | {flops:,.3g} | {gpu_hours(row):,.3g} |"
        )
    return "\n".join(lines)
