"""Comparison of the tokenizer of the data with the tokenizer that pretrained weights were trained with."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint
from mhla_tasks.language.tokenizer import PackedFiles, load_tokenizer, unpack_tokenizer

log = logging.getLogger(__name__)

RESERVED = re.compile(r"[\[<]\|?(unused|reserved|extra_id)\w*\|?[\]>]", re.IGNORECASE)
"""Pattern of tokens without a meaning, such as ``[unused1]`` of BERT and ``<unused1>`` of Gemma, to which users give one."""


def vocabulary_conflict(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str | None:
    """Describe a token index that stands for different text in two tokenizers.

    An index that only one of the tokenizers uses is not a conflict. Special and reserved tokens, such as ``[unused1]``, are not
    compared, because chat models and fine-tuned models rename them.

    Args:
        tokenizer: first tokenizer.
        other: second tokenizer.

    Returns:
        Description of the lowest such index; None if there is none.
    """
    one, two = (_compared_tokens(part) for part in (tokenizer, other))
    for index in sorted(one.keys() & two.keys()):
        first, second = one[index], two[index]
        if first != second:
            return f"token {index} is {first!r} in one and {second!r} in the other"
    return None


def _compared_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return a mapping from index to token, without special tokens and reserved tokens such as ``[unused1]``."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {
        index: token
        for token, index in tokenizer.get_vocab().items()
        if index not in special and not RESERVED.fullmatch(token)
    }


def pretrained_tokenizer(pretrained: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that belongs to pretrained weights, to compare its vocabulary with that of the data.

    In distributed training, every process must call this function, because the processes communicate to find the checkpoint.

    Args:
        pretrained: path of a checkpoint, of an exported folder, or of a run's folder, whose latest complete checkpoint is read;
            or name of a model on the Hugging Face Hub.

    Returns:
        The tokenizer; None if the weights come without one. Also None, with a warning, if the tokenizer is unsafe.

    Raises:
        FileNotFoundError: if the path is a folder that holds neither an exported model nor a checkpoint.
        ValueError: if the checkpoint is damaged, or cannot be read without running code.
    """
    path = Path(pretrained)
    files: PackedFiles = {}
    if path.exists() and not (path / "config.json").is_file():
        files = read_header(resolve_checkpoint(path)).get("tokenizer") or {}
        if not files:
            return None
    # Without these files, transformers would build an empty tokenizer from the configuration of the model.
    elif path.exists() and not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return unpack_tokenizer(files) if files else load_tokenizer(pretrained)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("the vocabulary of %s is not compared with that of the data: %s", pretrained, error)
        return None


def check_vocabulary(tokenizer: PreTrainedTokenizerBase | None, pretrained: str) -> None:
    """Check that no token index stands for different text in the data's tokenizer and in that of pretrained weights.

    Special and reserved tokens, and indices that only one of the tokenizers uses, are not compared. In distributed training,
    every process must call this function.

    Args:
        tokenizer: tokenizer of the data; None to do nothing.
        pretrained: path or name of the weights, as for :func:`pretrained_tokenizer`. If they come without a tokenizer, nothing
            is checked.

    Raises:
        FileNotFoundError: if the path is a folder that holds neither an exported model nor a checkpoint.
        ValueError: if a token index stands for different text in the two tokenizers, or the checkpoint is damaged or cannot be
            read without running code.
    """
    original = None if tokenizer is None else pretrained_tokenizer(pretrained)
    if tokenizer is None or original is None or not (conflict := vocabulary_conflict(original, tokenizer)):
        return
    raise ValueError(
        f"{pretrained} was trained with a different tokenizer than that of the data: {conflict}; prepare the data with the "
        f"tokenizer of the model (--tokenizer {pretrained} for an exported folder or a model of the hub)"
    )
