"""Protocol of data sets that return samples by index, and errors for broken samples and unavailable shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_mhla.system.listing import shown


class BrokenSampleError(ValueError):
    """Raised for a sample that cannot be used. The message names the location of the sample and the defect."""


class ShardUnavailableError(OSError):
    """Raised for a shard that cannot be downloaded, or that has changed since the list of its files was read.

    The error ends the run, so that no samples are skipped. The run can be resumed later.
    """


class LargerFileError(ShardUnavailableError):
    """Raised for a remote file that is larger than permitted."""


LARGEST_SAMPLE = 1 << 30
"""Maximum size in bytes of a sample's file, which is read into memory at once."""


def read_sample(path: Path) -> bytes:
    """Read the complete file of a sample into memory.

    Raises:
        BrokenSampleError: if the file is larger than 1 GiB.
    """
    size = path.stat().st_size
    if size > LARGEST_SAMPLE:
        raise BrokenSampleError(f"{shown(path)} has {size} bytes, at most {LARGEST_SAMPLE} are read at once")
    return path.read_bytes()


class BrokenContentError(ValueError):
    """Raised during a download if the bytes received so far cannot belong to the expected type of file."""


class SampleSource(Protocol):
    """Protocol of data sets that return samples by index.

    Reading a sample may use the global random generators, which the loader seeds for each sample. If the samples have different
    shapes, the data set also has an attribute ``groups``, ``[samples]`` int64. Samples with the same group number have the same
    shape, and each batch contains samples of one group only.

    Attributes:
        shard_sizes: number of samples in each shard, in order. A data set without shards counts as one shard.
    """

    shard_sizes: Sequence[int]

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample: a dict of tensors and numbers, with the same keys for every sample.

        Raises:
            BrokenSampleError: if the sample cannot be used.
        """
        ...
