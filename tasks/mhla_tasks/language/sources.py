"""Text as windows of tokens, by index: from memory or from shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from lightning_mhla.data import BrokenSampleError
from mhla_tasks.language.text_bytes import missing_between


class TokenRuns(Protocol):
    """Long runs of tokens, each of many documents one after the other.

    Attributes:
        lengths: tokens in each run.
        run_shards: runs in each shard, in order.
    """

    lengths: Sequence[int]
    run_shards: Sequence[int]

    def read(self, run: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """``count`` tokens of a run from ``start`` on, and which of them begin a document (bool)."""
        ...

    def missing_bytes(self, run: int, first: int, stop: int) -> int:
        """Bytes of text beyond those of the tokens from ``first`` to before ``stop``; see ``text_bytes.MissingBytes``."""
        ...

    def describe(self, run: int) -> str:
        """Where a run lies, for messages."""
        ...


class ArrayRuns:
    """One run in memory.

    Args:
        tokens: ``[n]`` integers.
        starts: first token of each document.
        name: for messages.
        missing: ``[documents]`` bytes of each beyond those of its tokens (``text_bytes.MissingBytes``); None where the
            bytes of tokens add up to those of the text, as with :func:`train_tokenizer`'s.
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, name: str, missing: np.ndarray | None = None) -> None:
        self.tokens, self.starts, self.name, self.missing = tokens, starts, name, missing
        self.first = np.zeros(len(tokens), dtype=bool)
        self.first[starts] = True
        self.lengths: Sequence[int] = [len(tokens)]
        self.run_shards: Sequence[int] = [1]

    def read(self, run: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`TokenRuns`."""
        return self.tokens[start : start + count], self.first[start : start + count]

    def missing_bytes(self, run: int, first: int, stop: int) -> int:
        """See :class:`TokenRuns`."""
        return 0 if self.missing is None else missing_between(first, stop, self.starts, self.missing, len(self.tokens))

    def describe(self, run: int) -> str:
        """See :class:`TokenRuns`."""
        return self.name


class TokenWindows:
    """Windows of ``context + 1`` tokens that follow each other, the last token of one being the first of the next.

    Args:
        runs: the text.
        context: tokens that the model sees at once.
        token_bytes: bytes of each token of the vocabulary, for bits per byte.
        separate_documents: whether samples say where documents begin, so that none sees another.
    """

    def __init__(self, runs: TokenRuns, context: int, token_bytes: np.ndarray, separate_documents: bool) -> None:
        self.runs, self.context, self.token_bytes = runs, context, token_bytes
        self.separate_documents = separate_documents
        windows = [max(0, length - 1) // context for length in runs.lengths]
        self.ends = np.cumsum(windows)
        bounds = np.cumsum([0, *runs.run_shards])
        self.shard_sizes: Sequence[int] = [sum(windows[a:b]) for a, b in pairwise(bounds)]

    def __len__(self) -> int:
        """Number of windows."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``tokens`` ``[context + 1]``, ``bytes`` of all but the first, and ``starts`` ``[context]`` bool if wanted."""
        run = int(np.searchsorted(self.ends, index, side="right"))
        offset = (index - (int(self.ends[run - 1]) if run else 0)) * self.context
        tokens, first = self.runs.read(run, offset, self.context + 1)
        tokens = tokens.astype(np.int64)
        if tokens.max() >= len(self.token_bytes) or tokens.min() < 0:
            raise BrokenSampleError(
                f"{self.runs.describe(run)}: token {tokens.max()} is not in the tokenizer's vocabulary of "
                f"{len(self.token_bytes)}"
            )
        sample: dict[str, Any] = {"tokens": torch.from_numpy(tokens), "bytes": int(self.token_bytes[tokens[1:]].sum())}
        sample["bytes"] += self.runs.missing_bytes(run, offset + 1, offset + len(tokens))
        if self.separate_documents:
            sample["starts"] = torch.from_numpy(np.array(first[:-1]))
        return sample
