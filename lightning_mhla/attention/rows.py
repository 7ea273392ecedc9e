"""Masks, token orders and bounds of padded or packed sequences, in the format of Hugging Face's transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def real_mask(attention_mask: Tensor | None, x: Tensor) -> Tensor:
    """Compute a mask of the tokens in ``x``, ``[B, N]`` bool, False for padding.

    Args:
        attention_mask: ``[B, columns]`` of any dtype, 0 or False for padding. The last N columns belong to ``x``, earlier
            columns to previous tokens. None if there is no padding.
        x: tokens ``[B, N, ...]``.

    Raises:
        ValueError: if the mask has a different batch size or fewer columns than ``x`` has tokens.
    """
    if attention_mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if attention_mask.dim() != 2 or attention_mask.shape[0] != x.shape[0] or attention_mask.shape[1] < x.shape[1]:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} does not fit tokens {list(x.shape[:2])}")
    return attention_mask[:, -x.shape[1] :].bool()


def padding_last(real: Tensor) -> Tensor:
    """Compute a permutation of the tokens of each row that moves padding to the end.

    Args:
        real: ``[B, N]`` bool, False for padding.

    Returns:
        ``[B, N]`` int64, index of the token to put at each position.
    """
    columns = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    return torch.zeros_like(columns).scatter(1, places_padding_last(real), columns)


def places_padding_last(real: Tensor) -> Tensor:
    """Compute the position of each token after :func:`padding_last` has moved padding to the end of each row.

    This is the inverse permutation of :func:`padding_last`. It is computed with cumulative sums, because ONNX has no stable
    sort.

    Args:
        real: ``[B, N]`` bool, False for padding.

    Returns:
        ``[B, N]`` int64.
    """
    places = real.long().cumsum(1)
    # Real tokens are counted from 0, and padding from their number on.
    return torch.where(real, places - 1, places[:, -1:] + (~real).long().cumsum(1) - 1)


def real_tokens(attention_mask: Tensor | None, x: Tensor) -> tuple[Tensor, tuple[int, ...], Tensor | None]:
    """Find the non-padding tokens of each row.

    The call waits for the device, because it returns the numbers of tokens as Python integers. In a compiled graph, use
    :func:`real_mask` and :func:`padding_last`, which do not wait.

    Args:
        attention_mask: ``[B, columns]`` of any dtype, 0 or False for padding. The last N columns belong to ``x``. None if no
            token is padding.
        x: tokens ``[B, N, ...]``.

    Returns:
        Three values: a mask ``[B, N]`` bool, True for non-padding tokens; the number of these tokens in each row; and a
        permutation ``[B, N]`` int64 that puts them first in each row, or None if they already come first.
    """
    real = real_mask(attention_mask, x)
    if attention_mask is None:
        return real, (x.shape[1],) * x.shape[0], None
    counts = tuple(real.sum(1).tolist())
    # No padding right before a real token means that padding is already last.
    if all(count == x.shape[1] for count in counts) or bool((real[:, :-1] | ~real[:, 1:]).all()):
        return real, counts, None
    return real, counts, padding_last(real)


def rows_in_order(x: Tensor, order: Tensor) -> Tensor:
    """Reorder tokens ``[B, N, D]`` by indices ``order``, ``[B, N]`` int64: position i of row b gets ``x[b, order[b, i]]``."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def packed_bounds(position_ids: Tensor, x: Tensor) -> Tensor | None:
    """Find the bounds of packed documents from position ids, which restart at each document.

    Args:
        position_ids: position of each token in its document, ``[N]``, ``[1, N]`` or ``[B, N]``, as in transformers' collators.
        x: tokens ``[B, N, ...]``.

    Returns:
        Index of the first token of each document in the concatenated rows, followed by the number of all tokens: ``[S + 1]``
        int64 for S documents. None if each row is one document, or if ``position_ids`` does not have N columns.
    """
    if position_ids.shape[-1] != x.shape[1]:
        return None
    rows = position_ids.expand(x.shape[:2])
    # `<=` and not `<`, because consecutive documents of one token each repeat position 0.
    return _bounds(rows[:, 1:] <= rows[:, :-1])


def changed_bounds(documents: Tensor, x: Tensor) -> Tensor | None:
    """Find the bounds of packed documents from the document number of each token.

    Args:
        documents: document number of each token, ``[N]`` or ``[B, N]``. A document begins where the number changes.
        x: tokens ``[B, N, ...]``.

    Returns:
        Index of the first token of each document in the concatenated rows, followed by the number of all tokens: ``[S + 1]``
        int64 for S documents. None if each row is one document.

    Raises:
        ValueError: if ``documents`` has neither the shape ``[N]`` nor ``[B, N]``.
    """
    if documents.shape not in (x.shape[:2], x.shape[1:2]):
        raise ValueError(f"seq_idx {list(documents.shape)} does not fit tokens {list(x.shape[:2])}")
    rows = documents.expand(x.shape[:2])
    return _bounds(rows[:, 1:] != rows[:, :-1])


def _bounds(starts: Tensor) -> Tensor | None:
    """Compute the bounds of packed documents from a mask of the tokens at which documents begin.

    Args:
        starts: mask of tokens 1 to N - 1 of each row, ``[B, N - 1]`` bool. A document always begins at token 0.

    Returns:
        Index of the first token of each document in the concatenated rows, followed by the number of all tokens: ``[S + 1]``
        for S documents. None if each row is one document.
    """
    if not bool(starts.any()):
        return None
    firsts = F.pad(starts, (1, 0), value=True).flatten()
    return F.pad(firsts.nonzero().flatten(), (0, 1), value=firsts.numel())
