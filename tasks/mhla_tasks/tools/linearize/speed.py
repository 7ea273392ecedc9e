"""Measurements of speed for ``lightning linearize``: forward passes by sample length, and generation by number of tokens."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_mhla.system.untrusted import reason
from lightning_mhla.training.encoder_libraries import TimmEncoders, TransformersEncoders
from mhla_tasks.language.lengths import longest_text
from mhla_tasks.tools.linearize.source import PretrainedSource

log = logging.getLogger(__name__)

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

    Lengths above ``longest`` are left out, and so are lengths that a model does not support. Measuring stops after the first
    length at which memory runs out, or one pass of every model takes more than :data:`LONG_PASS` seconds in total. Only the
    length of the training samples is tried in any case.

    Args:
        source: pretrained model, which determines the lengths and the kind of input.
        networks: models in evaluation mode, by name. One of them has the name ``original``.
        longest: maximum length that the models accept; None if there is no limit.
        trained: length of the training samples, in tokens or in pixels of an image's side.

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
            log.info("speed is not measured at length %d: %s", length, reason(error))
            slow = slow or "memory" in str(error)  # longer samples need more of it
            continue
        # The first pass allocates memory; it counts only if it is the only one.
        results[length] = {name: statistics.median(times[1:] or times) for name, times in passes.items()}
        slow = slow or len(passes["original"]) == 1
    return results


def _time_passes(source: PretrainedSource, networks: Mapping[str, Any], length: int) -> dict[str, list[float]]:
    """Measure the durations of forward passes in seconds, by name of the model.

    Each model makes ``REPEATS + 1`` passes, or fewer if one pass of every model takes more than :data:`LONG_PASS` seconds in
    total.
    """
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
        longest: maximum number of tokens that the models accept; measurements that exceed it are left out. None if there is no
            limit.

    Returns:
        Mapping from the number of preceding tokens to a dict for each model by name, with ``seconds`` per token and ``bytes``
        of the cache for one sequence. Measuring stops at the first number for which memory runs out.
    """
    results: dict[int, dict[str, dict[str, float]]] = {}
    for length in CONTEXTS:
        if longest is not None and length + TOKENS_TIMED > longest:
            break
        try:
            results[length] = {name: _time_generation(network, length) for name, network in networks.items()}
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            log.info("generation is not measured after %d tokens: %s", length, reason(error))
            break  # longer texts need more of it
    return results


def _time_generation(network: Any, length: int) -> dict[str, float]:
    """Measure the generation time and the cache size of a causal language model after ``length`` tokens.

    Returns:
        A dict with ``seconds``, the median time per generated token, and ``bytes``, the size of the cache for one sequence.
    """
    tokens = torch.arange(length + TOKENS_TIMED)[None] % min(1000, network.config.vocab_size)
    cache = network(tokens[:, :length], use_cache=True, logits_to_keep=1).past_key_values
    size, times = _cache_bytes(cache), []
    for place in range(length, length + TOKENS_TIMED):
        begin = time.perf_counter()
        network(tokens[:, place : place + 1], past_key_values=cache, use_cache=True)
        times.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(times), "bytes": size}


def _cache_bytes(cache: Any) -> int:
    """Return the size in bytes of a transformers cache, whose layers hold keys and values or a state of linear attention."""
    total = 0
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        total += sum(x.nbytes for x in (layer.keys, layer.values)) if state is None else state.bytes
    return total


def break_even(seconds: Mapping[int, Mapping[str, float]]) -> int | None:
    """Return the smallest measured length at and above which the linearized model is always faster; None if there is none.

    Args:
        seconds: mapping from sample length to the seconds of a forward pass of the models ``original`` and ``linearized``.
    """
    slower = [length for length, by_name in seconds.items() if by_name["linearized"] >= by_name["original"]]
    faster = [length for length in seconds if length > max(slower, default=0)]
    return min(faster, default=None)
