"""Conversion of transformers' attention masks and positions to padding masks and document boundaries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mhla.swap.masks import check_values, has_no_values, visible_keys

GIVEN = "given_mask"
"""Name of the keyword argument that passes the model's original mask to an attention module, in a one-item tuple."""


def real_of_decoder(
    attention_mask: Any, x: Tensor, cache: Any, given_mask: tuple[Any] | None, position_ids: Tensor | None
) -> Tensor | None:
    """Return a mask of the tokens in a decoder's input that are not padding.

    The mask that the model was called with is used if it is known and has two dimensions. Otherwise the mask that transformers
    derives from it is used. In a compiled graph, transformers passes a mask even if the model was called without one. Such a
    mask contains no padding, but it could separate packed documents, which compiled graphs do not support. Therefore
    ``position_ids`` are checked for packed documents in this case.

    The letters in the shapes are: B rows, N tokens, width C. ``columns`` is the number of cached tokens plus N.

    Args:
        attention_mask: mask that the attention module receives: ``[B, columns]``, nonzero or True for visible tokens; or
            ``[B, 1, N, columns]`` for pairs of queries and keys. The latter is either bool, True where a query may attend to a
            key, or added to the scores, with 0 for visible keys and at most -1000 for hidden ones. None without a mask.
        x: inputs of the attention module, ``[B, N, C]``.
        cache: cache layer. Its recurrent state does not include these tokens yet, but its token count does. None without a
            cache.
        given_mask: one-item tuple that holds the ``attention_mask`` that the model was called with, or None if it was called
            without one. None in place of the tuple if the argument is not known.
        position_ids: positions of the tokens, ``[B, N]`` or ``[1, N]``; None if they are not known.

    Returns:
        ``[B, N]`` bool, False for padding; None if no token is padding.

    Raises:
        ValueError: if the mask hides anything except padding and later tokens, hides tokens that the recurrent state includes,
            or adds biases to attention scores.
        RuntimeError: from a compiled graph, if it runs with such a mask or with packed documents.
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
    """Find the boundaries of documents that are packed in a single row.

    Packed documents are recognized from a mask ``[B, 1, N, N]`` that separates them. Without a mask, as with flash attention,
    they are recognized from positions that return to their smallest value inside the row.

    The letters in the shapes are: B rows, N tokens, width C. ``columns`` is the number of cached tokens plus N.

    Args:
        attention_mask: mask ``[B, columns]``, nonzero or True for visible tokens; or mask ``[B, 1, N, columns]`` of pairs of
            queries and keys. The latter is either bool, True where a query may attend to a key, or added to the scores, with 0
            for visible keys and at most -1000 for hidden ones. None without a mask.
        x: inputs of the attention module, ``[B, N, C]``.
        position_ids: positions of the tokens, ``[B, N]`` or ``[1, N]``; None to recognize documents only by the mask.

    Returns:
        Int64 tensor with the index of the first token of each document, followed by N; None if no documents are packed.

    Raises:
        ValueError: if documents are packed and there is more than one row.
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
    """Find the first tokens of packed documents from a causal mask that separates the documents.

    Args:
        attention_mask: mask in one of the forms that :func:`documents` accepts.
        tokens: number of tokens in a row, N.

    Returns:
        ``[B, N - 1]`` bool, True at index i if token i + 1 is the first of a document. None if the mask does not separate
        documents, or if a compiled graph cannot read its values.
    """
    if isinstance(attention_mask, Tensor) and (attention_mask.dim() == 2 or has_no_values(attention_mask)):
        return None
    visible = visible_keys(attention_mask)
    if visible.shape[-2:] != (tokens, tokens):
        return None
    # [B, N - 1]: token i + 1 does not see token i.
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
    """Return whether each of the positions ``[B, N]`` is one more than the previous position in its row.

    If the values of the tensor cannot be read, as in a compiled graph, the result is True.
    """
    if has_no_values(position_ids):
        return True
    # The version counts changes in place, which the identity of a tensor does not show. Inference tensors have no version.
    version = 0 if position_ids.is_inference() else position_ids._version
    cached = _counting.get(position_ids)
    if cached is None or cached[0] != version:
        cached = (version, bool((position_ids[:, 1:] == position_ids[:, :-1] + 1).all()))
        _counting[position_ids] = cached
    return bool(cached[1])


