"""Options shared by all data modules that read tar shards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardOptions:
    """Options for reading tar shards and keeping downloaded shards.

    Args:
        max_skipped: maximum number of broken training samples that one process skips, with a warning for each. One more broken
            sample is an error.
        shuffle_window: number of shards whose samples are shuffled together; null shuffles all samples together.
        cache_dir: folder for downloaded shards. If the folder of the shards is read-only, lists of the files in the shards are
            also saved here. null uses the user's cache folder.
        cache_bytes: maximum size in bytes of the downloaded shards in cache_dir. Shards are downloaded shortly before they are
            read, and removed after use. null downloads all shards before training and keeps them.

    Raises:
        ValueError: if a number is too small.
    """

    max_skipped: int = 100
    shuffle_window: int | None = 16
    cache_dir: str | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_skipped < 0:
            raise ValueError(f"max_skipped={self.max_skipped} must not be negative")
        if self.shuffle_window is not None and self.shuffle_window < 1:
            raise ValueError(
                f"shuffle_window={self.shuffle_window} must be at least 1, or null to shuffle everything with everything"
            )
        if self.cache_bytes is not None and self.cache_bytes < 1:
            raise ValueError(f"cache_bytes={self.cache_bytes} must be a number of bytes, or null to keep all shards")
