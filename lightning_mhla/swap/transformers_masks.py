"""Padding and document boundaries, derived from transformers' attention masks and positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mhla_kernels.torch_private import assert_async
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mhla.system.torch_private import is_fake

HIDDEN = -1000.0
"""Largest value of an additive mask that counts as hidden; exp(-1000) is 0 in every floating-point dtype."""


GIVEN = "given_mask"
"""Name of the keyword argument that passes the model's original mask to an attention module, as a tuple of one."""


def check_values(condition: Callable[[], Tensor], message: str) -> None:
    """Check a condition on the values of a tensor, immediately or, in a traced graph, whenever the graph runs.

    Args:
        condition: function that returns a boolean tensor that must be true everywhere.
        message: error message.

    Raises:
        ValueError: if the condition does not hold. Compiled and exported graphs raise RuntimeError.
    """
    holds = condition().all()
    if torch.compiler.is_compiling():
        assert_async(holds, message)
    elif not is_fake(holds) and not bool(holds):
        raise ValueError(message)


def real_of_decoder(
    attention_mask: Any, x: Tensor, cache: Any, given_mask: tuple[Any] | None, position_ids: Tensor | None
) -> Tensor | None:
    """Return the mask of a decoder's non-padding tokens, from the mask that the model was called with if it is known.

    If that original mask has two dimensions, it is used, and ``attention_mask``, which transformers derives from it, is not
    read. In a traced graph, transformers passes a mask over pairs of tokens even if the model was called without a mask. Such
    a mask could only separate packed documents, so ``position_ids`` are checked for these instead.

    Args:
        attention_mask: mask that the attention module gets, ``[B, columns]`` or ``[B, 1, N, columns]``, with a column for each
            cached token and each of the N tokens; None without a mask.
        x: inputs of the attention module, ``[B, N, dim]``.
        cache: cache layer with the state before these tokens, whose columns already count them; None without a cache.
        given_mask: one-item tuple with the model's own ``attention_mask`` argument, which may be None; None if that argument is
            not known.
        position_ids: positions, ``[B, N]`` or ``[1, N]``; None if they are not known.

    Returns:
        Mask ``[B, N]``, bool; None if no token is padding.

    Raises:
        ValueError: if :func:`key_mask` rejects the mask, or documents are packed in a graph.
    """
    if given_mask is not None and isinstance(given_mask[0], Tensor) and given_mask[0].dim() == 2:
        return key_mask(given_mask[0], x, cache)
    if given_mask is not None and given_mask[0] is None and torch.compiler.is_compiling():
        if attention_mask is None or cache is not None:
            return None
        if position_ids is not None:
            check_values(lambda: position_ids[:, 1:] == position_ids[:, :-1] + 1, PACKED)
            return None
    return key_mask(attention_mask, x, cache)


PACKED = (
    "position_ids begin again inside a row: a compiled or exported graph of swapped attention takes no packed documents; "
    "give them as rows with attention_mask, or run this model without torch.compile"
)


def documents(attention_mask: Any, x: Tensor, position_ids: Tensor | None = None) -> Tensor | None:
    """Return the boundaries of documents that are packed in a single row.

    Documents are recognized as in transformers: by a mask ``[B, 1, N, N]`` that separates them, or, for flash attention
    without a mask, by positions. A document then begins at each occurrence of the smallest position.

    Args:
        attention_mask: mask ``[B, columns]``, or ``[B, 1, N, columns]`` as booleans or as values that are added to scores,
            with a column for each cached token and each of the N tokens; None without a mask.
        x: inputs of the attention module, ``[B, N, dim]``.
        position_ids: positions, ``[B, N]`` or ``[1, N]``, if only they separate documents (flash attention); otherwise None.

    Returns:
        ``cu_seqlens`` ``[documents + 1]``, int64: the index of the first token of each document, then the number of tokens.
        None if no documents are packed.

    Raises:
        ValueError: if documents are packed and there are several rows.
    """
    tokens = x.shape[1]
    if attention_mask is not None:
        starts = _starts_in(attention_mask, tokens)
    elif position_ids is None or tokens < 2 or x.shape[0] != 1 or _counts_up(position_ids):
        return None
    else:
        starts = position_ids[:, 1:] == position_ids.min()
    if starts is None or not bool(starts.any()):
        return None
    if x.shape[0] != 1:
        raise ValueError(f"packed documents need a batch of one row, not {list(x.shape[:2])} tokens")
    (first,) = starts[0].nonzero(as_tuple=True)
    return F.pad(F.pad(first + 1, (1, 0)), (0, 1), value=tokens)


def _starts_in(attention_mask: Any, tokens: int) -> Tensor | None:
    """Find the first tokens of packed documents in a causal mask that keeps documents apart.

    Returns:
        ``[B, N - 1]`` bool, true at ``i`` if token ``i + 1`` does not see token ``i``; None for a mask of a different form.
    """
    if isinstance(attention_mask, Tensor) and (attention_mask.dim() == 2 or _has_no_values(attention_mask)):
        return None
    visible = _visible(attention_mask)
    if visible.shape[-2:] != (tokens, tokens):
        return None
    starts = ~visible[:, 0].diagonal(-1, 1, 2)
    if not bool(starts.any()):
        return None
    # these are documents only if the mask shows every token all earlier ones of its document, and nothing else
    document = F.pad(starts.cumsum(1), (1, 0))
    expected = (document[:, :, None] == document[:, None]).tril()[:, None]
    return starts if bool((visible == expected).all()) else None


