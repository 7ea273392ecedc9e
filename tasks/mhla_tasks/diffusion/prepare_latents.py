"""Latent shards of images, encoded by a diffusers VAE: what ``lightning prepare latents`` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_mhla.data import SampleSource, ShardReader, find_shards
from lightning_mhla.data.classes import data_set_classes, write_classes
from lightning_mhla.data.images import CLASSES, LabelledFolder, ShardImages, shard_classes
from lightning_mhla.data.origins import Origin, sample_key, shard_origins
from lightning_mhla.data.shards import holds_shards
from lightning_mhla.data.write import Preparation, array_bytes, grouped, readable
from lightning_mhla.generative.codecs import LatentCodec
from mhla_tasks.diffusion.sources import FLIPPED, LATENT, SignedImage

SHUFFLE_SEED = 0
"""Seed of the order in which images of a folder are encoded."""

MOST_CLASSES = 1 << 30
"""Bound of the labels of shards that do not name their classes."""


@dataclass(frozen=True)
class LabelledSource:
    """Images to encode, and what they are made from.

    Attributes:
        samples: give ``image`` ``[3, S, S]`` in -1 .. 1 and ``label``.
        origins: of each image, or of the shards that hold them.
        per_sample: whether each image has an origin of its own.
        classes: names of the classes; None where they are not known.
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
    """Write ``target/prefix-00000.tar`` and so on; the shards of this process of ``share``, rank and number.

    Args:
        source: the images.
        target: made if missing.
        vae: encodes.
        prefix: prefix of the file names.
        per_shard: latents in a shard; it holds fewer where some images are broken.
        batch_size: images encoded at once.
        device: device of the encoder.
        image_size: S.
        max_skipped: broken images that this process skips before it stops.
        share: index and number of the parts that the shards are divided into.
        force: delete the shards of an earlier call first.

    Returns:
        Paths of all shards, of every process, and how many images this one skipped.

    Raises:
        ValueError: if the folder holds shards of images that have changed since, or made with other options.
        BrokenSampleError: if more images are broken than ``max_skipped``.
    """
    options = {"per_shard": per_shard, "image_size": image_size, "vae": vae.path, "scale": vae.scale(device)}
    with Preparation(
        target, prefix, options, source.origins, per_shard if source.per_sample else None, max_skipped, force, share
    ) as call:
        order = call.order if source.per_sample else range(len(source.samples))
        if source.classes is not None and share[0] == 0:
            write_classes(target / f"{prefix}-{CLASSES}", source.classes)

        def encoded(here: range) -> Iterator[dict[str, Any]]:
            for few in grouped(readable(source.samples, order, here, call.skipped), batch_size):
                images = torch.stack([sample["image"] for _, sample in few]).to(device)
                both = [vae.moments(pictures).half().cpu() for pictures in (images, images.flip(-1))]
                for (number, sample), latent, flipped in zip(few, *both, strict=True):
                    members = {LATENT: array_bytes(latent), FLIPPED: array_bytes(flipped)}
                    yield {"__key__": sample_key(number), **members, "cls": str(sample["label"]).encode()}

        paths = call.fill(len(order), per_shard, encoded, f"encoding {prefix} shards")
    return paths, call.skipped.count


def open_source(name: str, target: Path, prefix: str, image_size: int, num_classes: int | None) -> LabelledSource:
    """The images of a folder, labelled like the shards of other prefixes in ``target``, or those of shards.

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if a folder has a class that those shards do not have.
    """
    transform = SignedImage(image_size)
    if Path(name).is_dir() and not holds_shards(Path(name)):
        folder = LabelledFolder(name, transform, data_set_classes(target, prefix))
        order = np.random.default_rng(SHUFFLE_SEED).permutation(len(folder))  # or a shard would hold one class
        folder.labelled = [folder.labelled[index] for index in order]
        return LabelledSource(folder, folder.origins(), True, folder.classes)
    shards = find_shards(name)
    classes = shard_classes(shards)
    bound = num_classes if num_classes is not None else len(classes) if classes is not None else MOST_CLASSES
    images = ShardImages(ShardReader(shards), transform, bound)
    return LabelledSource(images, shard_origins(shards), False, classes)
