"""Latent shards of images, encoded by a diffusers VAE: what ``lightning prepare latents`` writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_mhla.data import SampleSource, ShardReader, find_shards
from lightning_mhla.data.images import LabelledFolder, ShardImages
from lightning_mhla.data.write import array_bytes, check_manifest, files_digest, fill_shards, shard_ranges
from lightning_mhla.generative.codecs import LatentCodec
from mhla_tasks.diffusion.sources import FLIPPED, LATENT, SignedImage

SHUFFLE_SEED = 0
"""Of the order in which images of a folder are encoded."""


def encode_images(
    source: SampleSource,
    identity: str,
    target: Path,
    vae: LatentCodec,
    prefix: str,
    per_shard: int,
    batch_size: int,
    device: torch.device,
    image_size: int,
    share: tuple[int, int] = (0, 1),
) -> list[Path]:
    """Write ``target/prefix-00000.tar`` and so on; the shards of this process of ``share``, rank and number.

    Args:
        source: gives ``image`` ``[3, S, S]`` in -1 .. 1 and ``label``; broken images are an error.
        identity: description of the images, so that shards of others are not mixed with these.
        target: made if missing.
        vae: encodes.
        prefix: prefix of the file names.
        per_shard: latents in a shard.
        batch_size: images encoded at once.
        device: where.
        image_size: S.
        share: index and number of the parts that the shards are divided into.

    Returns:
        Paths of all shards, of every process.

    Raises:
        ValueError: when the folder holds shards of other images, or made otherwise.
        BrokenSampleError: for an image that cannot be read.
    """
    manifest = {
        "samples": len(source),
        "per_shard": per_shard,
        "images": identity,
        "image_size": image_size,
        "vae": vae.path,
        "scale": vae.scale(device),
    }
    check_manifest(target / f"{prefix}-manifest.json", manifest)
    shards = shard_ranges(target, prefix, len(source), per_shard)
    mine = shards[share[0] :: share[1]]
    fill_shards(
        ((path, len(here), _encoded(source, here, vae, batch_size, device)) for path, here in mine),
        f"encoding {prefix} shards",
        sum(len(here) for _, here in mine),
        quiet=share[0] > 0,
    )
    return [path for path, _ in shards]


def _encoded(
    source: SampleSource, indices: range, vae: LatentCodec, batch_size: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    for start in range(0, len(indices), batch_size):
        rows = indices[start : start + batch_size]
        samples = [source[index] for index in rows]
        images = torch.stack([sample["image"] for sample in samples]).to(device)
        both = [vae.moments(pictures).half().cpu() for pictures in (images, images.flip(-1))]
        for index, sample, latent, flipped in zip(rows, samples, *both, strict=True):
            members = {LATENT: array_bytes(latent), FLIPPED: array_bytes(flipped), "cls": str(sample["label"]).encode()}
            yield {"__key__": f"{index:08d}", **members}


def open_source(name: str, image_size: int, num_classes: int) -> tuple[SampleSource, str]:
    """The images of a folder or of shards, and what identifies them."""
    transform = SignedImage(image_size)
    if Path(name).is_dir() and not list(Path(name).glob("*.tar")):
        folder = LabelledFolder(name, transform)
        order = np.random.default_rng(SHUFFLE_SEED).permutation(len(folder))  # or a shard would hold one class
        folder.labelled = [folder.labelled[index] for index in order]
        return folder, files_digest((path, str(path.relative_to(name))) for path, _ in folder.labelled)
    shards = find_shards(name)
    source = ShardImages(ShardReader(shards), transform, num_classes)
    return source, files_digest((path, path.name) for path in shards)
