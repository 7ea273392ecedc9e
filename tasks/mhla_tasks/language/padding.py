"""Checks and conversions of the forward pass's inputs: masks, packed documents, positions and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mhla import GenerationCache
from lightning_mhla.attention.rows import changed_bounds, packed_bounds
from mhla_tasks.language.loss import IGNORED


def in_graph() -> bool:
    """Return whether ``torch.compile`` or ``torch.export`` is recording a graph, so that tensor values are unknown."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Raise ValueError if there are no tokens, or a token index is not in the vocabulary.

    Args:
        tokens: token indices, ``[B, N]``.
        vocabulary: number of tokens in the vocabulary.
    """
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(f"the prompt is empty: tokens have shape {list(tokens.shape)}; give at least one token")
    smallest, largest = (int(x) for x in tokens.aminmax())
    if smallest < 0 or largest >= vocabulary:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(
            f"token {wrong} is not in the vocabulary of {vocabulary}; the text was encoded with the tokenizer of a "
            "different model"
        )


def check_counts(cache: GenerationCache | None, counts: Sequence[int]) -> None:
    """Raise ValueError if batch and cache differ in the number of rows, or if a row has neither new nor cached tokens.

    Args:
        cache: generation state to continue from; None to start from the first token.
        counts: number of new tokens, without padding, in each row of the batch.
    """
    lengths = cache.lengths if cache is not None and cache.lengths else (0,) * len(counts)
    if len(lengths) != len(counts):
        raise ValueError(f"the state has {len(lengths)} rows, the batch {len(counts)}")
    empty = [row for row, (length, count) in enumerate(zip(lengths, counts, strict=True)) if length + count == 0]
    if empty:
        raise ValueError(f"the prompt of row {empty[0]} is empty: its attention_mask is 0 everywhere")


def check_length(cache: GenerationCache, counts: Sequence[int], limit: int | None) -> None:
    """Raise ValueError if the cached and new tokens of a row together exceed the limit.

    Args:
        cache: generation state to continue from, which holds the number of earlier tokens in each row.
        counts: number of new tokens, without padding, in each row.
        limit: maximum number of tokens in a row; None for no limit.
    """
    lengths = cache.lengths or (0,) * len(counts)
    longest = max((length + count for length, count in zip(lengths, counts, strict=True)), default=0)
    if limit is not None and longest > limit:
        raise ValueError(
            f"{longest} tokens are more than the {limit} of the layer's mixing coefficients; extend the model "
            f"(its method extend), or train with mixing: exponential, which takes any length"
        )


def document_bounds(
    options: Mapping[str, Any], cu_seqlens: Sequence[int] | Tensor | None, position_ids: Tensor | None, x: Tensor
) -> Sequence[int] | Tensor | None:
    """Determine the boundaries of packed documents from whichever argument of the forward pass marks them.

    Args:
        options: keyword arguments of the forward pass that mark documents: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, which hold
            the boundaries, or ``seq_idx``, the index of each token's document. transformers' ``DataCollatorWithFlattening``
            creates them.
        cu_seqlens: boundaries in the form of the return value; None to derive them from the other arguments.
        position_ids: positions of the tokens; None to ignore positions. A document begins where a position is not above the
            previous one. An exported graph ignores positions, because it cannot depend on their values.
        x: tokens, ``[B, N, ...]``.

    Returns:
        Index of the first token of each of S documents, followed by the number of tokens, ``[S + 1]``. The indices count tokens
        in the concatenation of all rows. None if no argument marks documents, so that every row is one document.

    Raises:
        ValueError: if the arguments contradict each other.
    """
    queries, keys, documents = (options.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"))
    if (queries is None) != (keys is None):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k come together; give both, or cu_seqlens")
    if queries is not None and keys is not None:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens and cu_seq_lens_q are the same bounds; give one of the two")
        if queries.shape != keys.shape or not (in_graph() or torch.equal(queries, keys)):
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: tokens attend to those of their own document")
        cu_seqlens = queries.flatten()
    if cu_seqlens is not None:
        return cu_seqlens
    if documents is not None:
        return changed_bounds(documents, x)
    if position_ids is None or torch.compiler.is_exporting():
        return None
    return packed_bounds(position_ids, x)


def row_positions(position_ids: Tensor | None, x: Tensor, order: Tensor | None) -> Tensor | None:
    """Select the positions of the current tokens from ``position_ids``, which may also cover earlier tokens.

    Args:
        position_ids: positions, ``[M]``, ``[1, M]`` or ``[B, M]`` with M at least N, of which the last N belong to the current
            tokens; None if no positions were given.
        x: current tokens, ``[B, N, ...]``.
        order: indices that put the non-padding tokens of each row first, ``[B, N]``; None keeps the order.

    Returns:
        Positions, ``[N]`` or ``[B, N]``, in the new order; None if ``position_ids`` is None.
    """
    if position_ids is None:
        return None
    position_ids = position_ids[..., -x.shape[1] :]
    if order is not None:
        return position_ids.expand(x.shape[:2]).gather(1, order)
    return position_ids.flatten() if position_ids.dim() == 1 or position_ids.shape[0] == 1 else position_ids


def following_tokens(labels: Tensor, real: Tensor | None) -> Tensor:
    """Shift labels by one column to the left, so that the target of each token is the next token.

    Args:
        labels: token indices, ``[B, N]`` int64.
        real: mask that is True for tokens and False for padding, ``[B, N]`` bool; None if there is no padding.

    Returns:
        Targets, ``[B, N]`` int64; -100 (ignored) in the last column and where the token or the next one is padding.
    """
    following = labels[:, 1:]
    if real is not None:
        counts = real[:, 1:] & real[:, :-1]
        following = following.masked_fill(~counts, IGNORED)
    return F.pad(following, (0, 1), value=IGNORED)
