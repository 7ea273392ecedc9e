"""Where ``lightning prepare clip-latents`` finds clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_mhla.data import SampleSource, ShardReader, find_shards
from lightning_mhla.data.write import files_digest
from mhla_tasks.video.sources import ClipFolder, ShardClips


def open_source(name: str, **options: Any) -> tuple[SampleSource, str]:
    """The clips of a folder or of shards, and what identifies them; ``options`` as for :class:`ShardClips`."""
    if Path(name).is_dir() and not list(Path(name).glob("*.tar")):
        folder = ClipFolder(name, **options)
        return folder, files_digest((path, str(path.relative_to(name))) for path in folder.paths)
    shards = find_shards(name)
    return ShardClips(ShardReader(shards), **options), files_digest((path, path.name) for path in shards)