def own_keys(attention_mask: Any, x: Tensor) -> Tensor | None:
    """Return a mask of the tokens that may attend to themselves, according to an attention mask.

    In transformers' masks, padding tokens usually may not attend to themselves. The letters in the shapes are: B rows, N
    tokens, width C. ``columns`` is the number of cached tokens plus N.

    Args:
        attention_mask: mask ``[B, columns]``, nonzero or True for visible tokens; or mask ``[B, 1, N, columns]`` of pairs of
            queries and keys. The latter is either bool, True where a query may attend to a key, or added to the scores, with 0
            for visible keys and at most -1000 for hidden ones. None without a mask.
        x: inputs or outputs of the attention module, ``[B, N, C]``.

    Returns:
        ``[B, N]`` bool, True for tokens that may attend to themselves; None without a mask.

    Raises:
        ValueError: if the mask adds biases to attention scores.
    """
    if attention_mask is None:
        return None
    tokens = x.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return attention_mask[:, -tokens:].bool()
    return visible_keys(attention_mask).expand(-1, -1, tokens, -1)[:, 0, :, -tokens:].diagonal(dim1=1, dim2=2)


def key_mask(attention_mask: Any, x: Tensor, cache: Any) -> Tensor | None:
    """Convert the attention mask of a decoder to a padding mask of its input.

    The letters in the shapes are: B rows, N tokens, width C. ``columns`` is the number of cached tokens plus N.

    Args:
        attention_mask: mask ``[B, columns]``, nonzero or True for visible tokens; or mask ``[B, 1, N, columns]`` of pairs of
            queries and keys. The latter is either bool, True where a query may attend to a key, or added to the scores, with 0
            for visible keys and at most -1000 for hidden ones. None without a mask.
        x: inputs of the attention module, ``[B, N, C]``.
        cache: cache layer. Its recurrent state does not include these tokens yet, but its token count does. None without a
            cache.

    Returns:
        ``[B, N]`` bool, False for padding; None without an attention mask.

    Raises:
        ValueError: if the mask hides anything except padding and later tokens, hides tokens that the recurrent state includes,
            or adds biases to attention scores.
    """
    if attention_mask is None:
        return None
    tokens = x.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        last = attention_mask.bool()
    else:
        visible = visible_keys(attention_mask)
        last = visible[:, 0, -1]  # the last token sees all tokens but padding
        position = torch.arange(visible.shape[-1], device=x.device)
        expected = (last[:, None] & (position <= position[-tokens:, None]))[:, None]
        # rows of padding may see all tokens or none; transformers fills them in either way
        padding = ~last[:, None, -tokens:, None] & (visible.all(-1, keepdim=True) | ~visible.any(-1, keepdim=True))
        check_values(
            lambda: (visible == expected) | padding,
            "the attention mask hides more than padding and later tokens, which swapped attention does not support",
        )
    if cache is not None and cache.state is not None and last.shape[1] > tokens and not has_no_values(last):
        real_counts = tuple(last[:, :-tokens].sum(1).tolist())
        if last.shape[1] == cache.columns and real_counts != tuple(cache.state.lengths):
            raise ValueError(
                f"the attention mask has {list(real_counts)} real tokens before these, but the state holds "
                f"{cache.state.lengths}: tokens in the state cannot be hidden"
            )
    return last[:, -tokens:].expand(x.shape[0], -1)


def padding_mask(attention_mask: Any, x: Tensor) -> Tensor | None:
    """Convert the attention mask of a text encoder to a padding mask of its input.

    Args:
        attention_mask: mask for B rows of N tokens: ``[B, N]``, nonzero or True for visible tokens; or ``[B, 1, N, N]`` for
            pairs of queries and keys. The latter is either bool, True where a query may attend to a key, or added to the
            scores, with 0 for visible keys and at most -1000 for hidden ones. None without a mask.
        x: inputs of the attention module, ``[B, N, C]`` for tokens of width C.

    Returns:
        ``[B, N]`` bool, False for padding; None without an attention mask.

    Raises:
        ValueError: if the mask hides anything except padding, or adds biases to attention scores.
    """
    real = own_keys(attention_mask, x)
    if real is None or attention_mask.dim() == 2:
        return real
    visible = visible_keys(attention_mask)
    check_values(
        lambda: (visible == real[:, None, None]) | ~real[:, None, :, None],
        "the attention mask hides more than padding, and the new attention of an encoder knows no other",
    )
    return real.expand(x.shape[0], -1)


def check_nothing_hidden(attention_mask: Any) -> None:
    """Check that an attention mask of an image encoder hides no patch.

    Args:
        attention_mask: mask ``[B, 1, N, N]`` for B images of N tokens, either bool, True where a query may attend to a key, or
            added to the scores, with 0 for visible keys and at most -1000 for hidden ones. None without a mask.

    Raises:
        ValueError: if the mask hides a patch, adds biases to attention scores, or is neither a tensor nor None.
    """
    if attention_mask is not None:
        visible = visible_keys(attention_mask)
        check_values(lambda: visible, "the attention mask hides patches, and the new attention sees whole images")
