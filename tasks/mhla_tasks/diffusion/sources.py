"""Samples for class-to-image diffusion: a transform that scales images to -1 .. 1, and a data set of latents in shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from lightning_mhla.data import BrokenSampleError, ShardReader
from lightning_mhla.data.shards import beside_shard
from lightning_mhla.generative.codecs import draw_latents
from lightning_mhla.system.untrusted import read_json

log = logging.getLogger(__name__)

LATENT, FLIPPED = "latent.npy", "flip.npy"
"""Shard members of a latent sample: means and standard deviations for the image and for its mirror image."""


class SignedImage:
    """Transform that converts an image to a square float32 tensor ``[C, S, S]`` in -1 .. 1.

    The image is resized so that its shorter side is S, cropped to its central square, and randomly mirrored.

    Args:
        size: side S in pixels.
        flip: probability of mirroring the image horizontally.
        channels: number of channels C: 3, or 1 for gray.
    """

    def __init__(self, size: int, flip: float = 0.0, channels: int = 3) -> None:
        self.size, self.flip, self.mode = size, flip, "RGB" if channels == 3 else "L"

    def __call__(self, image: Image.Image) -> Tensor:
        """Convert one image to a square float32 tensor ``[C, S, S]`` in -1 .. 1."""
        image = shrink(image.convert(self.mode), self.size)
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        image = image.crop((left, top, left + self.size, top + self.size))
        pixels = v2.functional.pil_to_tensor(image).float() / 127.5 - 1
        return pixels.flip(-1) if self.flip and float(torch.rand(())) < self.flip else pixels


def shrink(image: Image.Image, size: int) -> Image.Image:
    """Resize an image so that its shorter side has a given length, as in the preprocessing of ADM (arXiv 2105.05233).

    While the shorter side is at least twice as long as required, a box filter halves the image. Bicubic interpolation then
    resizes the image to the required size.

    Args:
        image: Pillow image.
        size: length of the shorter side of the result, in pixels.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    factor = size / min(image.size)
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


class LatentSamples:
    """Map-style data set of VAE latents and class labels in shards.

    The shards store the mean and the standard deviation of each latent. Each access draws a new latent from this normal
    distribution.

    Args:
        reader: reader of the shards.
        sample_size: required side of the latents, in latent pixels.
        num_classes: number of classes of the data set, larger than every label.
        flip: probability that a sample is the latent of the mirrored image.
        labels: label in the data set for each label in the shards, so that label 3 of a shard becomes ``labels[3]``; None to
            keep the labels of the shards.

    Raises:
        ValueError: if the shards hold latents of a different size or no latents, or their manifest does not state a valid
            factor by which to multiply them.
        FileNotFoundError: if the manifest of the shards is missing.
    """

    def __init__(
        self, reader: ShardReader, sample_size: int, num_classes: int, flip: float, labels: Sequence[int] | None
    ) -> None:
        self.labels = labels
        self.reader, self.sample_size, self.num_classes, self.flip = reader, sample_size, num_classes, flip
        self.shard_sizes: Sequence[int] = reader.shard_sizes
        self.scale = latent_scale(reader)
        readable = reader.first_readable(lambda index: self._moments(index, LATENT).shape[-1])
        if readable is not None:
            index, side = readable
            if side != sample_size:
                raise ValueError(
                    f"{reader.describe(index)}: the latents are {side} x {side}, the model expects {sample_size} x "
                    f"{sample_size}; set --data.sample_size={side} and --model.sample_size={side}, or encode images of a "
                    "different size"
                )

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Draw the latent of one sample, and return it with the label of the sample.

        Returns:
            A dict with the ``latent`` ``[C, S, S]`` float32, multiplied by the factor in the manifest of the shards, the class
            ``label``, and the given ``index``.

        Raises:
            BrokenSampleError: if the latent or the label is missing or invalid.
        """
        mirrored = self.flip > 0 and float(torch.rand(())) < self.flip
        moments = torch.from_numpy(self._moments(index, FLIPPED if mirrored else LATENT))
        if moments.shape[-2:] != (self.sample_size, self.sample_size):
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: the latent has sides {tuple(moments.shape[-2:])}, others {self.sample_size}"
            )
        return {
            "latent": draw_latents(moments, self.scale),
            "label": self.reader.label(index, self.num_classes, self.labels),
            "index": index,
        }

    def _moments(self, index: int, member: str) -> np.ndarray:
        moments = self.reader.array(index, member)
        if moments.ndim != 3 or moments.shape[0] % 2:
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: .{member} is {moments.shape}, not means and deviations [2 C, S, S]"
            )
        return moments


def latent_scale(reader: ShardReader) -> float:
    """Return the factor by which latents are multiplied for training, as recorded in the manifests of their shards.

    Args:
        reader: reader of the shards.

    Returns:
        The factor; 1 if there are no shards.

    Raises:
        FileNotFoundError: if a folder of shards has no manifest.
        ValueError: if the shards have different factors, or a factor is missing or not a positive number.
    """
    scales = set()
    for manifest in sorted({beside_shard(path, "manifest.json") for path in reader.shards}):
        if not manifest.is_file():
            raise FileNotFoundError(
                f"{manifest} is missing: it says how the latents are scaled; copy it along with the shards that "
                "lightning prepare latents wrote"
            )
        content = read_json(manifest)
        if "scale" not in content:
            raise ValueError(
                f"{manifest} does not describe latents: encode the shards first (lightning prepare latents), or "
                "train on images with ImageShards and --model.vae"
            )
        scale, samples, per_shard = content["scale"], content.get("samples"), content.get("per_shard")
        if type(scale) not in (int, float) or not math.isfinite(scale) or scale <= 0:
            raise ValueError(f"{manifest} gives scale {str(scale)[:40]}, which is not a positive number")
        scales.add(float(scale))
        if isinstance(samples, int) and isinstance(per_shard, int) and per_shard > 0:
            present = sum(beside_shard(path, "manifest.json") == manifest for path in reader.shards)
            expected = -(-samples // per_shard)
            if present != expected:
                log.warning(
                    "%s: found %d of %d shards", str(manifest).removesuffix("-manifest.json"), present, expected
                )
    if len(scales) > 1:
        raise ValueError(
            f"the shards hold latents with different scales, {sorted(scales)}: they come from different VAEs"
        )
    return scales.pop() if scales else 1.0
