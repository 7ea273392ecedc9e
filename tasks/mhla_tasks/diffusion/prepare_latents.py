"""Encoding of labeled images with a diffusers VAE into shards of latents, for ``lightning prepare latents``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_mhla.data import SampleSource, ShardReader, find_shards
from lightning_mhla.data.classes import data_set_classes
from lightning_mhla.data.images import LabelledFolder, ShardImages, shard_classes
from lightning_mhla.data.origins import MODEL_FILES, Origin, model_digest, sample_key, shard_origins
from lightning_mhla.data.shards import holds_shards
from lightning_mhla.data.write import (
    Preparation,
    array_bytes,
    check_not_the_source,
    check_outside,
    check_per_shard,
    grouped,
    readable,
)
from lightning_mhla.generative.codecs import LatentCodec
from lightning_mhla.system.ranges import check_range
from mhla_tasks.diffusion.sources import FLIPPED, LATENT, SignedImage

SHUFFLE_SEED = 0
"""Seed of the order in which the images of a folder are encoded."""

MOST_CLASSES = 1 << 30
"""Exclusive upper bound of the labels in shards that do not name their classes."""


@dataclass(frozen=True)
class LabelledSource:
    """Labeled images that are to be encoded, with the files that contain them.

    Attributes:
        samples: map-style data set of dicts with ``image`` ``[3, S, S]`` float32 in -1 .. 1 and the class ``label``, an int.
        origins: record of the source files, by which a later call of :func:`encode_images` detects changed files. It has an
            entry for each image or for each shard.
        per_sample: whether ``origins`` has an entry for each image; false if it has an entry for each shard.
        classes: class names in the order of the labels; None if unknown.
    """

    samples: SampleSource
    origins: Sequence[Origin]
    per_sample: bool
    classes: list[str] | None


def encode_images(
    source: LabelledSource,
    target: Path,
    vae: LatentCodec,
    prefix: str,
    per_shard: int,
    batch_size: int,
    device: torch.device,
    image_size: int,
    max_skipped: int = 0,
    share: tuple[int, int] = (0, 1),
    force: bool = False,
) -> tuple[list[Path], int]:
    """Encode images as latents, and write the latents to shards ``target/prefix-00000.tar`` and so on.

    Several processes can divide the shards among them. Each process calls this function with its own ``share``.

    Args:
        source: images to encode.
        target: path of the folder of shards, created if missing.
        vae: VAE that encodes the images.
        prefix: prefix of the shards' file names.
        per_shard: number of latents per shard. A shard has fewer if some of its images cannot be decoded.
        batch_size: number of images that are encoded at once.
        device: device on which the VAE runs.
        image_size: side S of the square images in pixels, recorded in the manifest of the shards.
        max_skipped: number of images that this process may skip because they cannot be decoded.
        share: index of this process, and number of processes that the shards are divided among.
        force: whether to first delete shards that an earlier call of this function wrote.

    Returns:
        Paths of the shards of all processes, and the number of images that this process skipped.

    Raises:
        ValueError: if there are no images, ``per_shard``, ``batch_size`` or ``image_size`` is below 1, ``force`` is set for
            several processes, or the folder holds shards that were written with different options or from images that have
            changed since.
        BrokenSampleError: if more than ``max_skipped`` images cannot be decoded, or if none can and only one process runs.
    """
    check_range(least=1, batch_size=batch_size, image_size=image_size)
    check_per_shard(per_shard)  # before force deletes the existing shards
    if not len(source.samples):
        raise ValueError("the source has no images, so there is nothing to encode")
    options = {
        "per_shard": per_shard,
        "image_size": image_size,
        "vae": vae.path,
        "scale": vae.scale(device),
        MODEL_FILES: model_digest(vae.path, ["vae"]),
    }
    with Preparation(
        target, prefix, options, source.origins, per_shard if source.per_sample else None, max_skipped, force, share,
        source.classes,
    ) as call:  # fmt: skip
        order = call.order if source.per_sample else range(len(source.samples))

        def encoded(shard_range: range) -> Iterator[dict[str, Any]]:
            for batch in grouped(readable(source.samples, order, shard_range, call.skipped), batch_size):
                images = torch.stack([sample["image"] for _, sample in batch]).to(device)
                # The latent of a mirror image is not the mirrored latent, so both images are encoded.
                moments = [vae.moments(pictures).half().cpu() for pictures in (images, images.flip(-1))]
                for (number, sample), latent, flipped in zip(batch, *moments, strict=True):
                    members = {LATENT: array_bytes(latent), FLIPPED: array_bytes(flipped)}
                    yield {"__key__": sample_key(number), **members, "cls": str(sample["label"]).encode()}

        paths = call.fill(len(order), per_shard, encoded, f"encoding {prefix} shards")
    return paths, call.skipped.count


def open_source(name: str, target: Path, prefix: str, image_size: int, num_classes: int | None) -> LabelledSource:
    """Open labeled images, in a folder with one subfolder per class or in shards, to encode them.

    Args:
        name: path of the folder, or location of the shards.
        target: path of the folder to which latents will be written. If it already contains shards with a different prefix,
            images of a folder get the labels that those shards use for their classes.
        prefix: prefix of the shards to write.
        image_size: side in pixels of the square to which images are resized and cropped.
        num_classes: number of classes, larger than every label in shards; None for the number of class names that the shards
            list, if any. It is ignored for a folder with one subfolder per class.

    Returns:
        An object that holds the labeled images and a record of the files that contain them.

    Raises:
        FileNotFoundError: if there are no images.
        ValueError: if the folder has a class that shards with a different prefix in ``target`` do not have, or ``target`` is
            the folder of the images or shards, or is inside the folder of the images.
    """
    transform = SignedImage(image_size)
    if Path(name).is_dir() and not holds_shards(Path(name)):
        check_outside(target, [Path(name)])
        folder = LabelledFolder(name, transform, data_set_classes(target, prefix))
        order = np.random.default_rng(SHUFFLE_SEED).permutation(len(folder))  # else a shard would hold a single class
        folder.labelled = [folder.labelled[index] for index in order]
        return LabelledSource(folder, folder.origins(), True, folder.classes)
    check_not_the_source(target, Path(name))
    shards = find_shards(name)
    classes = shard_classes(shards)
    bound = num_classes if num_classes is not None else len(classes) if classes is not None else MOST_CLASSES
    images = ShardImages(ShardReader(shards), transform, bound)
    return LabelledSource(images, shard_origins(shards), False, classes)
