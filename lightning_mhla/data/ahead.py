"""Background threads that download remote tar shards of a data set before their samples are read."""

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
    """Context manager that downloads remote shards in background threads before their samples are read.

    Shards are downloaded in the order of their first use, as far as the size limit of the cache allows. If several loaders
    share a cache, such as those for training and validation, shards are downloaded ahead only for the loader that was used
    last.

    Args:
        cache: cache in which the shards are stored.
        paths: local paths of all shards of the data set. Shards that the cache does not manage are ignored.
        shards: index into ``paths`` of each sample's shard, in reading order, ``[n]`` int for n samples.
    """

    def __init__(self, cache: ShardCache, paths: Sequence[Path], shards: np.ndarray) -> None:
        self.cache, self.paths = cache, paths
        numbers, first = np.unique(shards, return_index=True)
        # `unique` returns first positions. Of the reversed order, these are the last ones.
        last = len(shards) - 1 - np.unique(shards[::-1], return_index=True)[1]
        order = np.argsort(first)
        self._numbers, self._last = numbers[order], last[order]
        self._stop, self._changed = threading.Event(), threading.Condition()
        self._wanted: list[Path] = []
        self._threads: list[threading.Thread] = []
        self._plan(0)

    def passed(self, samples: int) -> None:
        """Report how many samples have been read, so that the list of shards to download next is updated.

        Call this method once for each batch.

        Args:
            samples: number of samples read since the start of this pass over the data, summed over all processes.
        """
        self.cache.ahead = self
        if samples >= self._next:
            self._plan(samples)

    def _plan(self, samples: int) -> None:
        """Choose which shards to download and keep: the ones that are needed next, as many as fit in the cache.

        Args:
            samples: number of samples read since the start of this pass over the data, summed over all processes.
        """
        remaining = self._last >= samples
        # the plan changes only when the last sample of a shard has been read
        self._next = int(self._last[remaining].min(initial=np.iinfo(np.int64).max - 1)) + 1
        coming = [self.paths[number] for number in self._numbers[remaining] if self.paths[number] in self.cache.urls]
        # A prefix of the shards in reading order, so that what is needed first is never displaced by what is needed later.
        fitting = np.cumsum([self.cache.sizes[path] for path in coming]) <= self.cache.room
        with self._changed:
            self._wanted = coming[: int(fitting.sum())]
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                wanted_paths = self._wanted
            fetched = False
            # All threads go through the same list; a shard that one of them downloads is locked, and the others take the next.
            for path in wanted_paths if self.cache.ahead is self else []:
                if self._stop.is_set():
                    return
                if not path.exists():
                    try:
                        fetched = self.cache.fetch_ahead(path, set(wanted_paths), self._stop)
                    except DownloadStoppedError:
                        return
                    except (OSError, ValueError) as error:  # the reader fetches it again, or fails
                        log.warning("prefetching of shards has stopped: %s", error)
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
