"""Data loading for all models: readers of samples, tar shards, reproducible shuffling and exact resume."""

from lightning_mhla.data.loader import ResumableLoader
from lightning_mhla.data.module import ResumableDataModule, ShardSets
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.data.shards import ShardReader, find_shards
from lightning_mhla.data.source import BrokenSampleError, SampleSource, ShardUnavailableError
from lightning_mhla.data.write import write_shards

__all__ = [
    "BrokenSampleError",
    "ResumableDataModule",
    "ResumableLoader",
    "SampleSource",
    "ShardOptions",
    "ShardReader",
    "ShardSets",
    "ShardUnavailableError",
    "find_shards",
    "write_shards",
]
