"""Tokenizers: trained on text, loaded from a folder or the hub, and kept inside checkpoints as plain text."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END, PAD = "<|endoftext|>", "<|pad|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (as GPT-2's) with a token for the end of a text and one for padding; any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD, padding_side="left"
    )


def load_tokenizer(where: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or of a model on the hub.

    Raises:
        FileNotFoundError: when there is none, naming the way out.
    """
    try:
        return AutoTokenizer.from_pretrained(str(where), trust_remote_code=False)
    except (OSError, ValueError) as error:
        kind = "folder" if Path(where).exists() else "folder, and no model that the hub or its local cache gives"
        raise FileNotFoundError(
            f"{where} is no {kind} with a tokenizer (tokenizer.json); give the folder that holds it, or a model name with "
            f"the network at hand ({str(error).splitlines()[0]})"
        ) from error


def pack_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The tokenizer's files, name to text."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_text() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def unpack_tokenizer(files: dict[str, str]) -> PreTrainedTokenizerBase:
    """The reverse of :func:`pack_tokenizer`."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / Path(name).name).write_text(text)
        return load_tokenizer(folder)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Bytes of text that each token stands for, ``[V]`` int64; special tokens stand for none.

    Exact for byte-level vocabularies (GPT-2, Llama 3) and for SentencePiece ones with byte fallback (Llama 2), where the
    sign for a space counts as one byte.
    """
    special = set(tokenizer.all_special_ids)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    plain = [token for index, token in enumerate(tokens) if index not in special]
    byte_level = all(set(token) <= alphabet for token in plain)

    def count(index: int, token: str) -> int:
        if index in special:
            return 0
        if byte_level or re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return len(token) if byte_level else 1
        return len(token.replace("▁", " ").encode())

    return np.array([count(index, token) for index, token in enumerate(tokens)], dtype=np.int64)
