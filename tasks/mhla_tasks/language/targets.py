"""Masks and ranges of the tokens that the loss counts, such as the assistant's messages in a dialogue.

Ranges are stored beside the tokens, because the tokens alone do not show which of them the assistant wrote. A chat template may
end the messages of all roles with the same control token, and a sample may begin inside a message.
"""

from __future__ import annotations

import numpy as np


class UnknownRepliesError(ValueError):
    """Error for a chat template or a tokenizer that does not show which tokens of a dialogue the model writes."""


def mask_ranges(mask: np.ndarray) -> np.ndarray:
    """Return the ranges of consecutive True values in a mask.

    Args:
        mask: any mask, ``[n]`` bool.

    Returns:
        Index of the first value of each range and index after its last one, ``[ranges, 2]`` int64, in ascending order.
    """
    # With False on both sides of the mask, starts and ends alternate.
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2).astype(np.int64)


def ranges_between(ranges: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return the parts of several ascending ranges that lie inside a given range.

    Args:
        ranges: index of the first token of each range and index after its last one, ``[ranges, 2]``, in ascending order and
            without overlap.
        first: index of the first token of the range to cut out.
        stop: index after the last token of the range to cut out.

    Returns:
        The parts in the same form, ``[parts, 2]``; empty parts are omitted.
    """
    low, high = np.searchsorted(ranges[:, 1], first, side="right"), np.searchsorted(ranges[:, 0], stop, side="left")
    return np.clip(ranges[low:high], first, stop)


def ranges_mask(ranges: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return the mask of the tokens from ``first`` to ``stop`` (exclusive) that are in a range, ``[stop - first]`` bool.

    Args:
        ranges: index of the first token of each range and index after its last one, ``[ranges, 2]``. All ranges lie between
            ``first`` and ``stop``, as those that :func:`ranges_between` returns.
        first: index of the first token of the mask.
        stop: index after the last token of the mask.
    """
    mask = np.zeros(stop - first, dtype=bool)
    for start, end in ranges - first:
        mask[start:end] = True
    return mask


def tokens_of_characters(offsets: np.ndarray, ranges: list[tuple[int, int]]) -> np.ndarray:
    """Return the mask of the tokens that stand for a character in one of several ranges of a text.

    A token that stands for characters inside and outside a range counts as inside, as in transformers.

    Args:
        offsets: index of the first character of each token and index after its last one, ``[tokens, 2]``. A token may have no
            characters, because some tokenizers do not count spaces; such a token counts as inside if a range surrounds it.
        ranges: index of the first character of each range and index after its last one.

    Returns:
        The mask, ``[tokens]`` bool.
    """
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in ranges:
        mask |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    return mask
