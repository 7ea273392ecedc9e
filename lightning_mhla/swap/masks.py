"""Conversion of the attention masks of transformers and diffusers to padding masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mhla_kernels.torch_private import assert_async
from torch import Tensor

from lightning_mhla.attention.rows import padding_last, real_tokens, rows_in_order
from lightning_mhla.system.torch_private import is_fake

HIDDEN = -1000.0
"""Largest value of an additive mask that counts as hidden; exp(-1000) is 0 in every floating-point dtype."""


def check_values(condition: Callable[[], Tensor], message: str) -> None:
    """Check that all elements of a bool tensor are True. A compiled graph repeats the check each time it runs.

    Fake tensors, which have no values, are not checked.

    Args:
        condition: function that returns the bool tensor.
        message: error message.

    Raises:
        ValueError: if an element is False. Compiled and exported graphs raise RuntimeError instead.
    """
    holds = condition().all()
    if torch.compiler.is_compiling():
        assert_async(holds, message)
    elif not is_fake(holds) and not bool(holds):
        raise ValueError(message)


def visible_keys(attention_mask: Any) -> Tensor:
    """Convert an attention mask to a bool mask of the same shape, True where a query may attend to a key.

    Args:
        attention_mask: mask ``[..., queries, keys]``. It is either bool, True where a query may attend to a key, or added to
            the attention scores, with 0 for visible keys and at most -1000 for hidden ones.

    Returns:
        The bool mask. A bool ``attention_mask`` is returned unchanged.

    Raises:
        ValueError: if the mask is not a tensor, or if a mask that is not bool contains a value above -1000 other than 0.
    """
    if not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"swapped attention does not support masks of type {type(attention_mask).__name__}; call the model's "
            "set_attn_implementation with sdpa or eager"
        )
    if attention_mask.dtype == torch.bool:
        return attention_mask
    visible = attention_mask == 0
    check_values(
        lambda: visible | (attention_mask <= HIDDEN),
        "the attention mask adds biases to the scores, which the new attention does not have",
    )
    return visible


def has_no_values(x: Tensor) -> bool:
    """Return whether the values of a tensor cannot be read, as during ``torch.compile`` and for fake tensors."""
    return torch.compiler.is_compiling() or is_fake(x)


def context_mask(attention_mask: Any, tokens: int, batch: int) -> Tensor | None:
    """Convert the attention mask of a cross-attention layer to a padding mask of the context.

    Args:
        attention_mask: mask ``[B, Nk]``, nonzero or True for visible tokens; or mask ``[B, Q, Nk]`` or ``[B, 1, Q, Nk]``, where
            Q is the number of queries or 1. A mask with an axis Q is either bool, True where a query may attend to a token, or
            added to the attention scores, with 0 for visible tokens and at most -1000 for hidden ones. The batch axis of any
            mask may have length 1 instead of B. None without a mask.
        tokens: number Nk of tokens of the context.
        batch: number B of rows in the batch.

    Returns:
        ``[B, Nk]`` bool, False for padding; None without a mask.

    Raises:
        ValueError: if the mask does not have the size of the context, hides different tokens from different queries, or adds
            biases to the scores.
    """
    if attention_mask is None:
        return None
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        real = attention_mask.bool()
    else:
        visible = visible_keys(attention_mask).flatten(1, -2)  # [B, Q, Nk]
        real = visible[:, 0]
        check_values(
            lambda: visible == real[:, None],
            "the attention mask hides different tokens from different queries, which swapped cross-attention does not support",
        )
    if real.shape[1] != tokens or real.shape[0] not in (1, batch):
        raise ValueError(
            f"the attention mask has shape {list(attention_mask.shape)}, but the context has {tokens} tokens in {batch} rows"
        )
    return real.expand(batch, -1)


def padding_to_end(real: Tensor | None, *tensors: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """Move the padding of each context row to its end, so that the row's blocks begin at the first token that is not padding.

    Args:
        real: ``[B, N]`` bool, False for padding; None if no token is padding.
        tensors: tokens, keys or values of the context, ``[B, N, ...]`` each.

    Returns:
        The mask in the new order, or None if ``real`` is None; and a list of the tensors in the new order.
    """
    if real is None:
        return None, list(tensors)
    if has_no_values(real):
        order: Tensor | None = padding_last(real)
    else:
        _, _, order = real_tokens(real, tensors[0])
    if order is None:
        return real, list(tensors)
    moved = [rows_in_order(x.flatten(2), order).reshape(x.shape) for x in tensors]
    return real.gather(1, order), moved