_counting: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Cached results of :func:`_counts_up` by tensor, each with the version of the tensor; all layers share one tensor."""


def _counts_up(position_ids: Tensor) -> bool:
    """Return whether every position is one more than the previous one; True if the tensor's values cannot be read."""
    if _has_no_values(position_ids):
        return True
    version = 0 if position_ids.is_inference() else position_ids._version
    cached = _counting.get(position_ids)
    if cached is None or cached[0] != version:
        cached = (version, bool((position_ids[:, 1:] == position_ids[:, :-1] + 1).all()))
        _counting[position_ids] = cached
    return bool(cached[1])


def own_keys(attention_mask: Any, x: Tensor) -> Tensor | None:
    """Return the mask of tokens that may attend to themselves, ``[B, N]`` bool; None without an attention mask.

    Args:
        attention_mask: mask ``[B, columns]`` or ``[B, 1, N, columns]``, with a column for each cached token and each of the N
            tokens; None without a mask.
        x: inputs or outputs of the attention module, ``[B, N, dim]``.
    """
    if attention_mask is None:
        return None
    tokens = x.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return attention_mask[:, -tokens:].bool()
    return _visible(attention_mask).expand(-1, -1, tokens, -1)[:, 0, :, -tokens:].diagonal(dim1=1, dim2=2)


def _visible(attention_mask: Any) -> Tensor:
    """Convert a mask over queries and keys to a boolean mask ``[B, heads or 1, N, columns]``, True for visible keys.

    Raises:
        ValueError: if the mask is not a tensor, or adds biases to scores.
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


def _has_no_values(x: Tensor) -> bool:
    """Return whether the values of a tensor cannot be read, because a graph is being traced or the tensor is fake."""
    return torch.compiler.is_compiling() or is_fake(x)


def key_mask(attention_mask: Any, x: Tensor, cache: Any = None) -> Tensor | None:
    """Return the mask of non-padding tokens of a decoder, from its attention mask.

    Args:
        attention_mask: mask ``[B, columns]`` or ``[B, 1, N, columns]``, with a column for each cached token and each of the N
            tokens; None without a mask.
        x: inputs of the attention module, ``[B, N, dim]``.
        cache: cache layer with the state before these tokens, whose columns already count them; None without a cache.

    Returns:
        Mask ``[B, N]``, bool; None without an attention mask.

    Raises:
        ValueError: if the mask hides more than padding and later tokens, or hides tokens that the cache's state includes.
    """
    if attention_mask is None:
        return None
    tokens = x.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        last = attention_mask.bool()
    else:
        visible = _visible(attention_mask)
        last = visible[:, 0, -1]  # the last token sees all tokens but padding
        position = torch.arange(visible.shape[-1], device=x.device)
        expected = (last[:, None] & (position <= position[-tokens:, None]))[:, None]
        # rows of padding may see all tokens or none; transformers fills them in either way
        padding = ~last[:, None, -tokens:, None] & (visible.all(-1, keepdim=True) | ~visible.any(-1, keepdim=True))
        check_values(
            lambda: (visible == expected) | padding,
            "the attention mask hides more than padding and later tokens, which swapped attention does not support",
        )
    if cache is not None and cache.state is not None and last.shape[1] > tokens and not _has_no_values(last):
        real_counts = tuple(last[:, :-tokens].sum(1).tolist())
        if last.shape[1] == cache.columns and real_counts != tuple(cache.state.lengths):
            raise ValueError(
                f"the attention mask has {list(real_counts)} real tokens before these, but the state holds "
                f"{cache.state.lengths}: tokens in the state cannot be hidden"
            )
    return last[:, -tokens:].expand(x.shape[0], -1)


def padding_mask(attention_mask: Any, x: Tensor) -> Tensor | None:
    """Return the mask of non-padding tokens of a text encoder, from its attention mask.

    Args:
        attention_mask: mask ``[B, N]`` or ``[B, 1, N, N]``, booleans or values that are added to scores; None without a mask.
        x: inputs of the attention module, ``[B, N, dim]``.

    Returns:
        Mask ``[B, N]``, bool; None without an attention mask.

    Raises:
        ValueError: if the mask hides more than padding.
    """
    real = own_keys(attention_mask, x)
    if real is None or attention_mask.dim() == 2:
        return real
    visible = _visible(attention_mask)
    check_values(
        lambda: (visible == real[:, None, None]) | ~real[:, None, :, None],
        "the attention mask hides more than padding, and the new attention of an encoder knows no other",
    )
    return real.expand(x.shape[0], -1)


def check_nothing_hidden(attention_mask: Any) -> None:
    """Check that a mask of an image encoder hides no patch.

    Raises:
        ValueError: if the mask hides a patch, or is not a tensor.
    """
    if attention_mask is not None:
        visible = _visible(attention_mask)
        check_values(lambda: visible, "the attention mask hides patches, and the new attention sees whole images")
