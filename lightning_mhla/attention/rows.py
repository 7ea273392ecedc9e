"""Rows of different lengths, as transformers gives them: padded on either side, or packed in one row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def real_mask(attention_mask: Tensor | None, x: Tensor) -> Tensor:
    """Mask of the real tokens among ``x``.

    Args:
        attention_mask: ``[B, columns]``, 0 for padding, the last columns being those of ``x``; None for no padding.
        x: tokens ``[B, N, ...]``.

    Returns:
        ``[B, N]`` bool.

    Raises:
        ValueError: for a mask of a different batch or of fewer columns.
    """
    if attention_mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if attention_mask.dim() != 2 or attention_mask.shape[0] != x.shape[0] or attention_mask.shape[1] < x.shape[1]:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} does not fit tokens {list(x.shape[:2])}")
    return attention_mask[:, -x.shape[1] :].bool()


def real_first(real: Tensor) -> Tensor:
    """Order ``[B, N]`` that puts the real tokens of each row first, for ``real`` ``[B, N]`` bool."""
    columns = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    return torch.zeros_like(columns).scatter(1, places_real_first(real), columns)


def places_real_first(real: Tensor) -> Tensor:
    """Place of each token in :func:`real_first`'s order, ``[B, N]``: the inverse of that permutation.

    Sums take the place of a stable sort, which ONNX does not have.
    """
    places = real.long().cumsum(1)
    return torch.where(real, places - 1, places[:, -1:] + (~real).long().cumsum(1) - 1)


def real_tokens(attention_mask: Tensor | None, x: Tensor) -> tuple[Tensor, tuple[int, ...], Tensor | None]:
    """``[B, N]`` bool, how many are real, and the order that puts each row's first; None where nothing moves.

    The counts are Python numbers, which a state needs: a device is waited for. Without a state, :func:`real_mask` and
    :func:`real_first` give the same without them, in a compiled graph too.
    """
    real = real_mask(attention_mask, x)
    if attention_mask is None:
        return real, (x.shape[1],) * x.shape[0], None
    counts = tuple(real.sum(1).tolist())
    if all(count == x.shape[1] for count in counts) or bool((real[:, :-1] | ~real[:, 1:]).all()):
        return real, counts, None
    return real, counts, real_first(real)


def order_of(real: Tensor) -> Tensor:
    """The order ``[B, N]`` that puts each row's real tokens first, by sums alone: ONNX has no stable sort."""
    real_before, hidden_before = real.cumsum(1), (~real).cumsum(1)
    place = torch.where(real, real_before - 1, real_before[:, -1:] + hidden_before - 1)
    index = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    return torch.zeros_like(place).scatter(1, place, index)


def rows_in_order(x: Tensor, order: Tensor) -> Tensor:
    """Tokens ``[B, N, D]`` of every row in another order, ``[B, N]`` indices."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def packed_bounds(position_ids: Tensor, x: Tensor) -> Tensor | None:
    """First token of each document where positions start again inside a row, as transformers' collators pack documents.

    Args:
        position_ids: ``[N]``, ``[1, N]`` or ``[B, N]``.
        x: tokens ``[B, N, ...]``.

    Returns:
        ``cu_seqlens`` of the rows laid end to end, ``[S + 1]``; None where every row is one document.
    """
    if position_ids.shape[-1] != x.shape[1]:
        return None
    rows = position_ids.expand(x.shape[:2])
    return _bounds(rows[:, 1:] <= rows[:, :-1])


def changed_bounds(documents: Tensor, x: Tensor) -> Tensor | None:
    """Do the same for the number of each token's document, ``[N]`` or ``[B, N]``.

    Raises:
        ValueError: for numbers of a different shape than the tokens.
    """
    if documents.shape not in (x.shape[:2], x.shape[1:2]):
        raise ValueError(f"seq_idx {list(documents.shape)} does not fit tokens {list(x.shape[:2])}")
    rows = documents.expand(x.shape[:2])
    return _bounds(rows[:, 1:] != rows[:, :-1])


def _bounds(starts: Tensor) -> Tensor | None:
    """Bounds of documents that begin at the rows' first tokens, and wherever ``starts`` ``[B, N - 1]`` says after it."""
    if not bool(starts.any()):
        return None
    firsts = F.pad(starts, (1, 0), value=True).flatten()
    return F.pad(firsts.nonzero().flatten(), (0, 1), value=firsts.numel())
