"""Packing of a folder of captioned files into WebDataset shards, without changing the content of the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_mhla.data.captioned import FolderFiles, caption_members
from lightning_mhla.data.shards import ShardReader
from lightning_mhla.data.write import write_shards
from lightning_mhla.system.ranges import check_seed


@dataclass(frozen=True)
class Packing:
    """Options of a command that packs the files of a folder into shards.

    Attributes:
        target: folder to write the shards to, created if it does not exist.
        prefix: prefix of the shard names.
        per_shard: number of samples in a shard.
        seed: seed for shuffling the samples.
        max_skipped: maximum number of broken samples that are left out. One more broken sample is an error.
        force: whether to delete existing shards with the same prefix first.

    Raises:
        ValueError: if ``seed`` is negative.
    """

    target: Path
    prefix: str = "train"
    per_shard: int = 1000
    seed: int = 0
    max_skipped: int = 100
    force: bool = False

    def __post_init__(self) -> None:
        check_seed(seed=self.seed)


def pack_captioned(
    source: Path, extensions: Sequence[str], check: Callable[[bytes, str], object], caption_key: str, packing: Packing
) -> tuple[list[Path], int]:
    """Pack captioned files, such as images, from a folder into WebDataset shards, without changing their content.

    Args:
        source: folder of the captioned files.
        extensions: extensions of the captioned files, without the dot.
        check: function that takes the content and the location of a file, and raises BrokenSampleError if the file is broken.
        caption_key: JSON key of the caption, or of the list of captions, in a ``.json`` file or a line of ``metadata.jsonl``.
        packing: options of the shards.

    Returns:
        Paths of the shards, and number of files in ``source`` that were left out because they are broken.

    Raises:
        FileNotFoundError: if ``source`` contains no files with these extensions.
        BrokenSampleError: if more than ``packing.max_skipped`` files are broken.
        ValueError: if shards in the target folder were made with different options, or from files that have changed since.
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
