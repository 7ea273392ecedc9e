"""Training and comparison of tokenizers, byte counts of tokens, and padding of prompts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_mhla.system.ranges import check_range
from mhla_tasks.language.chat_template import CHATML, CHATML_TOKENS
from mhla_tasks.language.encoding import control_tokens, encode_prompts
from mhla_tasks.language.tokenizer_files import (
    PackedFiles,
    load_tokenizer,
    pack_tokenizer,
    save_tokenizer,
    unpack_tokenizer,
)

__all__ = [
    "PackedFiles",
    "fingerprint",
    "left_padded",
    "load_tokenizer",
    "pack_tokenizer",
    "pad_token",
    "save_tokenizer",
    "token_bytes",
    "train_tokenizer",
    "unpack_tokenizer",
]

END, PAD = "<|endoftext|>", "<|pad|>"
"""Special tokens of :func:`train_tokenizer`."""

SPACE_BYTES = ("<0X96>", "<0X81>")
"""Tokens of the last two of the three bytes of ▁, the sign for a space. The token of the first byte counts as the space."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, chat: bool = False) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's, which can encode any text.

    Args:
        texts: texts to train on.
        vocab_size: maximum number of tokens, including the special tokens for the end of a text and for padding.
        chat: whether to add a chat template in the format ChatML, with two more special tokens.

    Raises:
        ValueError: if ``vocab_size`` is less than 256 (the number of bytes) plus the number of special tokens.
    """
    special_tokens = [END, PAD, *(CHATML_TOKENS if chat else ())]
    check_range(least=256 + len(special_tokens), vocab_size=vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    options = {"chat_template": CHATML, "additional_special_tokens": list(CHATML_TOKENS)} if chat else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD, padding_side="left", **options
    )


def table_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the size of a table with an entry for each token index: one more than the largest index."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def needed_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the smallest ``vocab_size`` of a model that fits a tokenizer: one more than the largest token index that it needs.

    Special tokens are not needed, except those for the start and the end of a text, for padding, for unknown text, and in the
    chat template. Gemma 3, for example, has a token for images, for which its text model has no embedding.
    """
    needed = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = str(tokenizer.chat_template or "")
    unneeded = {
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in needed and str(token) not in template
    }
    indices = set(tokenizer.get_vocab().values())
    return 1 + max(indices - unneeded, default=max(indices, default=-1))


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the number of bytes of text that each of the V tokens stands for, ``[V]`` int64; 0 for special tokens.

    For some tokenizers, these numbers add up to the length of any text in bytes: those with a byte-level vocabulary (GPT-2,
    Llama 3), with byte fallback and no space in front of a text (Gemma), or with a vocabulary of bytes (ByT5).

    Other tokenizers change a text before they split it: they add a space in front (Llama 2), drop spaces and capitals (BERT),
    compose characters (NFKC) or replace unknown ones. For these tokenizers, the bytes of the letters in each token are counted.
    :class:`mhla_tasks.language.documents.DocumentEncoder` computes how much their sum differs from the length of a text.
    """
    special = {*tokenizer.all_special_ids, *control_tokens(tokenizer)}
    added = set(tokenizer.get_added_vocab().values())
    kind = _Letters(tokenizer)
    table = np.zeros(table_size(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        if index not in special:
            table[index] = len(token.encode()) if index in added else kind.count(token)
    return table


class _Letters:
    """Counter of the bytes of text that a token of a given tokenizer stands for, based on the spelling of the token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        state: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
        kinds = set(_types([state.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]))
        model = state.get("model") or {}
        self.alphabet = set(pre_tokenizers.ByteLevel.alphabet()) if "ByteLevel" in kinds else set()
        # Tokenizers written in Python do not say that their letters are bytes; two characters of several bytes show it.
        self.raw_bytes = backend is None and tokenizer.tokenize("é€") == [chr(byte) for byte in "é€".encode()]
        # A space becomes ▁. A vocabulary that has the bytes of this sign, but not the sign, spells it with three tokens.
        marks = json.dumps([state.get("normalizer"), state.get("pre_tokenizer")], ensure_ascii=False)
        self.spelled_space = "▁" in marks and "▁" not in tokenizer.get_vocab()
        self.inside = model.get("continuing_subword_prefix") or ""
        self.ending = model.get("end_of_word_suffix") or ""

    def count(self, token: str) -> int:
        """Return the number of bytes of text that a token stands for.

        Args:
            token: spelling of the token, which is neither a special token nor one that was added to the trained vocabulary.
        """
        if self.raw_bytes and len(token) == 1 and ord(token) < 256:
            return 1
        if self.ending and token.endswith(self.ending):  # the end of a word is a space
            token = f"{token.removesuffix(self.ending)} "
        if self.alphabet:
            return len(token) if set(token) <= self.alphabet | {" "} else len(token.encode())
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return 0 if self.spelled_space and token.upper() in SPACE_BYTES else 1
        if self.inside and len(token) > len(self.inside):
            token = token.removeprefix(self.inside)
        return len(token.replace("▁", " ").encode())


def _types(part: Any) -> Iterable[str]:
    """Yield the type name of every component in a part of a tokenizer's parsed JSON, such as its normalizer."""
    if isinstance(part, dict):
        yield str(part.get("type"))
    if isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _types(inner)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the index of the token to pad with: the padding token, else the end token, or 0 if there is neither.

    Any token is suitable, because the model never attends to padding.
    """
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(index for index in candidates if index is not None)


def left_padded(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], read_control_tokens: bool = False
) -> tuple[Tensor, Tensor]:
    """Encode prompts as one batch with padding on the left.

    Args:
        tokenizer: any tokenizer.
        texts: prompts to encode.
        read_control_tokens: whether the spelling of a control token in a prompt, such as ``<|endoftext|>``, becomes that token.

    Returns:
        Token indices, and a mask that is 1 for tokens and 0 for padding, each ``[B, N]`` int64.

    Raises:
        ValueError: if a prompt has no tokens.
    """
    rows = encode_prompts(tokenizer, texts, read_control_tokens)
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise ValueError(f"the prompt {text!r} is empty: it has no tokens")
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_token(tokenizer))
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = torch.tensor(row), 1
    return ids, mask


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that identifies how a tokenizer encodes and decodes text, as 64 hexadecimal digits.

    Tokenizers that are written in Python are identified by their vocabulary only.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
    state = json.loads(backend.to_str())
    for transient in ("padding", "truncation"):  # these depend on the last call, not on the tokenizer
        state.pop(transient, None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
