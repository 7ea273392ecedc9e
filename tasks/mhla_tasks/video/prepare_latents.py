"""Where ``lightning prepare clip-latents`` finds clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_mhla.data import ShardReader, find_shards
from lightning_mhla.data.captioned import FolderFiles, ShardFiles
from lightning_mhla.data.origins import shard_origins
from lightning_mhla.data.shards import holds_shards
from mhla_tasks.captioned.encoded import EncodedSource
from mhla_tasks.video.sources import VIDEO, CaptionedClips


def open_source(name: str, caption_key: str, **options: Any) -> EncodedSource:
    """The clips of a folder or of shards; ``options`` as for :class:`CaptionedClips`."""
    if Path(name).is_dir() and not holds_shards(Path(name)):
        files = FolderFiles(name, (VIDEO,), caption_key)
        return EncodedSource(CaptionedClips(files, **options), "video", files, files.origins(), per_sample=True)
    shards = find_shards(name)
    members = ShardFiles(ShardReader(shards), caption_key)
    return EncodedSource(CaptionedClips(members, **options), "video", members, shard_origins(shards), per_sample=False)
