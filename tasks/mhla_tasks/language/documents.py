"""Validation of texts, and encoding of documents as tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mhla_tasks.language.encoding import encode_texts


def check_text(value: Any, source: str) -> str:
    """Return a value unchanged after checking that it is a string.

    Args:
        value: value to check.
        source: location of the value, for the error message.

    Raises:
        ValueError: if the value is not a string.
    """
    if not isinstance(value, str):
        raise ValueError(
            f"{source}: {str(value)[:60]!r} is {type(value).__name__}, not text; choose a different column"
        )
    return value


def encode_documents(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, read_control_tokens: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Encode documents, each with the special tokens that begin and end it, and concatenate their tokens.

    Args:
        texts: texts of the documents.
        tokenizer: tokenizer with a special token for the beginning or the end of a text.
        read_control_tokens: whether the spelling of a control token in a text, such as ``<|endoftext|>``, becomes that token.

    Returns:
        Token indices of all documents, ``[n]`` int64, and index of the first token of each document, ``[documents]`` int64.

    Raises:
        ValueError: if the tokenizer has no such special token, or fails on a text.
    """
    encoded = [encode_document(ids, tokenizer) for ids in encode_texts(tokenizer, texts, read_control_tokens)]
    return np.concatenate(encoded), np.cumsum([0, *map(len, encoded[:-1])], dtype=np.int64)


def encode_document(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Add the special tokens that begin and end a document to the tokens of its text.

    If the tokenizer has only one such token, it is added at the start only.

    Args:
        ids: token indices of the text.
        tokenizer: tokenizer of the text.

    Returns:
        Token indices of the document, ``[n]`` int64.

    Raises:
        ValueError: if the tokenizer has neither of the two tokens.
    """
    end = tokenizer.eos_token_id
    begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if begin is None:
        raise ValueError("the tokenizer has neither a bos nor an eos token, so documents could not be distinguished")
    return np.array([begin, *ids, *([] if end in (None, begin) else [end])], dtype=np.int64)
