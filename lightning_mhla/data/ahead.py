"""Prefetching of remote shards in threads, ahead of their first use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_mhla.data.cache import ShardCache
from lightning_mhla.data.remote import DownloadStoppedError

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Number of shards that a process fetches at the same time."""


class FetchAhead:
    """Context manager that prefetches shards in the order of their first use, as far as the cache limit allows.

    If several loaders share a cache, such as those for training and validation, only the one that read a batch last prefetches.

    Args:
        cache: cache to download the shards to.
        paths: paths of all shards in the cache.
        shards: index into ``paths`` for each sample, in the order in which samples are read, ``[n]`` int.
    """

    def __init__(self, cache: ShardCache, paths: Sequence[Path], shards: np.ndarray) -> None:
        self.cache, self.paths = cache, paths
        numbers, first = np.unique(shards, return_index=True)
        last = len(shards) - 1 - np.unique(shards[::-1], return_index=True)[1]
        order = np.argsort(first)
        self._numbers, self._last = numbers[order], last[order]
        self._next = int(self._last.min(initial=len(shards))) + 1
        self._stop, self._changed = threading.Event(), threading.Condition()
        self._wanted: list[Path] = []
        self._threads: list[threading.Thread] = []
        self._plan(0)

    def passed(self, samples: int) -> None:
        """Update the choice of shards to prefetch; call it for each batch.

        Args:
            samples: number of samples read so far, by all processes together.
        """
        self.cache.ahead = self
        if samples >= self._next:
            self._plan(samples)

    def _plan(self, samples: int) -> None:
        """Choose the shards to prefetch and to keep in the cache: those that are needed next, as many as fit in the cache.

        Args:
            samples: number of samples read so far, by all processes together.
        """
        remaining = self._last >= samples
        # the plan changes only when the last sample of a shard has been read
        self._next = int(self._last[remaining].min(initial=np.iinfo(np.int64).max - 1)) + 1
        coming = [self.paths[number] for number in self._numbers[remaining] if self.paths[number] in self.cache.urls]
        fitting = np.cumsum([self.cache.sizes[path] for path in coming]) <= self.cache.room
        with self._changed:
            self._wanted = coming[: int(fitting.sum())]
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                wanted_paths = self._wanted
            fetched = False
            for path in wanted_paths if self.cache.ahead is self else []:
                if self._stop.is_set():
                    return
                if not path.exists():
                    try:
                        fetched = self.cache.fetch_ahead(path, set(wanted_paths), self._stop)
                    except DownloadStoppedError:
                        return
                    except (OSError, ValueError) as error:
                        log.warning(
                            "prefetching of shards has stopped: %s", error
                        )  # the reader fetches it again, or fails
                        return
                    if fetched:
                        break
            if not fetched:
                # the timeout is for changes that notify nobody: room in the cache, and which pass read last
                with self._changed:
                    if self._wanted is wanted_paths and not self._stop.is_set():
                        self._changed.wait(1.0)

    def __enter__(self) -> FetchAhead:
        self.cache.ahead = self
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(AT_ONCE)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
