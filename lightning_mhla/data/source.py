"""Interface of sources, which return the samples of a data set by index, and errors for samples and shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_mhla.system.listing import shown


class BrokenSampleError(ValueError):
    """Raised for a sample that cannot be used. The message names its location and the defect."""


class ShardUnavailableError(OSError):
    """Raised for a shard that cannot be downloaded. It ends the run, which can resume, instead of skipping samples."""


LARGEST_SAMPLE = 1 << 30
"""Maximum size in bytes of a sample's file, which is read into memory at once."""


def read_sample(path: Path) -> bytes:
    """Read a file of a sample into memory, with a limit on its size.

    Raises:
        BrokenSampleError: if the file has more than :data:`LARGEST_SAMPLE` bytes.
    """
    size = path.stat().st_size
    if size > LARGEST_SAMPLE:
        raise BrokenSampleError(f"{shown(path)} has {size} bytes, at most {LARGEST_SAMPLE} are read at once")
    return path.read_bytes()


class BrokenContentError(ValueError):
    """Raised for a download whose first bytes show that it is not the expected file."""


class SampleSource(Protocol):
    """Protocol of data sets that return a sample by index.

    Reading a sample may use the global random generators, which the loader seeds for each sample. A source whose samples have
    several shapes also has an attribute ``groups``, ``[samples]`` int64, the group number of each sample. Samples of one group
    have the same shape, and each batch contains samples of one group.

    Attributes:
        shard_sizes: number of samples in each shard, in order; a source without shards counts as one shard.
    """

    shard_sizes: Sequence[int]

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read a sample: tensors and numbers with the same keys and shapes for every index.

        Raises:
            BrokenSampleError: if the sample cannot be used.
        """
        ...
