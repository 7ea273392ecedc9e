"""Attention function that lets encoder-decoder models from transformers compute a replacement of their cross-attention.

Importing this module requires transformers. The function is registered in transformers' attention interface as
``lightning_mhla_cross``. Each cross-attention module that should use it gets its own copy of the model configuration, in which
``_attn_implementation`` has this name. The interface passes only queries, keys and values. A forward pre-hook therefore stores
the input of the module, which output gates need, and its position in the decoder's input, which determines its blocks.

During generation, transformers keeps the keys and values of the encoder in a cache. From the second token on, the cache also
holds the key-value summaries of their blocks, so the cost of a token depends on the number of blocks of the context, not on its
length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

from lightning_mhla.attention import ContextSummaries, CrossAttention, CrossProjections
from lightning_mhla.swap.masks import check_values, context_mask, has_no_values, padding_to_end
from lightning_mhla.swap.transformers_attention import NAME

CROSS_NAME = f"{NAME}_cross"
"""Name of the cross-attention function in transformers' registry."""

LEFT_PADDED = (
    "decoder_attention_mask hides the first token of a row, from which swapped cross-attention counts its blocks; pad the "
    "decoder's input on the right"
)


class CrossCall(NamedTuple):
    """Input, position and cache of one call of a cross-attention module, stored until the attention function runs.

    Attributes:
        x: input of the module, ``[B, N, C]`` for B rows of N tokens of width C.
        start: number of earlier tokens in the decoder's input.
        cache: cache layer with keys, values and summaries of the context, if an earlier call filled it; otherwise None.
    """

    x: Tensor
    start: int
    cache: SummarizedLayer | None


class SummarizedLayer(DynamicLayer):
    """Layer of a transformers cache that holds the keys and values of an encoder's output, and their key-value summaries.

    The key-value summary of a block is the sum, over its tokens, of the outer products of key and value. If batch rows of keys
    are reordered, repeated or selected, the summaries change in the same way. Copied and unpickled layers have no summaries,
    and compute them again.
    """

    summaries: ContextSummaries | None = None
    """Summaries of the keys and values; None until they are computed."""
    real: Tensor | None = None
    """Padding mask with which the summaries were computed, ``[B, Nk]`` bool, False for padding; None without padding."""
    summarized: Tensor | None = None
    """Keys from which the summaries were computed, ``[B, H, Nk, Dk]``; None until they are computed."""

    @classmethod
    def put_in(cls, cache: EncoderDecoderCache, index: int) -> SummarizedLayer | None:
        """Convert the cross-attention layer of a cache to this class, in place, if an earlier call has filled it.

        Args:
            cache: cache of an encoder-decoder model.
            index: number of the layer.

        Returns:
            The converted layer; None if the layer is still empty or has an unsupported class, such as that of a static cache,
            or if the cache is offloaded.
        """
        layers = cache.cross_attention_cache.layers
        if not cache.is_updated.get(index) or getattr(cache.cross_attention_cache, "offloading", False):
            return None
        if type(layers[index]) is DynamicLayer:
            filled, layers[index] = layers[index], cls()
            vars(layers[index]).update(vars(filled))
        return layers[index] if isinstance(layers[index], cls) else None

    def read(self, attention: CrossAttention, k: Tensor, v: Tensor, real: Tensor | None) -> ContextSummaries | None:
        """Return the key-value summaries of a context. The first call computes them.

        Args:
            attention: the new attention.
            k: keys of the context, ``[B, H, Nk, Dk]`` for B rows, H heads and Nk tokens.
            v: values of the context, ``[B, H, Nk, Dv]``.
            real: ``[B, Nk]`` bool, False for padding; None if no token is padding.

        Returns:
            The summaries; None if they were computed from different keys, with a different mask or by a different attention
            module.
        """
        if self.summaries is None:
            moved, (keys, values) = padding_to_end(real, k.transpose(1, 2), v.transpose(1, 2))
            projections = CrossProjections(lambda x: x, lambda _: (keys, values), lambda out: out)
            self.summaries = attention.summarize(keys.flatten(2), moved, projections=projections)
            self.real, self.summarized = real, k
        same = real is self.real or (real is not None and self.real is not None and torch.equal(real, self.real))
        return self.summaries if same and k is self.summarized and self.summaries.layer() is attention else None

    @override
    def reset(self) -> None:
        super().reset()
        self._forget()

    @override
    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_rows(partial(super().reorder_cache, beam_idx), lambda rows: rows[beam_idx.cpu()])

    @override
    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows(
            partial(super().batch_repeat_interleave, repeats), lambda rows: rows.repeat_interleave(repeats)
        )

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        # indices may be a mask
        self._change_rows(partial(super().batch_select_indices, indices), lambda rows: rows[indices.cpu()])

    def _change_rows(self, change: Callable[[], None], choose: Callable[[Tensor], Tensor]) -> None:
        """Reorder, repeat or select the batch rows of the keys and values, and of the summaries in the same way.

        Summaries that were computed from outdated keys are discarded.

        Args:
            change: function that changes the rows of the keys and values.
            choose: function that makes the same change to row indices. It takes the indices 0 to B - 1 of the B old rows,
                ``[B]`` int64, and returns the index of the old row for each new row.
        """
        if self.summarized is not self.keys:  # an update or a crop came after the last read
            self._forget()
        change()
        if self.summaries is not None and self.summarized is not None:
            rows = choose(torch.arange(len(self.summarized)))
            self.summaries = self.summaries.select(rows)
            self.real = None if self.real is None else self.real[rows.to(self.real.device)]
            self.summarized = self.keys

    def _forget(self) -> None:
        self.summaries = self.real = self.summarized = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copying or pickling, without the summaries, which belong to one attention module."""
        return {**vars(self), "summaries": None, "real": None, "summarized": None}


def install(module: Any, attention: CrossAttention) -> None:
    """Make a transformers cross-attention module compute a different attention with its existing projections, in place.

    Args:
        module: cross-attention module from transformers.
        attention: the new attention, without projections.
    """
    # A copy, because all modules of the model share one configuration.
    module.config = copy.copy(module.config)
    module.config._attn_implementation = CROSS_NAME
    module.swapped = attention
    module.register_forward_pre_hook(_keep_call, with_kwargs=True)


def refuse_left_padding(decoder: Any) -> None:
    """Add a hook to a decoder that rejects rows whose first token is padding.

    The hook does nothing while all layers compute their original cross-attention.

    Args:
        decoder: decoder of an encoder-decoder model from transformers.
    """
    position = list(signature(decoder.forward).parameters).index("attention_mask")
    decoder.register_forward_pre_hook(partial(_refuse_left_padding, position), with_kwargs=True)


def _computes_new(module: Any) -> bool:
    return hasattr(module, "swapped") and module.config._attn_implementation == CROSS_NAME


def _keep_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if module.config._attn_implementation != CROSS_NAME:  # the module computes its original attention
        return
    x, cache = args[0] if args else kwargs["hidden_states"], kwargs.get("past_key_values")
    # the self-attention of this layer has already added these tokens to its part of the cache
    start = 0 if cache is None else int(cache.get_seq_length(module.layer_idx)) - x.shape[1]
    # under torch.compile the cache may not change, and with gradients the summaries would keep a graph alive
    reads_summaries = module.swapped.summarizes and isinstance(cache, EncoderDecoderCache) and not has_no_values(x)
    filled = None
    if reads_summaries and not torch.is_grad_enabled():
        filled = SummarizedLayer.put_in(cache, module.layer_idx)
    module.call = CrossCall(x, start, filled)


def _refuse_left_padding(position: int, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a decoder that rejects rows whose first token is padding.

    Args:
        position: index of ``attention_mask`` among the positional arguments of the decoder's forward pass.
        decoder: decoder that is called.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        ValueError: if a replaced layer computes its new attention, and the mask hides the first token of a row.
    """
    mask = args[position] if len(args) > position else kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    if any(_computes_new(module) for module in decoder.modules()):
        check_values(lambda: mask[:, 0].bool(), LEFT_PADDED)


