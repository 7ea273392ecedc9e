"""Data of the diffusion domain: the embedded digits, latents in shards, images in shards; and the samples to draw."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from lightning_mhla.data import BrokenSampleError, ResumableDataModule, SampleSource, ShardReader, ShardSets
from lightning_mhla.data.digits import DigitSamples
from lightning_mhla.data.images import labelled_images
from lightning_mhla.generative.codecs import draw_latents
from lightning_mhla.system.untrusted import read_json

log = logging.getLogger(__name__)

LATENT, FLIPPED = "latent.npy", "flip.npy"
"""Members of a latent sample: means and standard deviations of the image and of its mirror image."""


@dataclass(frozen=True)
class SampleRequest:
    """Samples that predict draws.

    Args:
        classes: labels to draw; null for all that the model knows.
        per_class: samples of each.
        seed: of the noise; sample i always starts from the same.
    """

    classes: list[int] | None = None
    per_class: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.per_class < 1:
            raise ValueError(f"per_class={self.per_class} must be at least 1")
        if self.classes is not None and not self.classes:
            raise ValueError("classes is empty; name labels, or null for all")


class RequestedSamples:
    """What predict draws, as a source: class by class in turn, so that any first part is balanced.

    Args:
        request: see :class:`SampleRequest`.
        num_classes: of the model.

    Raises:
        ValueError: for a class that the model does not know.
    """

    def __init__(self, request: SampleRequest, num_classes: int) -> None:
        self.classes = list(range(num_classes)) if request.classes is None else list(request.classes)
        for label in self.classes:
            if not 0 <= label < num_classes:
                raise ValueError(f"class {label} is not one of 0 to {num_classes - 1}; see samples.classes")
        self.count, self.seed = request.per_class * len(self.classes), request.seed
        self.shard_sizes: Sequence[int] = [self.count]

    def __len__(self) -> int:
        """Number of samples."""
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``index``, ``label`` and ``seed``."""
        return {"index": index, "label": self.classes[index % len(self.classes)], "seed": self.seed}


class ClassImages(ResumableDataModule):
    """Data of labelled images or latents; a domain of images implements :meth:`source` for training and validation.

    Args:
        batch_size: samples of a batch over all processes together.
        num_classes: labels lie below it.
        samples: what predict draws.
        num_workers: see :class:`ResumableDataModule`, as are all that follow.
        seed: see there.
        max_skipped: see there.
        shuffle_window: see there.
    """

    def __init__(
        self,
        batch_size: int,
        num_classes: int,
        samples: SampleRequest,
        num_workers: int = 0,
        seed: int | None = None,
        max_skipped: int = 100,
        shuffle_window: int | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, max_skipped, shuffle_window)
        self.num_classes = num_classes
        self.samples = SampleRequest(**samples) if isinstance(samples, dict) else samples

    def real_images(self, part: str) -> SampleSource:
        """Images of ``"train"`` or ``"validate"`` as they are, without mirror images, to compare samples with.

        Raises:
            ValueError: when the data are no images.
        """
        raise ValueError(
            "the data are latents, and FID compares images: set reference to a folder of images or to an .npz of reference "
            "statistics (VIRTUAL_imagenet256_labeled.npz of guided-diffusion, say)"
        )

    def requested(self) -> RequestedSamples:
        """What predict draws."""
        return RequestedSamples(self.samples, self.num_classes)


class DigitImages(ClassImages):
    """Handwritten digits of 8 x 8 grey pixels that ship with scikit-learn; 1,437 to train on, 360 held out.

    Args:
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process; 0 is fastest for images this small.
        samples: what predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
    """

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int = 0,
        samples: SampleRequest = SampleRequest(),
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, 10, samples, num_workers, seed)
        self.save_hyperparameters(ignore=["samples"])

    def source(self, stage: str) -> SampleSource:
        """See :meth:`ResumableDataModule.source`."""
        return self.requested() if stage == "predict" else self.real_images(stage)

    def real_images(self, part: str) -> SampleSource:
        """See :meth:`ClassImages.real_images`."""
        return DigitSamples(part == "train", _to_signed)


def _to_signed(image: Tensor) -> Tensor:
    return image * 2 - 1


class ShardData(ClassImages):
    """What data in shards share: where they are, and their tables.

    Args:
        train: shards to train on.
        val: shards to validate on.
        cache_dir: folder for downloaded shards and for member tables of read-only folders; null for the user's cache.
        options: as for :class:`ClassImages`.
    """

    def __init__(self, train: str | list[str], val: str | list[str], cache_dir: str | None, **options: Any) -> None:
        super().__init__(**options)
        self.shards = ShardSets(train, val, cache_dir)

    def prepare_data(self) -> None:
        """See :meth:`ShardSets.prepare`."""
        self.shards.prepare(self.trainer)


