"""Comparison of vocabularies, so that tokens are read with the tokenizer that made them."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint
from mhla_tasks.language.tokenizer import load_tokenizer, unpack_tokenizer


def vocabulary_conflict(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str | None:
    """Describe a token index that stands for different text in two tokenizers.

    A token that one of the tokenizers lacks is not a conflict. Tokens that were added to a trained vocabulary are not compared,
    because chat models rename the reserved ones among them.

    Args:
        tokenizer: first tokenizer.
        other: second tokenizer.

    Returns:
        Description of the lowest such index; None if the tokens of both agree.
    """
    one, two = (_trained_tokens(part) for part in (tokenizer, other))
    for index in sorted(one.keys() & two.keys()):
        first, second = one[index], two[index]
        if first != second:
            return f"token {index} is {first!r} in one and {second!r} in the other"
    return None


def _trained_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the tokens of the trained vocabulary by index, without those that were added to it."""
    added = tokenizer.get_added_vocab()
    return {index: token for token, index in tokenizer.get_vocab().items() if token not in added}


def pretrained_tokenizer(pretrained: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that belongs to pretrained weights.

    Every process must call this function.

    Args:
        pretrained: path of a run, of a checkpoint or of an exported folder, or name of a model on the Hugging Face Hub.

    Returns:
        The tokenizer; None if the weights come without one.

    Raises:
        FileNotFoundError: if the path is a folder without a checkpoint.
        ValueError: if the checkpoint or the tokenizer cannot be read safely.
    """
    path = Path(pretrained)
    if path.exists() and not (path / "config.json").is_file():
        files = read_header(resolve_checkpoint(path)).get("tokenizer")
        return unpack_tokenizer(files) if files else None
    # Without these files, transformers would build an empty tokenizer from the configuration of the model.
    if path.exists() and not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return load_tokenizer(pretrained)
    except FileNotFoundError:
        return None


def check_vocabulary(tokenizer: PreTrainedTokenizerBase | None, pretrained: str) -> None:
    """Raise ValueError if a tokenizer gives other text to the tokens of pretrained weights than their own tokenizer does.

    Args:
        tokenizer: tokenizer of the data; None to do nothing.
        pretrained: path or name of the weights, as for :func:`pretrained_tokenizer`.
    """
    original = None if tokenizer is None else pretrained_tokenizer(pretrained)
    if tokenizer is None or original is None or not (conflict := vocabulary_conflict(original, tokenizer)):
        return
    raise ValueError(
        f"{pretrained} was trained with a different tokenizer than that of the data: {conflict}; prepare the data with the "
        f"tokenizer of the model (--tokenizer {pretrained} for an exported folder or a model of the hub)"
    )
