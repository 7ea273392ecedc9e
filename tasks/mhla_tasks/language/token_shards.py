"""Reading of parts of long token sequences from shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_mhla.data import BrokenSampleError, ShardReader
from lightning_mhla.data.shards import beside_shard
from lightning_mhla.system.untrusted import parse_array, parse_array_header
from mhla_tasks.language.targets import ranges_between
from mhla_tasks.language.text_bytes import missing_between

TOKENS, STARTS, MISSING, TARGETS = "tokens.npy", "starts.npy", "missing.npy", "targets.npy"
"""Names of the members of a sample: its tokens; the index of the first token of each document; the length of each document in
bytes minus the number of bytes that its tokens stand for, omitted if the difference is always 0; and the ranges of the tokens
that belong to plain texts or to messages of the assistant, omitted if the chat template does not show which these are."""


class ShardRuns:
    """Reader of long token sequences (runs) in tar shards; it loads only the requested part of a run.

    Each sample of a shard is one run. The class implements the protocol ``sources.TokenRuns``. Streamed shards are not
    downloaded before their tokens are read, except for one shard of each group that shares a file name prefix, such as
    ``train``.

    Args:
        reader: reader of the shards.

    Attributes:
        lengths: number of tokens in each run.
        run_shards: number of runs in each shard, in order.

    Raises:
        BrokenSampleError: if the tokens of a sample cannot be read; the message names the shard and the sample.
    """

    def __init__(self, reader: ShardReader) -> None:
        self.reader = reader
        self.run_shards: Sequence[int] = reader.shard_sizes
        self._heads: list[tuple[int, np.dtype]] = []
        self._assumed: set[int] = set()
        # The shards of a prefix were written by one command: their arrays have heads of one length, and one dtype.
        prefix_heads: dict[Path, tuple[int, np.dtype]] = {}
        for shard, count in zip(reader.shards, reader.shard_sizes, strict=True):
            for run in range(len(self._heads), len(self._heads) + count):
                reader.extension(run, (TOKENS,))
                reader.extension(run, (STARTS,))
                prefix = beside_shard(shard, TOKENS)
                if reader.is_streamed(shard) and prefix in prefix_heads:
                    self._assumed.add(run)
                else:
                    prefix_heads[prefix] = self._head(run)
                self._heads.append(prefix_heads[prefix])
        self.lengths: Sequence[int] = [
            (reader.size(run, TOKENS) - offset) // dtype.itemsize for run, (offset, dtype) in enumerate(self._heads)
        ]
        self._starts: dict[int, np.ndarray] = {}
        self._missing: dict[int, np.ndarray] = {}
        self._targets: dict[int, np.ndarray] = {}

    def _head(self, run: int) -> tuple[int, np.dtype]:
        """Return the byte offset of the tokens of a run (a long sequence) in their tar member, and the dtype of the tokens.

        Raises:
            BrokenSampleError: if the tokens are truncated or not an array of unsigned integers.
        """
        try:  # the header alone says where to read, without loading the tokens
            shape, dtype, start = parse_array_header(self.reader.read(run, TOKENS, 0, 256))
        except ValueError as error:
            raise BrokenSampleError(f"{self.describe(run)}: .{TOKENS} is not a NumPy array ({error})") from error
        if len(shape) != 1 or dtype.kind != "u":
            raise BrokenSampleError(f"{self.describe(run)}: .{TOKENS} is {dtype} {shape}, not unsigned integers [n]")
        if start + shape[0] * dtype.itemsize != self.reader.size(run, TOKENS):
            raise BrokenSampleError(f"{self.describe(run)}: .{TOKENS} is cut short of its {shape[0]} tokens")
        return start, dtype

    def read(self, run: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read consecutive tokens of a run (a long token sequence), with a mask of the tokens that begin a document.

        Args:
            run: index of the run.
            start: index in the run of the first token to read.
            count: number of tokens to read.

        Returns:
            The tokens, ``[count]`` unsigned integers, and a mask of those that begin a document, ``[count]`` bool.

        Raises:
            BrokenSampleError: if the tokens, or the positions at which documents begin, cannot be read.
        """
        offset, dtype = self._heads[run]
        if run in self._assumed:
            if self._head(run) != (offset, dtype):
                raise BrokenSampleError(f"{self.describe(run)}: .{TOKENS} is not {dtype}, as in the first shard")
            self._assumed.discard(run)
        data = self.reader.read(run, TOKENS, offset + start * dtype.itemsize, count * dtype.itemsize)
        tokens = np.frombuffer(data, dtype)
        first = np.zeros(len(tokens), dtype=bool)
        starts = self._document_starts(run)
        low, high = np.searchsorted(starts, [start, start + count])
        first[starts[low:high] - start] = True
        return tokens, first

    def _array(self, run: int, member: str) -> np.ndarray:
        """Load a complete array of a run (a long token sequence), such as ``starts.npy``.

        Raises:
            BrokenSampleError: if the array cannot be read.
        """
        try:
            return parse_array(self.reader.read(run, member))
        except ValueError as error:
            raise BrokenSampleError(f"{self.describe(run)}: .{member} is not a NumPy array ({error})") from error

    def _document_starts(self, run: int) -> np.ndarray:
        if run not in self._starts:
            if len(self._starts) >= 64:  # bound the memory of each worker process
                self._starts.clear()
            starts = self._array(run, STARTS)
            ascending = starts.ndim == 1 and starts.dtype.kind in "iu" and (np.diff(starts.astype(np.int64)) >= 0).all()
            if not ascending or (len(starts) and not 0 <= starts[0] <= starts[-1] < max(1, self.lengths[run])):
                raise BrokenSampleError(
                    f"{self.describe(run)}: .{STARTS} does not hold ascending positions of its {self.lengths[run]} tokens"
                )
            self._starts[run] = starts
        return self._starts[run]

    def has_missing(self, run: int) -> bool:
        """Return whether the shard stores the number of missing bytes of each document in a run (token sequence).

        This number is the length of the text in bytes minus the number of bytes that the tokens stand for.
        """
        return self._has(run, MISSING)

    def has_targets(self, run: int) -> bool:
        """Return whether the shard stores which tokens of a run (token sequence) belong to plain texts or to the assistant."""
        return self._has(run, TARGETS)

    def _has(self, run: int, member: str) -> bool:
        try:
            return self.reader.extension(run, (member,)) == member
        except BrokenSampleError:
            return False

    def target_ranges(self, run: int, first: int, stop: int) -> np.ndarray:
        """Return the parts of a token range that belong to plain texts or to messages of the assistant.

        Args:
            run: index of the run, the long token sequence that contains the range.
            first: index in the run of the first token of the range.
            stop: index in the run after the last token of the range.

        Returns:
            Index in the run of the first token of each part and index after its last one, ``[parts, 2]`` int64, ascending.

        Raises:
            BrokenSampleError: if the shard does not store these ranges, or they cannot be read.
        """
        if run not in self._targets:
            # as for the starts of documents
            if len(self._targets) >= 64:
                self._targets.clear()
            ranges = self._array(run, TARGETS)
            bounds = ranges.flatten()
            if ranges.dtype != np.int64 or ranges.shape != (len(bounds) // 2, 2) or (np.diff(bounds) < 0).any():
                raise BrokenSampleError(
                    f"{self.describe(run)}: .{TARGETS} does not hold ascending ranges, int64 [n, 2]"
                )
            if len(bounds) and not 0 <= bounds[0] <= bounds[-1] <= self.lengths[run]:
                raise BrokenSampleError(
                    f"{self.describe(run)}: .{TARGETS} has ranges outside its {self.lengths[run]} tokens"
                )
            self._targets[run] = ranges
        return ranges_between(self._targets[run], first, stop)

    def missing_bytes(self, run: int, first: int, stop: int) -> int:
        """Return the size in bytes of the text of a token range, minus the number of bytes that its tokens stand for.

        Args:
            run: index of the run, the long token sequence that contains the range.
            first: index in the run of the first token of the range.
            stop: index in the run after the last token of the range.

        Returns:
            The difference; negative if the tokens stand for more bytes than the text has, and 0 if the shard does not store
            differences for the run.

        Raises:
            BrokenSampleError: if the stored differences cannot be read.
        """
        if not self.has_missing(run):
            return 0
        starts = self._document_starts(run)
        if run not in self._missing:
            if len(self._missing) >= 64:
                self._missing.clear()
            missing = self._array(run, MISSING)
            if missing.dtype != np.int64 or missing.shape != starts.shape:
                raise BrokenSampleError(
                    f"{self.describe(run)}: .{MISSING} is {missing.dtype} {missing.shape}, not int64 [{len(starts)}]"
                )
            self._missing[run] = missing
        return missing_between(first, stop, starts, self._missing[run], self.lengths[run])

    def describe(self, run: int) -> str:
        """Return the names of the shard and the sample that hold a run (a long token sequence), for messages."""
        return self.reader.describe(run)
