"""Rows of different lengths as transformers hands them over: padded, packed, with positions or labels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from lightning_mhla import GenerationCache
from mhla_tasks.language.loss import IGNORED


def check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Raise ValueError for an empty prompt, and for tokens beyond the vocabulary."""
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(f"the prompt is empty: tokens have shape {list(tokens.shape)}; give at least one token")
    least, most = (int(x) for x in tokens.aminmax())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise ValueError(
            f"token {wrong} is not in the vocabulary of {vocabulary}; the text was encoded with the tokenizer of another "
            "model"
        )


def check_counts(cache: GenerationCache | None, counts: Sequence[int]) -> None:
    """Raise ValueError unless ``counts`` are of the rows that the cache holds."""
    lengths = cache.lengths if cache is not None and cache.lengths else (0,) * len(counts)
    if len(lengths) != len(counts):
        raise ValueError(f"the state is of {len(lengths)} rows, but there are {len(counts)}")
    empty = [row for row, (before, count) in enumerate(zip(lengths, counts, strict=True)) if before + count == 0]
    if empty:
        raise ValueError(f"the prompt of row {empty[0]} is empty: its attention_mask is 0 everywhere")


def row_positions(position_ids: Tensor | None, x: Tensor, order: Tensor | None) -> Tensor | None:
    """Positions of the tokens at hand, ``[N]`` or ``[B, N]``, each row's real tokens first."""
    if position_ids is None:
        return None
    position_ids = position_ids[..., -x.shape[1] :]
    if order is not None:
        return position_ids.expand(x.shape[:2]).gather(1, order)
    return position_ids.flatten() if position_ids.numel() == x.shape[1] else position_ids


def following_tokens(labels: Tensor, real: Tensor) -> Tensor:
    """The token after each, where both are real."""
    following, counts = labels[:, 1:], real[:, 1:] & real[:, :-1]
    return F.pad(following.masked_fill(~counts, IGNORED), (0, 1), value=IGNORED)
