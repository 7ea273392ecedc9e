"""Measurements for ``lightning linearize``: time per training step, quality of the model, and lengths of samples."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.swap import original_attention
from lightning_mhla.training.encoder_libraries import load_encoder
from lightning_mhla.training.module import TrainingModule
from mhla_tasks.commandline.trust import find_class
from mhla_tasks.tools.linearize.source import Domain, PretrainedSource

log = logging.getLogger(__name__)

STEPS_TIMED = 4
"""Number of training steps that are timed, after two warm-up steps."""

WINDOW_BLOCKS: dict[Domain, int] = {"language": 2, "text": 3}
"""Number of blocks in the softmax window of ``mhla_window``: the block of a token with the one before it or, in an encoder,
with both of its neighbors."""


class StepTimes(Callback):
    """Callback that measures the duration of training steps, including the loading of their batches.

    Attributes:
        seconds: duration of each step in seconds, except the first step.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    @override
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that hides warnings, and messages below the level ERROR that Lightning and this package log."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning_mhla", "mhla_tasks")
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def build(configuration: Mapping[str, Any]) -> tuple[TrainingModule, LightningDataModule]:
    """Seed all random number generators, and build the model and the data module that a configuration describes.

    Args:
        configuration: nested options, as in a configuration file of ``lightning fit``.
    """
    seed_everything(configuration["seed_everything"], verbose=False)
    return _instance(configuration["model"], LightningModule), _instance(configuration["data"], LightningDataModule)


def _build_data(configuration: Mapping[str, Any]) -> Any:
    seed_everything(configuration["seed_everything"], verbose=False)
    return _instance(configuration["data"], LightningDataModule)


def _instance(description: Mapping[str, Any], base: type) -> Any:
    return find_class(description["class_path"], (base,))(**description["init_args"])


def _trainer(configuration: Mapping[str, Any], **options: Any) -> Trainer:
    shared = {
        name: configuration["trainer"][name] for name in ("accelerator", "devices", "precision", "gradient_clip_val")
    }
    return Trainer(
        **shared,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def step_seconds(configuration: Mapping[str, Any]) -> float:
    """Measure the duration of a training step in seconds, as the median of a few steps.

    Args:
        configuration: nested options, as in a configuration file of ``lightning fit``.
    """
    times = StepTimes()
    with quiet():
        module, data = build(configuration)
        trainer = _trainer(configuration, max_steps=STEPS_TIMED + 2, limit_val_batches=0, callbacks=[times])
        trainer.fit(module, data)
    return statistics.median(times.seconds[-STEPS_TIMED:])


def quality(configuration: Mapping[str, Any], original: bool = False) -> dict[str, float]:
    """Measure the validation metrics of a linearized model before its training, or of the original model.

    Args:
        configuration: nested options, as in a configuration file of ``lightning fit``.
        original: whether to measure the model with its original attention.

    Returns:
        Mapping from the name of each metric, such as ``val/perplexity``, to its value.
    """
    with quiet():
        module, data = build(configuration)
        trainer = _trainer(configuration, limit_val_batches=configuration["trainer"]["limit_val_batches"])
        module.trainer = trainer
        with original_attention(module.network) if original else nullcontext():
            results = trainer.validate(module, data, verbose=False)
    return {name: float(value) for name, value in results[0].items()}


@torch.no_grad()
def by_position(network: Any, batches: list[Tensor], bounds: list[int]) -> list[float]:
    """Compute the perplexity of a causal language model for several ranges of positions in a text.

    Args:
        network: causal language model of transformers, in evaluation mode.
        batches: token ids of held-out text, each tensor ``[B, N + 1]`` int64.
        bounds: ascending positions that separate ranges of positions; the first is 0 and the last is N.

    Returns:
        Perplexity of each range between two neighboring bounds.
    """
    total, rows = torch.zeros(bounds[-1], dtype=torch.float64), 0
    for tokens in batches:
        scores = network(tokens[:, :-1], use_cache=False).logits.float()
        losses = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        total += losses.view(len(tokens), -1).double().sum(0)
        rows += len(tokens)
    return [math.exp(total[low:high].mean() / rows) for low, high in itertools.pairwise(bounds)]


def positions(length: int) -> list[int]:
    """Return the bounds of ranges of positions in a sample: 0, length / 8, length / 4, length / 2 and length, rounded down."""
    return [0, *sorted({max(1, length // part) for part in (8, 4, 2, 1)})]


def held_out_tokens(configuration: Mapping[str, Any], count: int) -> list[Tensor]:
    """Read batches of held-out text for a language model.

    Args:
        configuration: nested options, as in a configuration file of ``lightning fit``.
        count: maximum number of batches to read.

    Returns:
        Token ids of each batch, ``[B, N + 1]`` int64.
    """
    data = _build_data(configuration)
    data.prepare_data()
    batches: list[Tensor] = []
    for batch in data.val_dataloader():
        batches.append(batch["tokens"][batch["valid"]])
        if len(batches) == count:
            break
    return batches


def passage_lengths(configuration: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each held-out passage of a text encoder.

    Args:
        configuration: nested options, as in a configuration file of ``lightning fit``.
    """
    with quiet():  # the runs say which files are left out
        return [len(row) for row in _build_data(configuration).source("validate").rows]


def samples_in_window(lengths: Sequence[int], blocks: int, block_size: int) -> dict[str, float]:
    """Measure how many samples fit in the softmax window of the attention kind ``mhla_window``.

    For samples that fit in the window, this kind of attention is almost equal to the original softmax attention.

    Args:
        lengths: number of tokens of each sample.
        blocks: number of blocks in the window.
        block_size: number of tokens in a block.

    Returns:
        Dict with these entries:

        * ``block_size``: the given number of tokens in a block.
        * ``tokens``: number of tokens in the window.
        * ``share``: share of the samples that are not longer than the window.
        * ``smaller_block_size``: largest power of two for which at least half of the samples are longer than the window; 1 if
          there is none.
    """
    tokens, median = blocks * block_size, sorted(lengths)[len(lengths) // 2]
    largest = max(1, (median - 1) // blocks)
    return {
        "block_size": block_size,
        "tokens": tokens,
        "share": sum(length <= tokens for length in lengths) / len(lengths),
        "smaller_block_size": 1 << (largest.bit_length() - 1),
    }


def load_networks(source: PretrainedSource, target: Path) -> dict[str, Any]:
    """Load the original and the linearized model in float32 and evaluation mode.

    Args:
        source: the pretrained model.
        target: folder of the exported, linearized model.

    Returns:
        Dict with the models under the keys ``original`` and ``linearized``.
    """
    from transformers import AutoModelForCausalLM

    from lightning_mhla import load_swapped

    if source.domain == "language":
        original = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32, trust_remote_code=False)
    else:
        with quiet():
            original = load_encoder(source.path)
    return {"original": original.eval(), "linearized": load_swapped(target, torch.float32).eval()}
