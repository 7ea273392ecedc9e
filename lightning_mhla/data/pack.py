"""Packing of folders with captioned files into shards, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_mhla.data.captioned import FolderFiles, caption_members
from lightning_mhla.data.shards import ShardReader
from lightning_mhla.data.write import write_shards


@dataclass(frozen=True)
class Packing:
    """Options of a command that packs a folder into shards.

    Attributes:
        target: folder of the shards, made if missing.
        prefix: prefix of the shards' names.
        per_shard: samples in a shard.
        seed: seed of the order of the samples.
        max_skipped: broken samples that are left out before the command stops.
        force: delete the shards of an earlier call first.
    """

    target: Path
    prefix: str = "train"
    per_shard: int = 1000
    seed: int = 0
    max_skipped: int = 100
    force: bool = False


def pack_captioned(
    source: Path, extensions: Sequence[str], check: Callable[[bytes, str], object], caption_key: str, packing: Packing
) -> tuple[list[Path], int]:
    """Write the shards of a folder of files with captions; see ``lightning prepare captions --help``.

    Args:
        source: folder of the files.
        extensions: of the files.
        check: raises BrokenSampleError for the bytes of a broken file; takes its name, too.
        caption_key: entry of a ``.json``, or of a line of ``metadata.jsonl``, that is the caption.
        packing: options of the shards.

    Returns:
        Paths of the shards, and how many files of the folder are not in them.

    Raises:
        FileNotFoundError: when ``source`` holds no such files.
        BrokenSampleError: when more are broken than ``max_skipped``.
        ValueError: when the target holds shards of files that have changed since, or made with other options.
    """
    files = FolderFiles(source, extensions, caption_key)

    def encode(index: int) -> dict[str, bytes]:
        captions = files.captions(index)
        extension, data = files.member(index, extensions)
        check(data, files.describe(index))
        return {extension: data, **caption_members(captions)}

    order = np.random.default_rng(packing.seed).permutation(len(files.paths)).tolist()
    origins = files.origins()
    paths = write_shards(
        order, encode, packing.target, packing.prefix, packing.per_shard, packing.max_skipped,
        {"caption_key": caption_key, "seed": packing.seed}, [origins[index] for index in order], packing.force,
    )  # fmt: skip
    return paths, len(files.paths) - len(ShardReader(paths))
