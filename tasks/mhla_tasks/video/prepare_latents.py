"""Latent shards of clips and captions: what ``lightning prepare clip-latents`` writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_mhla.data import BrokenSampleError, SampleSource, ShardReader, find_shards
from lightning_mhla.data.write import Skipped, array_bytes, check_manifest, files_digest, fill_shards, shard_ranges
from lightning_mhla.generative.codecs import ClipCodec
from lightning_mhla.generative.text import CaptionEncoder
from mhla_tasks.video.sources import EMBEDDING, LATENT, ClipFolder, ShardClips, empty_caption_file


def encode_clips(
    source: SampleSource,
    identity: dict[str, Any],
    target: Path,
    codec: ClipCodec,
    captions: CaptionEncoder,
    prefix: str,
    per_shard: int,
    device: torch.device,
    max_skipped: int = 100,
    share: tuple[int, int] = (0, 1),
) -> tuple[list[Path], int]:
    """Write ``target/prefix-00000.tar`` and so on; the shards of this process of ``share``, rank and number.

    Args:
        source: gives ``video`` ``[3, F, H, W]`` in -1 .. 1 and ``caption``.
        identity: description of the clips, so that shards of others are not mixed with these.
        target: made if missing.
        codec: encodes clips.
        captions: encodes captions.
        prefix: prefix of the file names.
        per_shard: videos for a shard; it holds fewer where some are broken.
        device: where.
        max_skipped: broken videos that this process skips before it stops.
        share: index and number of the parts that the shards are divided into.

    Returns:
        Paths of all shards, of every process, and how many videos this one skipped.

    Raises:
        ValueError: when the folder holds shards of other clips, or made otherwise.
        BrokenSampleError: when more videos are broken than ``max_skipped``.
    """
    manifest = {"samples": len(source), "per_shard": per_shard, **identity}
    begun = bool(list(target.glob(f"{prefix}-*.tar")))
    check_manifest(target / f"{prefix}-manifest.json", manifest)
    shards = shard_ranges(target, prefix, len(source), per_shard)
    empty = empty_caption_file(shards[0][0])
    if not (begun and empty.exists()):
        aside = empty.with_name(f"{empty.name}.{share[0]}.part")
        aside.write_bytes(array_bytes(captions.tokens("", device).half()))
        aside.replace(empty)
    mine, skipped = shards[share[0] :: share[1]], Skipped(max_skipped)

    def samples(here: range) -> Iterator[dict[str, Any]]:
        for index in here:
            try:
                sample = source[index]
            except BrokenSampleError as error:
                skipped.add(error)
                continue
            latent = codec.encode(sample["video"][None].to(device))[0].half()
            tokens = captions.tokens(sample["caption"], device).half()
            members = {LATENT: array_bytes(latent), EMBEDDING: array_bytes(tokens), "txt": sample["caption"].encode()}
            yield {"__key__": f"{index:08d}", **members}

    fill_shards(
        ((path, len(here), samples(here)) for path, here in mine),
        f"encoding {prefix} shards",
        sum(len(here) for _, here in mine),
        quiet=share[0] > 0,
    )
    return [path for path, _ in shards], skipped.count


def open_source(name: str, **options: Any) -> tuple[SampleSource, str]:
    """The clips of a folder or of shards, and what identifies them; ``options`` as for :class:`ShardClips`."""
    if Path(name).is_dir() and not list(Path(name).glob("*.tar")):
        folder = ClipFolder(name, **options)
        return folder, files_digest((path, str(path.relative_to(name))) for path in folder.paths)
    shards = find_shards(name)
    return ShardClips(ShardReader(shards), **options), files_digest((path, path.name) for path in shards)
