"""Bytes of text, counted from the text itself, for bits per byte.

Tokens have the bytes of their letters (:func:`mhla_tasks.language.tokenizer.token_bytes`). A tokenizer that changes a text
before it cuts it, by a space in front, lost spaces, or composed or unknown characters, makes tokens whose bytes do not add up
to those of the text. The difference of each document is kept beside the tokens and spread over the document, so that the
bytes of a text add up exactly with any tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from mhla_tasks.language.encoding import control_tokens, encode_texts
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
"""Texts that show whether a tokenizer changes a text before it cuts it."""


def counts_exactly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the bytes of the tokens of a text add up to those of the text, tried on samples."""
    table = token_bytes(tokenizer)
    try:
        rows = encode_texts(tokenizer, SAMPLES)
    except ValueError:  # no token for a character
        return False
    return all(table[row].sum() == len(text.encode()) for text, row in zip(SAMPLES, rows, strict=True))


class MissingBytes:
    """Counts the bytes of documents beyond those of their tokens; negative where the tokens have more.

    Control tokens inside a document, where they were asked for, have no bytes, and neither do their letters.

    Args:
        tokenizer: the tokenizer of the documents.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.end = None if begin is None or begin == end else end
        self.sizes = token_bytes(tokenizer)
        for index, token in control_tokens(tokenizer).items():
            self.sizes[index] = len(token.encode())

    def __call__(self, texts: Sequence[str], tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Missing bytes of each document, ``[documents]`` int64.

        Args:
            texts: the documents.
            tokens: ``[n]`` their tokens, one document after the other, as ``encode_documents`` gives them.
            starts: ``[documents]`` first token of each.
        """
        if not texts:
            return np.zeros(0, dtype=np.int64)
        sums = np.add.reduceat(self.sizes[tokens], starts)
        sums -= self.sizes[tokens[starts]]  # the tokens that begin and end a document are not in its text
        if self.end is not None:
            sums -= self.sizes[self.end]
        return np.array([len(text.encode()) for text in texts], dtype=np.int64) - sums


def spread(missing: int, count: int, position: int) -> int:
    """Missing bytes of the first ``position`` tokens of a document, spread evenly over its text.

    Args:
        missing: missing bytes of the document.
        count: its tokens, the first of which begins it and has a share only where it is alone.
        position: 0 to ``count``.
    """
    shares = max(1, count - 1)
    return missing * max(0, position - (count - shares)) // shares


def missing_between(first: int, stop: int, starts: np.ndarray, missing: np.ndarray, length: int) -> int:
    """Missing bytes of the tokens from ``first`` to before ``stop``.

    Args:
        first: index of the first token.
        stop: index after the last token.
        starts: ``[documents]`` first token of each document.
        missing: ``[documents]``, see :class:`MissingBytes`.
        length: tokens of all documents.
    """
    total = 0
    low = max(0, int(np.searchsorted(starts, first, side="right")) - 1)
    for document in range(low, int(np.searchsorted(starts, stop, side="left"))):
        start = int(starts[document])
        count = (int(starts[document + 1]) if document + 1 < len(starts) else length) - start
        before, after = (spread(int(missing[document]), count, min(max(0, at - start), count)) for at in (first, stop))
        total += after - before
    return total
