"""Shards of captioned images: what ``lightning prepare captions`` writes, and where its neighbours find images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_mhla.data import SampleSource, ShardReader, find_shards, write_shards
from lightning_mhla.data.captioned import TEXT, FolderFiles, ShardFiles
from lightning_mhla.data.images import EXTENSIONS, decode_image
from lightning_mhla.data.write import files_digest
from mhla_tasks.text_to_image.buckets import Size
from mhla_tasks.text_to_image.data import image_folder
from mhla_tasks.text_to_image.sources import CaptionedImages


def images_to_shards(
    source: Path, target: Path, prefix: str, per_shard: int, seed: int, caption_key: str, max_skipped: int
) -> tuple[list[Path], int]:
    """Write the shards; see ``lightning prepare captions --help``.

    Args:
        source: folder of the images.
        target: folder of the shards, made if missing.
        prefix: prefix of the shards' names.
        per_shard: images in a shard.
        seed: seed of their order.
        caption_key: entry of a ``.json``, or of a line of ``metadata.jsonl``, that is the caption.
        max_skipped: broken images that are left out before it stops.

    Returns:
        Paths of the shards, and how many images of the folder are not in them.

    Raises:
        FileNotFoundError: when ``source`` holds no images.
        BrokenSampleError: when more images are broken than ``max_skipped``.
        ValueError: when ``target`` holds shards of other images, or made with other options.
    """
    files = FolderFiles(source, EXTENSIONS, caption_key)
    indices = {path: index for index, path in enumerate(files.paths)}

    def encode(path: Path) -> dict[str, bytes]:
        index = indices[path]
        caption = files.caption(index)
        extension, data = files.member(index, EXTENSIONS)
        decode_image(data, str(path))
        return {extension: data, TEXT: caption.encode()}

    order = np.random.default_rng(seed).permutation(len(files.paths))
    made_with = {"caption_key": caption_key}
    paths = write_shards([files.paths[i] for i in order], encode, target, prefix, per_shard, max_skipped, made_with)
    return paths, len(files.paths) - len(ShardReader(paths))


def open_source(name: str, sizes: Sequence[Size], caption_key: str) -> tuple[SampleSource, str]:
    """The captioned images of a folder or of shards, brought to the best of some sizes, and what identifies them."""
    folder = image_folder(name)
    if folder is not None:
        files = FolderFiles(folder, EXTENSIONS, caption_key)
        digest = files_digest((path, str(path.relative_to(folder))) for path in files.paths)
        return CaptionedImages(files, sizes), digest
    shards = find_shards(name)
    digest = files_digest((path, path.name) for path in shards)
    return CaptionedImages(ShardFiles(ShardReader(shards), caption_key), sizes), digest
