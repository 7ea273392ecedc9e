"""Atomic writing of WebDataset shards, so that a stopped command resumes where it was."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import webdataset as wds
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from lightning_mhla.data.source import BrokenSampleError
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.untrusted import read_json

log = logging.getLogger(__name__)

Item = TypeVar("Item")

AT_ONCE = 32
"""Samples of a shard that threads prepare while others are written."""


class Skipped:
    """Counts the samples that a command leaves out because they are broken, with a warning for each.

    Args:
        limit: number of samples to skip before it stops.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0

    def add(self, error: BrokenSampleError) -> None:
        """Count one.

        Raises:
            BrokenSampleError: when there are more than the limit.
        """
        log.warning("skipped: %s", error)
        self.count += 1
        if self.count > self.limit:
            raise BrokenSampleError(
                f"broken samples: {self.count}, more than --max_skipped {self.limit}; the warnings above name them"
            ) from error


def write_shards(
    items: Sequence[Item],
    encode: Callable[[Item], dict[str, Any]],
    folder: Path,
    prefix: str,
    per_shard: int,
    max_skipped: int = 0,
    made_with: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write ``items`` in order as ``folder/prefix-0000.tar`` and so on.

    A shard gets its name when it is complete; one that exists is left alone, so calling again after a stop resumes.

    Args:
        items: samples to write; sample i gets the key ``i`` in eight digits.
        encode: the members of one item, extension to bytes or a number; called in several threads.
        folder: made if missing.
        prefix: prefix of the file names.
        per_shard: samples in a shard; the last may hold fewer, and so may one with broken items.
        max_skipped: items that are left out, with a warning each, where ``encode`` raises a BrokenSampleError.
        made_with: options that the samples depend on.

    Returns:
        Paths of all shards.

    Raises:
        BrokenSampleError: when more items are broken than ``max_skipped``, or all of them.
        ValueError: when the folder holds shards of another list of items, or made with other options, which would be
            mixed with these.
    """
    digest = hashlib.sha256(repr(list(items)).encode()).hexdigest()
    manifest = {"samples": len(items), "per_shard": per_shard, "items": digest, **(made_with or {})}
    check_manifest(folder / f"{prefix}-manifest.json", manifest)
    shards, skipped = shard_ranges(folder, prefix, len(items), per_shard, digits=4), Skipped(max_skipped)

    def attempt(item: Item) -> dict[str, Any] | BrokenSampleError:
        try:
            return encode(item)
        except BrokenSampleError as error:
            return error

    def samples(here: range) -> Iterator[dict[str, Any]]:
        for few in (here[i : i + AT_ONCE] for i in range(0, len(here), AT_ONCE)):
            for number, members in zip(few, pool.map(attempt, [items[i] for i in few]), strict=True):
                if isinstance(members, BrokenSampleError):
                    skipped.add(members)
                else:
                    yield {"__key__": f"{number:08d}", **members}

    with ThreadPoolExecutor() as pool:
        paths = fill_shards(
            ((path, len(here), samples(here)) for path, here in shards), f"writing {prefix} shards", len(items)
        )
    if items and skipped.count == len(items):
        for path in paths:
            path.unlink()
        raise BrokenSampleError(f"none of the {len(items)} samples can be used; see the warnings above")
    return paths


def shard_ranges(folder: Path, prefix: str, count: int, per_shard: int, digits: int = 5) -> list[tuple[Path, range]]:
    """Path and samples of each shard: ``folder/prefix-00000.tar`` and so on, ``per_shard`` of ``count`` samples in each."""
    starts = range(0, count, per_shard)
    return [
        (folder / f"{prefix}-{number:0{digits}d}.tar", range(start, min(start + per_shard, count)))
        for number, start in enumerate(starts)
    ]


def fill_shards(
    shards: Iterable[tuple[Path, int, Iterable[dict[str, Any]]]], title: str, total: int | None, quiet: bool = False
) -> list[Path]:
    """Write shards that do not exist yet, each under its name once it is complete.

    Args:
        shards: path, number of samples and samples of each; samples of a shard that exists are not asked for.
        title: title of the progress bar.
        total: samples of all shards; None if unknown.
        quiet: whether there is no progress bar.

    Returns:
        Paths of all shards.
    """
    paths, done = [], 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=quiet) as progress:
        bar = progress.add_task(title, total=total)
        for path, count, samples in shards:
            paths.append(path)
            if not path.exists():
                with shard_writer(path) as writer:
                    for sample in samples:
                        writer.write(sample)
                        progress.advance(bar)
            done += count
            progress.update(bar, completed=done)
    return paths


def files_digest(names: Iterable[tuple[Path, str]]) -> str:
    """A hash of files by name and size: ``names`` are paths and how they are called."""
    lines = [f"{name} {path.stat().st_size}" for path, name in names]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def array_bytes(values: Tensor | np.ndarray) -> bytes:
    """A tensor as the bytes of a ``.npy`` file, which :meth:`ShardReader.array` reads."""
    stream = io.BytesIO()
    np.save(stream, values.cpu().numpy() if isinstance(values, Tensor) else values, allow_pickle=False)
    return stream.getvalue()


@contextmanager
def shard_writer(path: Path) -> Iterator[wds.TarWriter]:
    """Writes a shard that gets its name when it is complete."""
    aside = path.with_name(path.name + ".part")
    with aside.open("wb") as stream, wds.TarWriter(stream, mtime=0) as writer:
        yield writer
    aside.replace(path)


def check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write down what the shards of a prefix hold, or compare it with what an earlier call wrote down.

    A call that failed before its first shard was complete leaves nothing to compare with.

    Raises:
        ValueError: when they differ, so that shards of two lists would be mixed.
    """
    prefix = path.name.removesuffix("manifest.json")
    begun = any(shard.stem.removeprefix(prefix).isdigit() for shard in path.parent.glob(f"{prefix}*.tar"))
    if begun and path.exists() and (before := read_json(path)) != manifest:
        differing = ", ".join(key for key in manifest if before.get(key) != manifest[key]) or "other entries"
        raise ValueError(
            f"{path.parent} holds shards of another list of samples or made otherwise ({path.name}: {differing}); choose "
            "another folder or prefix, or delete them"
        )
    if not (begun and path.exists()):
        write_whole(path, json.dumps(manifest) + "\n")