def cross_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute the replacement cross-attention of a module, as a transformers attention function.

    Args:
        module: cross-attention module from transformers that :func:`install` changed.
        query: queries, ``[B, H, Nq, D]`` for B rows, H heads of width D and Nq tokens.
        key: keys of the context, ``[B, H, Nk, D]``.
        value: values of the context, ``[B, H, Nk, D]``.
        attention_mask: mask ``[B, Nk]``, nonzero or True for visible tokens of the context; or mask ``[B, 1, Q, Nk]``, where Q
            is Nq or 1. The latter is either bool, True where a query may attend to a token, or added to the scores, with 0 for
            visible tokens and at most -1000 for hidden ones. None without padding.
        options: further arguments that transformers passes. Only ``scaling``, the factor on the scores, is used.

    Returns:
        Outputs ``[B, Nq, H, D]``, and None in place of attention weights.

    Raises:
        ValueError: if the mask hides different tokens from different queries or adds biases to scores, or if there are more
            tokens than dense mixing coefficients cover.
    """
    (x, start, cache), attention = module.call, module.swapped
    module.call = None  # a stored call would keep its activations in memory
    # the factor is 1 for the usual scaling by the root of the key width; T5 and Whisper have a different one
    q = (query * (options["scaling"] * query.shape[-1] ** 0.5)).transpose(1, 2)
    real = context_mask(attention_mask, key.shape[2], key.shape[0])
    summaries = None if cache is None else cache.read(attention, key, value, real)
    if summaries is not None:
        projections = CrossProjections(lambda _: q, lambda _: (key, value), lambda out: out)
        out = attention(x, summaries, start=start, projections=projections)
    else:
        real, (k, v) = padding_to_end(real, key.transpose(1, 2), value.transpose(1, 2))
        projections = CrossProjections(lambda _: q, lambda _: (k, v), lambda out: out)
        out = attention(x, k.flatten(2), context_mask=real, start=start, projections=projections)
    return out.unflatten(-1, (query.shape[1], -1)), None


ALL_ATTENTION_FUNCTIONS.register(CROSS_NAME, cross_attention)