class ImageShards(ShardData):
    """Labelled images in WebDataset tar shards, NNN.jpg and NNN.cls; a model with a vae encodes them on the fly.

    Args:
        train: shards to train on: a folder, DIR/train-{0000..1023}.tar, a glob, URLs, or a list of these; or a folder that
            holds one folder of images for each class.
        val: shards to validate on, likewise.
        image_size: side of the square that is cut from the middle, after shrinking.
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process.
        num_classes: labels must lie below it.
        channels: 3, or 1 for grey images.
        flip: probability that a training image is mirrored.
        samples: what predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
        max_skipped: broken training samples that one process skips, with a warning each, before it stops.
        shuffle_window: shards whose samples are shuffled together; null shuffles everything with everything.
        cache_dir: folder for downloaded shards and for member tables of read-only folders; null for the user's cache.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        image_size: int = 256,
        batch_size: int = 256,
        num_workers: int = 8,
        num_classes: int = 1000,
        channels: int = 3,
        flip: float = 0.5,
        samples: SampleRequest = SampleRequest(),
        seed: int | None = None,
        max_skipped: int = 100,
        shuffle_window: int | None = 16,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            train,
            val,
            cache_dir,
            batch_size=batch_size,
            num_classes=num_classes,
            samples=samples,
            num_workers=num_workers,
            seed=seed,
            max_skipped=max_skipped,
            shuffle_window=shuffle_window,
        )
        self.save_hyperparameters(ignore=["samples"])
        if channels not in (1, 3):
            raise ValueError(f"channels={channels} must be 3, or 1 for grey images")
        self.image_size, self.flip, self.channels = image_size, flip, channels

    def source(self, stage: str) -> SampleSource:
        """See :meth:`ResumableDataModule.source`."""
        if stage == "predict":
            return self.requested()
        flip = self.flip if stage == "train" else 0.0
        return self._images(stage, flip)

    def real_images(self, part: str) -> SampleSource:
        """See :meth:`ClassImages.real_images`."""
        return self._images(part, 0.0)

    def _images(self, stage: str, flip: float) -> SampleSource:
        transform = SignedImage(self.image_size, flip, self.channels)
        return labelled_images(self.shards, stage, transform, self.num_classes)


class SignedImage:
    """Image to tensor ``[C, S, S]`` in -1 .. 1: shrunk until its shorter side is S, the middle cut out, maybe mirrored.

    Args:
        size: S.
        flip: probability of a mirror image.
        channels: C, 3 or 1 (grey).
    """

    def __init__(self, size: int, flip: float = 0.0, channels: int = 3) -> None:
        self.size, self.flip, self.mode = size, flip, "RGB" if channels == 3 else "L"

    def __call__(self, image: Image.Image) -> Tensor:
        """The tensor of one image."""
        image = shrink(image.convert(self.mode), self.size)
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        image = image.crop((left, top, left + self.size, top + self.size))
        pixels = v2.functional.pil_to_tensor(image).float() / 127.5 - 1
        return pixels.flip(-1) if self.flip and float(torch.rand(())) < self.flip else pixels


def shrink(image: Image.Image, size: int) -> Image.Image:
    """Image whose shorter side is ``size``: halved by boxes while twice as large, then bicubic (ADM's preprocessing)."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    factor = size / min(image.size)
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


class LatentShards(ShardData):
    """Latents in WebDataset tar shards, as ``python -m mhla_tasks.diffusion.encode`` writes them: no VAE while training.

    A latent is drawn from the stored posterior of the image, or of its mirror image, each time anew.

    Args:
        train: shards to train on: a folder, DIR/train-{00000..01281}.tar, a glob, or a list of these.
        val: shards to validate on, likewise.
        sample_size: side of the latents.
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process.
        num_classes: labels must lie below it.
        flip: probability that the latent of the mirror image is taken in training.
        samples: what predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
        max_skipped: broken training samples that one process skips, with a warning each, before it stops.
        shuffle_window: shards whose samples are shuffled together; null shuffles everything with everything.
        cache_dir: folder for member tables of read-only folders; null for the user's cache.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        sample_size: int = 32,
        batch_size: int = 256,
        num_workers: int = 4,
        num_classes: int = 1000,
        flip: float = 0.5,
        samples: SampleRequest = SampleRequest(),
        seed: int | None = None,
        max_skipped: int = 100,
        shuffle_window: int | None = 16,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            train,
            val,
            cache_dir,
            batch_size=batch_size,
            num_classes=num_classes,
            samples=samples,
            num_workers=num_workers,
            seed=seed,
            max_skipped=max_skipped,
            shuffle_window=shuffle_window,
        )
        self.save_hyperparameters(ignore=["samples"])
        self.sample_size, self.flip = sample_size, flip

    def source(self, stage: str) -> SampleSource:
        """See :meth:`ResumableDataModule.source`."""
        if stage == "predict":
            return self.requested()
        flip = self.flip if stage == "train" else 0.0
        return LatentSamples(self.shards.reader(stage), self.sample_size, self.num_classes, flip)


class LatentSamples:
    """Latents of shards as a source.

    Args:
        reader: the shards.
        sample_size: side that the latents must have.
        num_classes: labels must lie below it.
        flip: probability of the mirror image's latent.

    Raises:
        ValueError: when the shards hold latents of another size, or none.
    """

    def __init__(self, reader: ShardReader, sample_size: int, num_classes: int, flip: float) -> None:
        self.reader, self.sample_size, self.num_classes, self.flip = reader, sample_size, num_classes, flip
        self.shard_sizes: Sequence[int] = reader.shard_sizes
        self.scale = latent_scale(reader)
        if not 0 <= flip <= 1:
            raise ValueError(f"flip={flip} must lie between 0 and 1")
        if len(reader):
            side = self._moments(0, LATENT).shape[-1]
            if side != sample_size:
                raise ValueError(
                    f"{reader.describe(0)}: latents of {side} x {side} for a model of {sample_size} x {sample_size}; set "
                    f"--data.init_args.sample_size={side} and --model.init_args.sample_size={side}, or encode images of "
                    "another size"
                )

    def __len__(self) -> int:
        """Number of latents."""
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``latent`` ``[C, S, S]`` float32, scaled; ``label`` and ``index``."""
        mirrored = self.flip > 0 and float(torch.rand(())) < self.flip
        moments = torch.from_numpy(self._moments(index, FLIPPED if mirrored else LATENT))
        if moments.shape[-2:] != (self.sample_size, self.sample_size):
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: a latent of {tuple(moments.shape[-2:])} among those of {self.sample_size}"
            )
        return {
            "latent": draw_latents(moments, self.scale),
            "label": self.reader.label(index, self.num_classes),
            "index": index,
        }

    def _moments(self, index: int, member: str) -> np.ndarray:
        moments = self.reader.array(index, member)
        if moments.ndim != 3 or moments.shape[0] % 2:
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: .{member} is {moments.shape}, not means and deviations [2 C, S, S]"
            )
        return moments


