"""Data set of text samples: windows of consecutive tokens, in memory or in shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from typing_extensions import override

from lightning_mhla.data import BrokenSampleError
from mhla_tasks.language.targets import mask_ranges, ranges_between, ranges_mask
from mhla_tasks.language.text_bytes import missing_between


class TokenRuns(Protocol):
    """Protocol for reading parts of long token sequences (runs), each of which is the concatenation of many documents.

    Attributes:
        lengths: number of tokens in each run.
        run_shards: number of runs in each shard, in order.
    """

    lengths: Sequence[int]
    run_shards: Sequence[int]

    def read(self, run: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read consecutive tokens of a run (a long token sequence), with a mask of the tokens that begin a document.

        Args:
            run: index of the run.
            start: index in the run of the first token to read.
            count: number of tokens to read.

        Returns:
            The tokens, ``[count]`` integers, and a mask of those that begin a document, ``[count]`` bool.
        """
        ...

    def missing_bytes(self, run: int, first: int, stop: int) -> int:
        """Return the size in bytes of the text of a token range, minus the number of bytes that its tokens stand for.

        The difference is not 0 if the tokenizer changes a text before splitting it, for example by dropping spaces. It is
        negative if the tokens stand for more bytes than the text has.

        Args:
            run: index of the run, a long sequence of tokens.
            first: index in the run of the first token of the range.
            stop: index in the run after the last token of the range.
        """
        ...

    def target_ranges(self, run: int, first: int, stop: int) -> np.ndarray:
        """Return the parts of a token range that belong to plain texts or to messages of the assistant.

        Args:
            run: index of the run, a long sequence of tokens.
            first: index in the run of the first token of the range.
            stop: index in the run after the last token of the range.

        Returns:
            Index in the run of the first token of each part and index after its last one, ``[parts, 2]`` int64, ascending.
        """
        ...

    def describe(self, run: int) -> str:
        """Return the name and the location of a run, a long sequence of tokens, as text for messages."""
        ...


class ArrayRuns(TokenRuns):
    """Implementation of :class:`TokenRuns` for a single run, which is a sequence of tokens in memory.

    Args:
        tokens: tokens of all documents, ``[n]`` integers.
        starts: index of the first token of each document, ``[documents]`` integers.
        name: name of the text, for messages.
        missing: for each document, the length of its text in bytes minus the number of bytes that its tokens stand for,
            ``[documents]``; None if the difference is always 0.
        targets: mask of the tokens that belong to plain texts or to messages of the assistant, ``[n]`` bool; None for all.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        name: str,
        missing: np.ndarray | None = None,
        targets: np.ndarray | None = None,
    ) -> None:
        self.tokens, self.starts, self.name, self.missing = tokens, starts, name, missing
        self.ranges = mask_ranges(np.ones(len(tokens), dtype=bool) if targets is None else targets)
        self.first = np.zeros(len(tokens), dtype=bool)
        self.first[starts] = True
        self.lengths: Sequence[int] = [len(tokens)]
        self.run_shards: Sequence[int] = [1]

    @override
    def read(self, run: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens[start : start + count], self.first[start : start + count]

    @override
    def missing_bytes(self, run: int, first: int, stop: int) -> int:
        return 0 if self.missing is None else missing_between(first, stop, self.starts, self.missing, len(self.tokens))

    @override
    def target_ranges(self, run: int, first: int, stop: int) -> np.ndarray:
        return ranges_between(self.ranges, first, stop)

    @override
    def describe(self, run: int) -> str:
        return self.name


class TokenWindows:
    """Data set of consecutive windows of ``context + 1`` tokens, which overlap by one token.

    Args:
        runs: long token sequences to cut into windows.
        context: number of tokens that the model reads in a sample.
        token_bytes: number of bytes of text that each token of the vocabulary stands for, ``[V]``, to compute bits per byte.
        separate_documents: whether samples mark where documents begin, so that tokens attend to their own document only.
        assistant_only_loss: whether samples mark the tokens that belong to plain texts or to messages of the assistant, so that
            the loss counts these only.

    Raises:
        ValueError: if no sequence has ``context + 1`` tokens.
    """

    def __init__(
        self,
        runs: TokenRuns,
        context: int,
        token_bytes: np.ndarray,
        separate_documents: bool,
        assistant_only_loss: bool = False,
    ) -> None:
        self.runs, self.context, self.token_bytes = runs, context, token_bytes
        self.separate_documents, self.assistant_only_loss = separate_documents, assistant_only_loss
        # The last token of a window is also the first one of the next window.
        windows = [max(0, length - 1) // context for length in runs.lengths]
        self.ends = np.cumsum(windows)
        bounds = np.cumsum([0, *runs.run_shards])
        self.shard_sizes: Sequence[int] = [sum(windows[a:b]) for a, b in pairwise(bounds)]
        if not len(self):
            name, longest = runs.describe(0) if runs.lengths else "the text", max(runs.lengths, default=0)
            raise ValueError(
                f"{name}: no sequence of tokens is long enough for a sample; the longest has {longest} tokens, a sample "
                f"context + 1 = {context + 1}; give more text, or lower --data.context"
            )

    def __len__(self) -> int:
        """Return the number of windows of tokens in the data set."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one window of tokens as a sample.

        Args:
            index: index of the window, counted over all token sequences.

        Returns:
            A dict:

            * ``tokens``: token indices, ``[context + 1]`` int64.
            * ``bytes``: number of bytes of text that the target tokens stand for. These are all tokens but the first, or those
              in ``target_mask``.
            * ``starts``, only with ``separate_documents``: mask of the input tokens that begin a document, ``[context]`` bool.
            * ``target_mask``, only with ``assistant_only_loss``: for each input token, whether the loss counts the token that
              follows it, ``[context]`` bool.

        Raises:
            BrokenSampleError: if a token is not in the vocabulary.
        """
        # With "right", runs without a complete window are skipped.
        run = int(np.searchsorted(self.ends, index, side="right"))
        offset = (index - (int(self.ends[run - 1]) if run else 0)) * self.context
        tokens, first = self.runs.read(run, offset, self.context + 1)
        tokens = tokens.astype(np.int64)
        least, largest = tokens.min(), tokens.max()
        if least < 0 or largest >= len(self.token_bytes):
            raise BrokenSampleError(
                f"{self.runs.describe(run)}: token {least if least < 0 else largest} is not in the tokenizer's vocabulary of "
                f"{len(self.token_bytes)}"
            )
        sample: dict[str, Any] = {"tokens": torch.from_numpy(tokens)}
        first_target, end = offset + 1, offset + len(tokens)
        ranges = np.array([[first_target, end]])
        if self.assistant_only_loss:
            ranges = self.runs.target_ranges(run, first_target, end)
            sample["target_mask"] = torch.from_numpy(ranges_mask(ranges, first_target, end))
        sample["bytes"] = sum(
            int(self.token_bytes[tokens[start - offset : stop - offset]].sum())
            + self.runs.missing_bytes(run, start, stop)
            for start, stop in ranges.tolist()
        )
        if self.separate_documents:
            sample["starts"] = torch.from_numpy(np.array(first[:-1]))
        return sample
