"""Exact counting of the bytes of texts with any tokenizer, for bits per byte.

The byte count of a token is the number of bytes of the text that it spells
(:func:`mhla_tasks.language.tokenizer.token_bytes`). Some tokenizers change a text before they split it: they add a space in
front, drop spaces, or compose or replace characters. The byte counts of their tokens do not add up to the bytes of the text.
The difference is the number of missing bytes of a document. It is stored beside the tokens of the document and spread evenly
over them, so that the sums over complete documents are exact.

With ``assistant_only_loss``, only replies in a dialogue count. Their share of the missing bytes is an estimate, because the
messages of the user may lack more or fewer bytes per token than the replies. Bits per byte of replies are exact for tokenizers
that do not change a text. For other tokenizers, compare them only between models with the same tokenizer and data.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from mhla_tasks.language.encoding import encode_texts
from mhla_tasks.language.targets import mask_ranges
from mhla_tasks.language.tokenizer import token_bytes

SAMPLES = (
    "The river runs 12.5 km, under (two) bridges!",
    " a  b   c ",
    "if x:\n\treturn 1\r\n\n",
    "naïve café €",
    "e\u0301 \ufb01 \u2460 \uff12 \u2026 \u00a0x",
    "日本語 한국어 עברית 😀",
    "CamelCase HTTP2 don't",
)
"""Texts that show whether a tokenizer changes a text before it splits it."""


def counts_exactly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Test on sample texts whether the byte counts of a tokenizer's tokens add up to the length of the text in bytes.

    The byte count of a token is the number of bytes of text that it stands for.
    """
    table = token_bytes(tokenizer)
    try:
        rows = encode_texts(tokenizer, SAMPLES)
    except ValueError:  # no token for a character
        return False
    return all(table[row].sum() == len(text.encode()) for text, row in zip(SAMPLES, rows, strict=True))


def spread(missing: int, count: int, position: int) -> int:
    """Return how many of a document's missing bytes belong to its first ``position`` tokens.

    The number of missing bytes is the length of the text in bytes minus the number of bytes that its tokens stand for. Missing
    bytes are spread evenly over the tokens.

    Args:
        missing: number of missing bytes of the document; may be negative.
        count: number of tokens in the document. Its first token is a special token and has no share, unless it is the only one.
        position: number of tokens at the start of the document, 0 to ``count``.
    """
    shares = max(1, count - 1)
    # Shares are cumulative, so that rounding cancels: all tokens together get exactly `missing` bytes, also if it is negative.
    return missing * max(0, position - (count - shares)) // shares


def spread_over(missing: int, count: int, first: int, stop: int, targets: np.ndarray | None) -> int:
    """Return how many of a document's missing bytes belong to the tokens from ``first`` to ``stop`` (exclusive).

    Args:
        missing: number of missing bytes of the document; see :func:`spread`.
        count: number of tokens in the document.
        first: index in the document of the first token.
        stop: index in the document after the last token.
        targets: mask of the document's tokens whose bytes are counted, ``[count]`` bool; None for all.
    """
    ranges = [(first, stop)] if targets is None else (mask_ranges(targets[first:stop]) + first).tolist()
    return sum(spread(missing, count, end) - spread(missing, count, start) for start, end in ranges)


def missing_between(first: int, stop: int, starts: np.ndarray, missing: np.ndarray, length: int) -> int:
    """Return the size in bytes of the text of a token range, minus the number of bytes that its tokens stand for.

    The range may cover several documents, whose tokens are concatenated. The difference of each document is spread evenly over
    its tokens.

    Args:
        first: index of the first token in the range.
        stop: index after the last token in the range.
        starts: index of the first token of each document, ``[documents]``.
        missing: for each document, the length of its text in bytes minus the number of bytes that its tokens stand for,
            ``[documents]``.
        length: number of tokens in all documents.

    Returns:
        The difference for the range; negative if the tokens stand for more bytes than the text has.
    """
    total = 0
    low = max(0, int(np.searchsorted(starts, first, side="right")) - 1)
    for document in range(low, int(np.searchsorted(starts, stop, side="left"))):
        start = int(starts[document])
        count = (int(starts[document + 1]) if document + 1 < len(starts) else length) - start
        missing_before, missing_after = (
            spread(int(missing[document]), count, min(max(0, token - start), count)) for token in (first, stop)
        )
        total += missing_after - missing_before
    return total
