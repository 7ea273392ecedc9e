"""Samples of the text-to-image domain: images with captions, of shards and folders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from lightning_mhla.data.captioned import CaptionedFiles
from lightning_mhla.data.images import EXTENSIONS, decode_image


class CaptionedImages:
    """Images with captions as a source.

    Args:
        files: the images.
        transform: image to ``[3, H, W]`` in -1 .. 1.
    """

    def __init__(self, files: CaptionedFiles, transform: Callable[[Image.Image], Tensor]) -> None:
        self.files, self.transform, self.shard_sizes = files, transform, files.shard_sizes

    def __len__(self) -> int:
        """Number of images."""
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``image`` as the transform gives it, ``caption`` and ``index``."""
        text = self.files.caption(index)
        data = self.files.member(index, EXTENSIONS)[1]
        return {
            "image": self.transform(decode_image(data, self.files.describe(index))),
            "caption": text,
            "index": index,
        }


def to_size(height: int, width: int) -> v2.Compose:
    """An image scaled until it covers ``height x width``, its middle cut out, as ``[3, H, W]`` float32 in -1 .. 1."""

    def cover(image: Image.Image) -> Image.Image:
        scale = max(height / image.height, width / image.width)
        size = [max(height, round(image.height * scale)), max(width, round(image.width * scale))]
        return v2.functional.resize(image, size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)

    return v2.Compose(
        [cover, v2.CenterCrop((height, width)), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), _signed]
    )


def _signed(image: Tensor) -> Tensor:
    return image * 2 - 1
