"""Rows of different lengths in the forms of transformers: padded on either side, or packed into one row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def real_mask(attention_mask: Tensor | None, x: Tensor) -> Tensor:
    """Compute the mask of non-padding tokens in ``x``.

    Args:
        attention_mask: ``[B, columns]``, 0 for padding. Its last N columns belong to ``x``, earlier ones to previous tokens.
            None without padding.
        x: tokens ``[B, N, ...]``.

    Returns:
        ``[B, N]`` bool.

    Raises:
        ValueError: if the mask has a different batch size or fewer columns than ``x``.
    """
    if attention_mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if attention_mask.dim() != 2 or attention_mask.shape[0] != x.shape[0] or attention_mask.shape[1] < x.shape[1]:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} does not fit tokens {list(x.shape[:2])}")
    return attention_mask[:, -x.shape[1] :].bool()


def padding_last(real: Tensor) -> Tensor:
    """Compute the order ``[B, N]`` that puts the non-padding tokens (``real`` ``[B, N]`` bool) of each row first."""
    columns = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    return torch.zeros_like(columns).scatter(1, places_padding_last(real), columns)


def places_padding_last(real: Tensor) -> Tensor:
    """Compute the position ``[B, N]`` of each token in the order of :func:`padding_last`, its inverse permutation.

    Cumulative sums replace a stable sort, which ONNX does not have.
    """
    places = real.long().cumsum(1)
    return torch.where(real, places - 1, places[:, -1:] + (~real).long().cumsum(1) - 1)


def real_tokens(attention_mask: Tensor | None, x: Tensor) -> tuple[Tensor, tuple[int, ...], Tensor | None]:
    """Find the non-padding tokens of each row.

    This function waits for the device, because the numbers of tokens are Python integers, as generation states require.
    :func:`real_mask` and :func:`padding_last` compute mask and order without waiting, also in a compiled graph.

    Returns:
        Mask of non-padding tokens, ``[B, N]`` bool; their number in each row; and the order ``[B, N]`` that puts them first, or
        None if they are first already.
    """
    real = real_mask(attention_mask, x)
    if attention_mask is None:
        return real, (x.shape[1],) * x.shape[0], None
    counts = tuple(real.sum(1).tolist())
    if all(count == x.shape[1] for count in counts) or bool((real[:, :-1] | ~real[:, 1:]).all()):
        return real, counts, None
    return real, counts, padding_last(real)


def rows_in_order(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the tokens ``[B, N, D]`` of every row by ``[B, N]`` indices."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def packed_bounds(position_ids: Tensor, x: Tensor) -> Tensor | None:
    """Find the bounds of packed documents from position ids, which restart at each document as in transformers' collators.

    Args:
        position_ids: position of each token in its document, ``[N]``, ``[1, N]`` or ``[B, N]``.
        x: tokens ``[B, N, ...]``.

    Returns:
        ``cu_seqlens`` ``[S + 1]`` of the concatenated rows; None if every row is one document.
    """
    if position_ids.shape[-1] != x.shape[1]:
        return None
    rows = position_ids.expand(x.shape[:2])
    return _bounds(rows[:, 1:] <= rows[:, :-1])


def changed_bounds(documents: Tensor, x: Tensor) -> Tensor | None:
    """Find the bounds of packed documents from the number of each token's document.

    Args:
        documents: document number of each token, ``[N]`` or ``[B, N]``. A document begins where the number changes.
        x: tokens ``[B, N, ...]``.

    Returns:
        ``cu_seqlens`` ``[S + 1]`` of the concatenated rows; None if every row is one document.

    Raises:
        ValueError: if the numbers do not have the shape of the tokens.
    """
    if documents.shape not in (x.shape[:2], x.shape[1:2]):
        raise ValueError(f"seq_idx {list(documents.shape)} does not fit tokens {list(x.shape[:2])}")
    rows = documents.expand(x.shape[:2])
    return _bounds(rows[:, 1:] != rows[:, :-1])


def _bounds(starts: Tensor) -> Tensor | None:
    """Compute the bounds of documents from a mask of the tokens at which documents begin.

    Args:
        starts: ``[B, N - 1]`` bool, whether a document begins at token 1, 2, ..., N - 1. One always begins at token 0.

    Returns:
        ``cu_seqlens`` ``[S + 1]`` of the concatenated rows; None if every row is one document.
    """
    if not bool(starts.any()):
        return None
    firsts = F.pad(starts, (1, 0), value=True).flatten()
    return F.pad(firsts.nonzero().flatten(), (0, 1), value=firsts.numel())