def _prefix(shard: Path) -> Path:
    return shard.parent / shard.stem.rpartition("-")[0]


def latent_scale(reader: ShardReader) -> float:
    """The factor that the shards' manifest names for their latents.

    Raises:
        FileNotFoundError: when there is no manifest beside the shards.
        ValueError: when shards have different factors, or hold no latents.
    """
    scales = set()
    for prefix in sorted({_prefix(path) for path in reader.shards}):
        manifest = prefix.with_name(prefix.name + "-manifest.json")
        if not manifest.is_file():
            raise FileNotFoundError(
                f"{manifest} is missing: it says how the latents are scaled; copy it along with the shards that "
                "python -m mhla_tasks.diffusion.encode wrote"
            )
        content = read_json(manifest)
        if "scale" not in content:
            raise ValueError(
                f"{manifest} is not of latents: encode the shards first, with python -m mhla_tasks.diffusion.encode, or "
                "train on images with ImageShards and --model.init_args.vae"
            )
        scale, samples = content["scale"], content.get("samples")
        if not isinstance(scale, int | float) or not math.isfinite(scale) or scale <= 0 or not isinstance(samples, int):
            raise ValueError(
                f"{manifest} gives scale {str(scale)[:40]} and samples {str(samples)[:40]}, no such numbers"
            )
        scales.add(float(scale))
        here = sum(
            size for path, size in zip(reader.shards, reader.shard_sizes, strict=True) if _prefix(path) == prefix
        )
        if here != samples:
            log.warning("%s: %d of %d latents are here", prefix, here, samples)
    if len(scales) > 1:
        raise ValueError(f"the shards hold latents of different scales, {sorted(scales)}: they are of different VAEs")
    return scales.pop() if scales else 1.0
