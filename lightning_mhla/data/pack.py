"""Packing of folders with captioned files into WebDataset shards, without changing the files."""

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
    """Options of a command that packs the files of a folder into shards.

    Attributes:
        target: folder of the shards, created if missing.
        prefix: prefix of the shards' names.
        per_shard: number of samples in a shard.
        seed: seed of the shuffled order of the samples.
        max_skipped: number of broken samples that are left out before the command stops.
        force: whether to delete the shards of an earlier call first.
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
    """Pack a folder of captioned files into WebDataset shards; see ``lightning prepare captions --help``.

    Args:
        source: folder of the files.
        extensions: extensions of the files, without the dot.
        check: function of a file's content and name that raises BrokenSampleError if the file is broken.
        caption_key: key of the caption, or list of captions, in a ``.json`` file or a line of ``metadata.jsonl``.
        packing: options of the shards.

    Returns:
        Paths of the shards, and the number of files in ``source`` that they do not contain.

    Raises:
        FileNotFoundError: if ``source`` contains no files with these extensions.
        BrokenSampleError: if more than ``max_skipped`` files are broken.
        ValueError: if the target contains shards that were made from files that have changed since, or with different options.
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
