"""Conversion of text to tokens, for documents, streamed text and prompts.

Two rules hold for every tokenizer. The spelling of a control token in a text, such as ``<|endoftext|>``, remains text unless
the caller asks for the token. A prompt gets the tokens that the tokenizer puts in front of a text, but not the tokens that it
appends, because those mark the end of a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_mhla.system.untrusted import reason
from mhla_tasks.language.targets import UnknownRepliesError

WORDS = ("a", "0", "the", " ")
"""Texts to try, one after the other, until the tokenizer has a token for one of them."""


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the control tokens of a tokenizer as a dict from token index to spelling.

    A control token is one that begins or ends texts or chat turns, or that serves as padding. The token for unknown text is
    included only if it also begins or ends texts, as in GPT-2.
    """
    tokens = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokens |= dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))
    if tokenizer.unk_token_id not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        tokens.pop(tokenizer.unk_token_id, None)
    return tokens


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], read_control_tokens: bool = False
) -> list[list[int]]:
    """Encode texts without the special tokens that the tokenizer adds at the start and at the end.

    Args:
        tokenizer: any tokenizer.
        texts: texts to encode.
        read_control_tokens: whether the spelling of a control token in a text, such as ``<|endoftext|>``, becomes that token.

    Returns:
        Token indices of each text.

    Raises:
        ValueError: if the tokenizer cannot encode the spelling of a control token as plain text, or fails on a text.
    """
    if not texts:
        return []
    with _failures(tokenizer):
        rows: list[list[int]] = tokenizer(
            # verbose would warn of texts longer than the tokenizer's model_max_length, which documents may well be.
            list(texts),
            add_special_tokens=False,
            split_special_tokens=not read_control_tokens,
            verbose=False,
        )["input_ids"]
    if read_control_tokens:
        return rows
    control = control_tokens(tokenizer)
    for number, row in enumerate(rows):
        if not control.keys().isdisjoint(row):
            rows[number] = _encode_without(tokenizer, control, texts[number])
    return rows


def encode_with_offsets(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
    """Encode texts, and return the range of characters that each token stands for.

    As in :func:`encode_texts`, the special tokens that the tokenizer adds at the start and at the end are left out. The
    spelling of a control token becomes that token.

    Args:
        tokenizer: tokenizer of the library ``tokenizers``. Tokenizers written in Python do not report these ranges.
        texts: texts to encode.

    Returns:
        For each text, a tuple of its n token indices and an array ``[n, 2]`` int64, which holds the index of the first
        character of each token and the index after its last one.

    Raises:
        UnknownRepliesError: if the tokenizer is written in Python.
        ValueError: if the tokenizer fails on a text.
    """
    if not texts:
        return []
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnknownRepliesError(
            f"{_name(tokenizer)} is written in Python and does not report which characters a token stands for; use a tokenizer "
            "with a tokenizer.json"
        )
    with _failures(tokenizer):
        encoded = tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
    places = (np.array(offsets, dtype=np.int64).reshape(-1, 2) for offsets in encoded["offset_mapping"])
    return list(zip(encoded["input_ids"], places, strict=True))


def begin_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the indices of the tokens that the tokenizer puts in front of every text.

    For a tokenizer of the library ``tokenizers``, they are determined by encoding short test texts.

    Raises:
        ValueError: if the tokenizer fails on a test text, or produces no tokens for any of them.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        row = list(tokenizer.build_inputs_with_special_tokens([-1]))  # no token has this index
        return row[: row.index(-1)]
    with _failures(tokenizer):
        for word in WORDS:
            encoded = tokenizer(word)
            origins = encoded.sequence_ids(0)  # None for tokens that the tokenizer adds
            if 0 in origins:
                return list(encoded["input_ids"][: origins.index(0)])
    raise ValueError(
        f"{_name(tokenizer)} has no token for any of {', '.join(map(repr, WORDS))}; use a different tokenizer"
    )


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], read_control_tokens: bool = False
) -> list[list[int]]:
    """Encode prompts with the special tokens that the tokenizer puts in front, but without those that it appends.

    With ``read_control_tokens``, nothing is added to a prompt that already begins with the first of these tokens, as the output
    of a chat template does.

    Args:
        tokenizer: any tokenizer.
        texts: prompts to encode.
        read_control_tokens: whether the spelling of a control token in a prompt, such as ``<|endoftext|>``, becomes that token.

    Returns:
        Token indices of each prompt.

    Raises:
        ValueError: if the tokenizer cannot encode the spelling of a control token as plain text, or fails on a prompt.
    """
    begin = begin_tokens(tokenizer)
    rows = encode_texts(tokenizer, texts, read_control_tokens)
    return [row if read_control_tokens and begin and row[:1] == begin[:1] else begin + row for row in rows]


def _encode_without(tokenizer: PreTrainedTokenizerBase, control: dict[int, str], text: str) -> list[int]:
    """Encode a text with a copy of the tokenizer whose vocabulary lacks the control tokens.

    Tokenizer models of the types Unigram and WordLevel keep control tokens in their normal vocabulary. They find these tokens
    in a text even if the tokenizer is told to ignore control tokens.

    Args:
        tokenizer: tokenizer, which stays unchanged.
        control: result of :func:`control_tokens`, a dict from token index to spelling.
        text: text to encode.

    Raises:
        ValueError: if the result still has control tokens, or the tokenizer fails on the text.
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        with _failures(tokenizer):
            row = _text_only(tokenizer, control).encode(text, add_special_tokens=False).ids
        if control.keys().isdisjoint(row):
            return list(row)
    named = ", ".join(repr(token) for token in control.values() if token in text)
    if not named:
        raise ValueError(
            f"{_name(tokenizer)} has no tokens for a part of {text[:60]!r}, and its token for unknown text, "
            f"{tokenizer.unk_token!r}, also begins or ends texts; use a different tokenizer"
        )
    raise ValueError(
        f"{_name(tokenizer)} reads the letters {named} in {text[:60]!r} as control tokens and cannot be told not to; ask for "
        "control tokens (control_tokens: true), or use a different tokenizer"
    )


def _text_only(tokenizer: PreTrainedTokenizerFast, control: dict[int, str]) -> Tokenizer:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] not in control]
    model = state["model"]
    if isinstance(model["vocab"], list):
        for index in control.keys() & set(range(len(model["vocab"]))):
            model["vocab"][index][0] = ""  # the indices of other pieces stay the same, and no text contains this one
    else:
        removed_tokens = {token for token, index in model["vocab"].items() if index in control} - {
            model.get("unk_token")
        }
        model["vocab"] = {token: index for token, index in model["vocab"].items() if token not in removed_tokens}
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if removed_tokens.isdisjoint([*pair, "".join(pair)])]
    return Tokenizer.from_str(json.dumps(state))


@contextmanager
def _failures(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # The tokenizers library raises plain Exception. For regular expressions that exceed their budget it panics, which is
        # a BaseException.
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ValueError(
                f"{_name(tokenizer)} fails on a text ({reason(error)}); use a different tokenizer"
            ) from error
        raise


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    location = getattr(tokenizer, "name_or_path", "")
    return f"the tokenizer {type(tokenizer).__name__}" + (f" ({location})" if location else "")
