"""Attention function that lets encoder-decoder models of transformers compute swapped cross-attention.

Importing this module requires transformers. The function is registered in transformers' attention interface as
``lightning_mhla_cross``. Each cross-attention module that should use it gets its own copy of the model configuration, in which
``_attn_implementation`` has this name. The interface passes only queries, keys and values. A forward pre-hook therefore stores
the input of the module, which output gates need, and its position in the decoder's input, which determines its blocks.
"""

from __future__ import annotations

import copy
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_mhla.attention import CrossAttention, CrossProjections
from lightning_mhla.swap.masks import check_values, context_mask, padding_to_end
from lightning_mhla.swap.transformers_attention import NAME

CROSS_NAME = f"{NAME}_cross"
"""Name of the cross-attention function in transformers' registry."""

LEFT_PADDED = (
    "decoder_attention_mask hides the first token of a row, from which swapped cross-attention counts its blocks; pad the "
    "decoder's input on the right"
)


class CrossCall(NamedTuple):
    """Input of a call of a cross-attention module, stored until the attention function runs.

    Attributes:
        x: input of the module, ``[B, N, C]`` for B rows of N tokens of width C.
        start: number of tokens of the decoder's input before these.
    """

    x: Tensor
    start: int


def install(module: Any, attention: CrossAttention) -> None:
    """Make a cross-attention module of transformers compute a different attention with its existing projections, in place.

    Args:
        module: cross-attention module of transformers.
        attention: the new attention, without projections.
    """
    module.config = copy.copy(module.config)
    module.config._attn_implementation = CROSS_NAME
    module.swapped = attention
    module.register_forward_pre_hook(_keep_call, with_kwargs=True)


def refuse_left_padding(decoder: Any) -> None:
    """Make a decoder reject rows whose first token is padding."""
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
    module.call = CrossCall(x, start)


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
        module: cross-attention module of transformers.
        query: queries, ``[B, H, Nq, D]`` for B rows, H heads of width D and Nq tokens.
        key: keys of the context, ``[B, H, Nk, D]``.
        value: values of the context, ``[B, H, Nk, D]``.
        attention_mask: mask that hides padding of the context, ``[B, Nk]`` or ``[B, 1, Nq, Nk]``; None without padding.
        options: further arguments that transformers passes, of which ``scaling`` is used.

    Returns:
        Outputs ``[B, Nq, H, D]``, and None in place of attention weights.

    Raises:
        ValueError: if the mask hides different tokens from different queries or adds biases to scores, or if dense mixing
            coefficients do not reach as far as the tokens.
    """
    (x, start), attention = module.call, module.swapped
    module.call = None  # a stored call would keep its activations in memory
    # the factor is 1 for the usual scaling by the root of the key width; T5 and Whisper have a different one
    q = (query * (options["scaling"] * query.shape[-1] ** 0.5)).transpose(1, 2)
    real = context_mask(attention_mask, key.shape[2], key.shape[0])
    real, (k, v) = padding_to_end(real, key.transpose(1, 2), value.transpose(1, 2))
    projections = CrossProjections(lambda _: q, lambda _: (k, v), lambda out: out)
    out = attention(x, k.flatten(2), context_mask=real, start=start, projections=projections)
    return out.unflatten(-1, (query.shape[1], -1)), None


ALL_ATTENTION_FUNCTIONS.register(CROSS_NAME, cross_attention)
