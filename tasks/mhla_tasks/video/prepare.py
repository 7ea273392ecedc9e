"""Shards of a folder of clips with captions: what ``lightning prepare clips`` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_mhla.data import ShardReader, write_shards
from lightning_mhla.data.captioned import JSON, TEXT, FolderFiles
from mhla_tasks.video.clips import check_video
from mhla_tasks.video.sources import VIDEO


def clips_to_shards(
    source: Path, target: Path, prefix: str, per_shard: int, seed: int, caption_key: str, max_skipped: int
) -> tuple[list[Path], int]:
    """Write the shards; see ``lightning prepare clips --help``.

    Args:
        source: folder of the clips.
        target: folder of the shards, made if missing.
        prefix: prefix of the shards' names.
        per_shard: videos in a shard.
        seed: seed of their order.
        caption_key: entry of a ``.json`` that is the caption.
        max_skipped: broken videos that are left out before it stops.

    Returns:
        Paths of the shards, and how many videos of the folder are not in them.

    Raises:
        FileNotFoundError: when ``source`` holds no videos.
        BrokenSampleError: when more videos are broken than ``max_skipped``.
        ValueError: when ``target`` holds shards of other videos, or made with other options.
    """
    folder = FolderFiles(source, (VIDEO,), caption_key)
    order = np.random.default_rng(seed).permutation(len(folder.paths))

    def encode(path: Path) -> dict[str, bytes]:
        index = indices[path]
        folder.caption(index)
        (_, video), (extension, text) = folder.member(index, (VIDEO,)), folder.member(index, (TEXT, JSON))
        check_video(video, str(path))
        return {VIDEO: video, extension: text}

    indices = {path: index for index, path in enumerate(folder.paths)}
    items, made_with = [folder.paths[i] for i in order], {"caption_key": caption_key}
    paths = write_shards(items, encode, target, prefix, per_shard, max_skipped, made_with)
    return paths, len(folder.paths) - len(ShardReader(paths))
