"""A data set as the pipeline sees it: samples by index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_mhla.system.listing import shown


class BrokenSampleError(ValueError):
    """A sample that cannot be used; the message names where it lies and what is wrong with it."""


class ShardUnavailableError(OSError):
    """A shard that cannot be fetched now; the message names it. No sample is skipped for it: the run can resume."""


LARGEST_SAMPLE = 1 << 30
"""Bytes of a file of a sample, which is read into memory at once."""


def read_sample(path: Path) -> bytes:
    """The bytes of a file of a sample.

    Raises:
        BrokenSampleError: naming the file, when it has more than :data:`LARGEST_SAMPLE` bytes.
    """
    size = path.stat().st_size
    if size > LARGEST_SAMPLE:
        raise BrokenSampleError(f"{shown(path)} has {size} bytes, at most {LARGEST_SAMPLE} are read at once")
    return path.read_bytes()


class BrokenContentError(ValueError):
    """A download whose first bytes show that it is not what it should be; the message names its address."""


class SampleSource(Protocol):
    """Samples by index. Reading one uses the global random generators freely: they are seeded for each sample.

    A source whose samples have several shapes has an attribute ``groups`` too, ``[samples]`` int64: samples of one group have
    one shape, and a batch holds samples of one group.

    Attributes:
        shard_sizes: samples in each shard, in order; a source without shards is one shard.
    """

    shard_sizes: Sequence[int]

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample, of tensors and numbers of the same keys and shapes for every index.

        Raises:
            BrokenSampleError: if the sample cannot be used.
        """
        ...
