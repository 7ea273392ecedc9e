"""Tokenizers: trained on text, loaded from a folder or the hub, and kept inside checkpoints as plain text."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_mhla.system.untrusted import reason

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
    except Exception as error:  # the tokenizers library raises Exception itself
        kind = "folder" if Path(where).exists() else "folder, and no model that the hub or its local cache gives"
        raise FileNotFoundError(
            f"{where} is no {kind} with a tokenizer (tokenizer.json); give the folder that holds it, or a model name with "
            f"the network at hand ({reason(error)})"
        ) from error


def pack_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The tokenizer's files, name to text."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_text() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def unpack_tokenizer(files: dict[str, str]) -> PreTrainedTokenizerBase:
    """The reverse of :func:`pack_tokenizer`.

    Raises:
        ValueError: when these are no files of a tokenizer.
    """
    named = isinstance(files, dict) and all(isinstance(text, str) for text in files.values())
    if not named or any(not isinstance(name, str) or not Path(name).name.strip(".") for name in files):
        raise ValueError("the checkpoint's tokenizer is no set of text files by name")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / Path(name).name).write_text(text)
        return load_tokenizer(folder)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Bytes of text that each token stands for, ``[V]`` int64; special tokens stand for none.

    Exact for byte-level vocabularies (GPT-2, Llama 3) and for SentencePiece ones with byte fallback (Llama 2), where the
    sign for a space counts as one byte.
    """
    special, added = set(tokenizer.all_special_ids), set(tokenizer.get_added_vocab().values())
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict(enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))))
    plain = {index: token for index, token in tokens.items() if token is not None and index not in special | added}
    byte_level = all(set(token) <= alphabet for token in plain.values())

    def count(index: int) -> int:
        token = tokens[index]
        if index in special or token is None:
            return 0
        if index in added:
            return len(token.encode())
        if byte_level:
            return len(token)
        return 1 if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token) else len(token.replace("▁", " ").encode())

    return np.array([count(index) for index in tokens], dtype=np.int64)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Index of a token to fill up rows with; which one does not matter, since the model never attends to it."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(index for index in known if index is not None)


def left_padded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokens ``[B, N]`` int64 and their mask, padded at the left, with any tokenizer.

    Raises:
        ValueError: for a text without a token.
    """
    rows = [tokenizer(text)["input_ids"] for text in texts]
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
    """Hash of what turns text into tokens and back."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
    state = json.loads(backend.to_str())
    for passing in ("padding", "truncation"):  # set by the last call
        state.pop(passing, None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
