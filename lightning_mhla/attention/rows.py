"""Rows of different lengths, as transformers gives them: padded on either side, or packed in one row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def real_tokens(attention_mask: Tensor | None, x: Tensor) -> tuple[Tensor, tuple[int, ...], Tensor | None]:
    """``[B, N]`` bool, how many are real, and the order that puts each row's first; None where nothing moves."""
    if attention_mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device), (x.shape[1],) * x.shape[0], None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != x.shape[0] or attention_mask.shape[1] < x.shape[1]:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} does not fit tokens {list(x.shape[:2])}")
    real = attention_mask[:, -x.shape[1] :].bool()
    counts = tuple(real.sum(1).tolist())
    if all(count == x.shape[1] for count in counts) or bool((real[:, :-1] | ~real[:, 1:]).all()):
        return real, counts, None
    return real, counts, (~real).to(torch.int8).argsort(dim=1, stable=True)


def rows_in_order(x: Tensor, order: Tensor) -> Tensor:
    """Tokens ``[B, N, D]`` of every row in another order, ``[B, N]`` indices."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def packed_bounds(position_ids: Tensor, x: Tensor) -> Tensor | None:
    """``cu_seqlens`` where the positions of the one row start again, as transformers' collators pack documents."""
    if x.shape[0] != 1 or position_ids.shape[-1] != x.shape[1]:
        return None
    row = position_ids.flatten()
    starts = (row[1:] <= row[:-1]).nonzero().flatten() + 1
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=x.shape[1]) if len(starts) else None
