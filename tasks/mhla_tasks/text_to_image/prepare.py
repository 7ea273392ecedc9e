"""Where ``lightning prepare caption-latents`` finds images."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mhla.data import ShardReader, find_shards
from lightning_mhla.data.captioned import FolderFiles, ShardFiles
from lightning_mhla.data.images import EXTENSIONS
from lightning_mhla.data.origins import shard_origins
from mhla_tasks.captioned.encoded import EncodedSource
from mhla_tasks.text_to_image.buckets import Size
from mhla_tasks.text_to_image.data import image_folder
from mhla_tasks.text_to_image.sources import CaptionedImages


def open_source(name: str, sizes: Sequence[Size], caption_key: str) -> EncodedSource:
    """The captioned images of a folder or of shards, brought to the best of some sizes."""
    folder = image_folder(name)
    if folder is not None:
        files = FolderFiles(folder, EXTENSIONS, caption_key)
        return EncodedSource(CaptionedImages(files, sizes), "image", files, files.origins(), per_sample=True)
    shards = find_shards(name)
    members = ShardFiles(ShardReader(shards), caption_key)
    return EncodedSource(CaptionedImages(members, sizes), "image", members, shard_origins(shards), per_sample=False)
