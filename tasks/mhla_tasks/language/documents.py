"""Documents: what counts as one, and its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mhla_tasks.language.encoding import encode_texts


def check_text(value: Any, source: str) -> str:
    """The value, if it is a text.

    Raises:
        ValueError: naming the source.
    """
    if not isinstance(value, str):
        raise ValueError(f"{source}: {str(value)[:60]!r} is {type(value).__name__}, not text; choose another column")
    return value


def encode_documents(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, read_control_tokens: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``[n]`` of documents one after the other, and the first token ``[documents]`` of each, both int64.

    Args:
        texts: the documents.
        tokenizer: the tokenizer.
        read_control_tokens: whether the letters of a control token in a text become that token.
    """
    encoded = [encode_document(ids, tokenizer) for ids in encode_texts(tokenizer, texts, read_control_tokens)]
    return np.concatenate(encoded), np.cumsum([0, *map(len, encoded[:-1])], dtype=np.int64)


def encode_document(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """A document's tokens between the special tokens that begin and end it (one sign for both goes before it)."""
    end = tokenizer.eos_token_id
    begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if begin is None:
        raise ValueError("the tokenizer has neither a bos nor an eos token, so documents could not be told apart")
    return np.array([begin, *ids, *([] if end in (None, begin) else [end])], dtype=np.int64)
