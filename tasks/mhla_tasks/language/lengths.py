"""Limits on the length of a text: the position table of a model, and the context of its softmax attention.

The transformers library warns if a text exceeds ``max_position_embeddings``, even if all layers of the model have attention
that keeps its quality at any length. The functions of this module replace that warning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_mhla.attention import WindowedMHLA
from lightning_mhla.swap import swapped_layers
from lightning_mhla.swap.swapping import host_of

log = logging.getLogger(__name__)

REMINDERS = logging.getLogger("transformers.generation.stopping_criteria")
"""Logger through which transformers warns of texts that exceed ``max_position_embeddings``."""

TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""Names of modules with learned positions in models of transformers."""

_warned: WeakSet[PreTrainedModel] = WeakSet()


def softmax_context(network: PreTrainedModel) -> int | None:
    """Return the context length, in tokens, with which the softmax layers of a model were trained.

    Softmax attention within a window, as in the attention kind ``mhla_window``, does not count, because the distances within a
    window do not grow with the text.

    Args:
        network: causal language model of this package or of transformers, whose attention may have been replaced.

    Returns:
        The context length; None if the model has no softmax layers, or its configuration does not state it.
    """
    limit: int | None = getattr(network.config, "max_position_embeddings", None)
    if limit is None:
        return None
    if hasattr(network.config, "layer_attention"):
        kinds = {layer.kind for layer in network.config.layer_attention()}
        return limit if "softmax" in kinds else None
    try:
        layers, new = host_of(network).candidates(network), swapped_layers(network)
    except ValueError:  # a family whose attention cannot be replaced
        return limit
    is_replaced = len(new) == len(layers) and all(layer.kind != "softmax" for layer in new.values())
    return None if is_replaced else limit


def position_table(network: PreTrainedModel) -> int | None:
    """Return the number of tokens in a model's table of learned positions, as in GPT-2 and OPT; None if it has no such table.

    The model cannot read more tokens, whatever its kind of attention.

    Args:
        network: causal language model of this package or of transformers, whose attention may have been replaced.
    """
    tables = (
        # the positions of RoBERTa begin after the row for padding, within its max_position_embeddings rows
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in TABLES
    )
    # A table may have further rows: that of OPT begins with two for padding.
    limit = getattr(network.config, "max_position_embeddings", None)
    return min((rows if limit is None else min(rows, limit) for rows in tables), default=None)


def longest_text(network: Any) -> int | None:
    """Return the maximum number of tokens that a transformers model can read; None if the model states no limit."""
    limits = (getattr(network.config, "max_position_embeddings", None), position_table(network))
    return min((limit for limit in limits if limit is not None), default=None)


def warn_beyond_context(network: PreTrainedModel, tokens: int) -> None:
    """Warn, once for each model, if a text exceeds the context length with which the softmax layers were trained.

    Args:
        network: causal language model.
        tokens: number of tokens that the model has read for one text.
    """
    limit = softmax_context(network)
    if limit is None or tokens <= limit or network in _warned:
        return
    _warned.add(network)
    log.warning(
        "the text has %d tokens, and the softmax layers of the model were trained on at most %d: what it writes after these "
        "may be worse. Shorten the text, or train with a longer context",
        tokens, limit,
    )  # fmt: skip


def warn_of_untrained_far_attention(network: PreTrainedModel, context: int) -> None:
    """Warn if training samples are too short to train the part of ``mhla_window`` attention that lies outside its window.

    The window covers the block of a token and the block before it. In samples of at most two blocks, no token is outside the
    window, so the parameters for attention to more distant tokens stay untrained and degrade the results for longer texts.

    Args:
        network: causal language model of this package or of transformers, whose attention may have been replaced.
        context: number of tokens in a training sample.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, WindowedMHLA)]
    sizes = {layer.layout.block_size or 0 for layer in layers if layer.options.far_init > -math.inf}
    if sizes and context <= 2 * max(sizes):
        log.warning(
            "samples of %d tokens lie within the softmax window of mhla_window, two blocks of %d tokens: attention "
            "to earlier tokens is not trained, and longer texts are read badly. Use a longer context, or a block_size of at "
            "most %d", context, max(sizes), max(1, (context - 1) // 2),
        )  # fmt: skip


@contextmanager
def without_reminder() -> Iterator[None]:
    """Context manager that suppresses transformers' warning about texts that exceed ``max_position_embeddings``.

    :func:`warn_beyond_context` gives a warning in its place.
    """

    def is_different(record: logging.LogRecord) -> bool:
        return "exceeded the model's predefined" not in record.getMessage()

    REMINDERS.addFilter(is_different)
    try:
        yield
    finally:
        REMINDERS.removeFilter(is_different)


def generate_tokens(network: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any) -> Any:
    """Call transformers' ``generate``, and warn if the text exceeds the context length of the model's softmax layers.

    Args:
        network: causal language model of this package or of transformers.
        ids: token indices of the prompts, ``[B, N]`` int64.
        mask: mask of non-padding tokens, ``[B, N]`` int64. The longest prompt has no padding.
        options: further keyword arguments of ``generate``.

    Returns:
        The result of ``generate``: by default, prompts and new tokens, ``[B, length]`` int64.

    Raises:
        ValueError: if the prompts and the requested new tokens exceed the number of learned positions of the model.
    """
    limit, new = position_table(network), options.get("max_new_tokens", 1)
    if limit is not None and ids.shape[1] + new - 1 > limit:  # the last new token is not an input
        raise ValueError(
            f"a prompt of {ids.shape[1]} tokens and max_new_tokens={new} exceed the {limit} positions that the model has; "
            "shorten the prompt, or lower max_new_tokens"
        )
    with without_reminder():
        output = network.generate(input_ids=ids, attention_mask=mask, **options)
    sequences = output if isinstance(output, Tensor) else output.sequences
    warn_beyond_context(network, sequences.shape[1] - 1)  # the last new token is not an input
    return output
