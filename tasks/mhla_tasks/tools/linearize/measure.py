"""Measurements for ``lightning linearize``: time per training step, quality of the model, and speed by sample length."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.swap import original_attention
from lightning_mhla.training.encoder_libraries import TimmEncoders, TransformersEncoders, load_encoder
from lightning_mhla.training.module import TrainingModule
from mhla_tasks.commandline.trust import find_class
from mhla_tasks.language.lengths import longest_text
from mhla_tasks.tools.linearize.source import Domain, PretrainedSource

log = logging.getLogger(__name__)

STEPS_TIMED = 4
"""Number of training steps that are timed, after two warm-up steps."""

REPEATS = 3
"""Number of forward passes that are timed at each length. Their median is reported."""

LONG_PASS = 10.0
"""Time limit in seconds for one forward pass of every model in total.

If the passes take longer, they are not repeated, and longer samples are not measured.
"""

LENGTHS: dict[str, tuple[int, ...]] = {
    "language": (128, 512, 1024, 2048, 4096, 8192),
    "text": (64, 128, 256, 512, 1024, 2048),
    "image": (224, 336, 518, 756, 1022),
}
"""Sample lengths at which speed is measured, by kind of model: tokens, or the side of an image in pixels.

The length of the training samples is added. For timm encoders, the side is rounded down to complete patches.
"""

CONTEXTS = (512, 2048, 4096)
"""Numbers of preceding tokens at which generation is measured."""

TOKENS_TIMED = 8
"""Number of generated tokens that are timed. The median time is reported."""

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
    """Context manager that hides warnings, and log messages of Lightning and this package below the level ERROR."""
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
    made = []
    for part, base in (("model", LightningModule), ("data", LightningDataModule)):
        description = configuration[part]
        made.append(find_class(description["class_path"], (base,))(**description["init_args"]))
    return made[0], made[1]


def _build_data(configuration: Mapping[str, Any]) -> Any:
    _, data = build({**configuration, "model": {"class_path": "lightning.pytorch.LightningModule", "init_args": {}}})
    return data


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
    """Measure the validation metrics of an untrained linearized model, or of the original model.

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
    """Compute the perplexity of a causal language model by the position of the predicted token.

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
    """Return positions that divide a sample into ranges: 0, length / 8, length / 4, length / 2 and length, all rounded down."""
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
    """Measure how many samples fit in the softmax window of ``mhla_window``, in which it is almost the original attention.

    Args:
        lengths: number of tokens of each sample.
        blocks: number of blocks in the window.
        block_size: number of tokens in a block.

    Returns:
        Dict with ``block_size``, ``tokens`` of the window, ``share`` of the samples that are not longer than the window, and
        ``smaller_block_size``, the largest power of two whose window is exceeded by at least half of the samples; 1 if there
        is none.
    """
    tokens, median = blocks * block_size, sorted(lengths)[len(lengths) // 2]
    largest = max(1, (median - 1) // blocks)
    return {
        "block_size": block_size,
        "tokens": tokens,
        "share": sum(length <= tokens for length in lengths) / len(lengths),
        "smaller_block_size": 1 << (largest.bit_length() - 1),
    }


def longest_sample(source: PretrainedSource, network: Any) -> int | None:
    """Return the maximum number of tokens that a pretrained model accepts; None if there is no limit, as for image encoders.

    Args:
        source: description of the pretrained model.
        network: the model, with the original attention.
    """
    return None if source.domain == "image" else longest_text(network)


@torch.no_grad()
def seconds_by_length(
    source: PretrainedSource, networks: Mapping[str, Any], longest: int | None, trained: int
) -> dict[int, dict[str, float]]:
    """Measure the duration of a forward pass with one sample, for several models and sample lengths.

    Lengths that a model does not support are left out, and so are those above ``longest``, and those after the first length at
    which memory runs out or the forward passes of all models take more than :data:`LONG_PASS` seconds in total. The length of
    the training samples is measured in any case, if the models support it.

    Args:
        source: pretrained model, which determines the lengths and the kind of input.
        networks: models in evaluation mode, by name. One of them has the name ``original``.
        longest: maximum length that the models accept; None if there is no limit.
        trained: length of the training samples.

    Returns:
        Mapping from sample length, in tokens or in pixels of an image's side, to the seconds of each model by name.
    """
    results: dict[int, dict[str, float]] = {}
    patch = 1 if source.images is None else source.images.patch
    trained -= trained % patch
    slow = False
    for length in sorted({length - length % patch for length in (*LENGTHS[source.domain], trained)} - {0}):
        if length != trained and (slow or (longest is not None and length > longest)):
            continue
        try:
            passes = _time_passes(source, networks, length)
        except (ValueError, RuntimeError) as error:  # no such size, or too little memory
            log.info("speed is not measured at length %d: %s", length, str(error).splitlines()[0])
            slow = slow or "memory" in str(error)  # longer samples need more of it
            continue
        # The first pass allocates memory; it counts only if it is the only one.
        results[length] = {name: statistics.median(times[1:] or times) for name, times in passes.items()}
        slow = slow or len(passes["original"]) == 1
    return results


def _time_passes(source: PretrainedSource, networks: Mapping[str, Any], length: int) -> dict[str, list[float]]:
    """Measure the seconds of forward passes by model: one pass if it takes long, else :data:`REPEATS` more."""
    passes: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(REPEATS + 1):
        # Models take turns, so that other work on the machine affects all of them alike.
        for name, network in networks.items():
            begin = time.perf_counter()
            _forward(source, network, length)
            passes[name].append(time.perf_counter() - begin)
        if sum(times[-1] for times in passes.values()) > LONG_PASS:
            break
    return passes


def _forward(source: PretrainedSource, network: Any, length: int) -> None:
    if source.domain == "image":
        library = TransformersEncoders() if source.images is None else TimmEncoders()
        library.encode_images(network, torch.zeros(1, library.channels(network), length, length))
        return
    tokens = torch.arange(length)[None] % min(1000, network.config.vocab_size)
    # Without the output head, whose cost is the same for all models.
    call: Callable[..., Any] = network.base_model if source.domain == "language" else network
    call(tokens, **({"use_cache": False} if source.domain == "language" else {}))


@torch.no_grad()
def generation_by_length(networks: Mapping[str, Any], longest: int | None) -> dict[int, dict[str, dict[str, float]]]:
    """Measure the time per generated token, and the memory of the cache, for several numbers of preceding tokens.

    Args:
        networks: causal language models of transformers in evaluation mode, by name.
        longest: maximum length that the models accept; None if there is no limit.

    Returns:
        Mapping from the number of preceding tokens to a dict for each model by name, with ``seconds`` per token and ``bytes``
        of the cache for one sequence.
    """
    results: dict[int, dict[str, dict[str, float]]] = {}
    for length in CONTEXTS:
        if longest is not None and length + TOKENS_TIMED > longest:
            break
        tokens, row = torch.arange(length + TOKENS_TIMED)[None] % 1000, {}
        for name, network in networks.items():
            cache = network(
                tokens[:, :length] % network.config.vocab_size, use_cache=True, logits_to_keep=1
            ).past_key_values
            size, times = _cache_bytes(cache), []
            for place in range(length, length + TOKENS_TIMED):
                begin = time.perf_counter()
                network(tokens[:, place : place + 1] % network.config.vocab_size, past_key_values=cache, use_cache=True)
                times.append(time.perf_counter() - begin)
            row[name] = {"seconds": statistics.median(times), "bytes": size}
        results[length] = row
    return results


def _cache_bytes(cache: Any) -> int:
    """Return the size in bytes of a transformers cache, whose layers hold keys and values or a state of linear attention."""
    total = 0
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        total += sum(x.nbytes for x in (layer.keys, layer.values)) if state is None else state.bytes
    return total


def break_even(seconds: Mapping[int, Mapping[str, float]], original: str, replaced: str) -> int | None:
    """Return the smallest measured length from which one model is always faster than another; None if there is none.

    Args:
        seconds: mapping from sample length to the seconds of a forward pass by name of the model.
        original: name of the model to compare with.
        replaced: name of the model that should be faster.
    """
    slower = [length for length, by_name in seconds.items() if by_name[replaced] >= by_name[original]]
    faster = [length for length in seconds if length > max(slower, default=0)]
    return min(faster, default=None)


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
