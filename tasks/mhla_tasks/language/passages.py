"""Data module for training encoders on short texts. Each sample is a passage with the tokenizer's special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource
from lightning_mhla.system.ranges import check_range
from mhla_tasks.language.corpus import read_documents
from mhla_tasks.language.dialogues import text_of
from mhla_tasks.language.tokenizer import load_tokenizer, pad_token

STEP = 16
"""Passages are padded to a multiple of this number of tokens."""

TEXTS_AT_ONCE = 1024
"""Number of texts that are encoded together."""

Unit = Literal["paragraph", "document"]


class Passages:
    """Map-style data set of encoded passages, grouped by their length after padding.

    A sample has ``tokens`` and ``mask``, each ``[N]`` int64. N is the length of the longest passage in its group, rounded up to
    a multiple of 16, but at most ``length``. The mask is 0 for padding.

    Args:
        texts: passages as text; those without tokens are left out.
        tokenizer: tokenizer of the passages; its special tokens are added.
        length: maximum number of tokens in a passage, with special tokens; longer passages are cut.
        least: minimum number of passages in a group. If a length has fewer passages, they join those of the next greater length
            or, if there is none, of the next smaller length.
    """

    def __init__(self, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, least: int) -> None:
        self.length, self.padding = length, pad_token(tokenizer)
        rows: list[np.ndarray] = []
        texts = iter(texts)
        while batch := list(islice(texts, TEXTS_AT_ONCE)):
            # A control token that is spelled out in a text remains text.
            encoded = tokenizer(batch, truncation=True, max_length=length, split_special_tokens=True)["input_ids"]
            rows += [np.asarray(row, dtype=np.int32) for row in encoded if row]
        self.rows = rows
        self.groups = merged_groups(np.array([-(-len(row) // STEP) for row in rows], dtype=np.int64), least)
        self.shard_sizes: Sequence[int] = [len(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a passage as a dict with ``tokens`` and ``mask``, each ``[N]`` int64; the mask is 0 for padding."""
        row = self.rows[index]
        width = min(self.length, int(self.groups[index]) * STEP)
        tokens = torch.full((width,), self.padding, dtype=torch.int64)
        tokens[: len(row)] = torch.from_numpy(row.astype(np.int64))
        return {"tokens": tokens, "mask": (torch.arange(width) < len(row)).long()}


def merged_groups(groups: np.ndarray, least: int) -> np.ndarray:
    """Merge groups of similar lengths until each has enough samples for a batch.

    Training uses only complete batches, each from a single group, so a group with fewer samples would never be used.

    Args:
        groups: length of each sample, as a number of steps of 16 tokens, ``[samples]`` int64.
        least: minimum number of samples in a group.

    Returns:
        The largest length in the group of each sample, in the same unit, ``[samples]`` int64.
    """
    lengths, counts = np.unique(groups, return_counts=True)
    ends: list[int] = []  # the last length of each merged group
    waiting = 0
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        waiting += count
        if waiting >= least:
            ends.append(length)
            waiting = 0
    if waiting:  # the longest samples are too few: they join the group before them
        ends = [*ends[:-1], int(lengths[-1])]
    return np.array(ends, dtype=np.int64)[np.searchsorted(ends, groups)] if ends else groups


class TextPassages(ResumableDataModule):
    """Data module for passages of text, to train a text encoder.

    The texts are tokenized in memory when a run begins. A batch contains passages of about the same length.

    Args:
        train: files, folders or data sets (hub:NAME) of the training texts: text files, or tables (.jsonl, .csv, ...).
        val: files, folders or data sets of the held-out texts, for validation and tests.
        tokenizer: folder of the tokenizer, usually that of the pretrained encoder, or name of a model on the hub.
        length: maximum number of tokens in a passage, including special tokens; longer passages are cut.
        batch_size: number of passages per batch, summed over all processes.
        unit: text that forms a passage: paragraph (documents are split at blank lines) or document (only its beginning is
            used).
        min_characters: minimum number of characters of a passage; shorter ones, such as headings, are left out.
        column: column of a table that holds the texts, or dialogues, whose messages are joined into one text.
        val_passages: maximum number of held-out passages to use, drawn at random with a fixed seed; null for all.
        num_workers: number of worker processes for each training process; 0 is fastest for text in memory.
        seed: random seed for the order of the passages; null for the seed of seed_everything.

    Raises:
        ValueError: if ``length`` is below 16, ``min_characters`` is negative, or ``val_passages`` is below 1.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        tokenizer: str,
        length: int = 128,
        batch_size: int = 32,
        unit: Unit = "paragraph",
        min_characters: int = 40,
        column: str = "text",
        val_passages: int | None = None,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.save_hyperparameters()
        if length < STEP:
            raise ValueError(f"length={length} must be at least {STEP} tokens")
        check_range(least=0, min_characters=min_characters)
        check_range(least=1, val_passages=val_passages)
        self.sources = {"train": train, "validate": val, "test": val}
        self.tokenizer_name, self.length, self.unit, self.column = tokenizer, length, unit, column
        self.min_characters, self.val_passages = min_characters, val_passages
        self._passages: dict[str, Passages] = {}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the texts."""
        return load_tokenizer(self.tokenizer_name)

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            raise ValueError("an encoder has no predict; export it, and compute embeddings with the exported model")
        stage = "validate" if stage == "test" else stage
        if stage not in self._passages:
            location = self.sources[stage]
            sources = [location] if isinstance(location, str) else location
            documents = (text_of(document) for document in read_documents(sources, self.column))
            texts = [text for text in self._split(documents) if len(text) >= self.min_characters]
            if stage == "validate" and self.val_passages is not None and self.val_passages < len(texts):
                chosen = np.random.default_rng(0).permutation(len(texts))[: self.val_passages]
                texts = [texts[index] for index in sorted(chosen)]
            least = self.batch_size if stage == "train" else 1
            self._passages[stage] = Passages(texts, self.tokenizer, self.length, least)
            if not len(self._passages[stage]):
                raise ValueError(
                    f"{location}: no {self.unit} of at least {self.min_characters} characters; lower min_characters"
                )
        return self._passages[stage]

    def _split(self, documents: Iterable[str]) -> Iterator[str]:
        for document in documents:
            parts = re.split(r"\n\s*\n", document) if self.unit == "paragraph" else [document]
            yield from (" ".join(part.split()) for part in parts)
