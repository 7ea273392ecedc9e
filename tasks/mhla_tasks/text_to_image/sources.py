"""Map-style data set of captioned images in shards and folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from lightning_mhla.data.captioned import CaptionedFiles
from lightning_mhla.data.images import EXTENSIONS, decode_image
from mhla_tasks.text_to_image.buckets import Size, sort_into_buckets


class CaptionedImages:
    """Map-style data set of captioned images, each scaled and cropped to the available size with the nearest aspect ratio.

    Args:
        files: image files and their captions.
        sizes: height and width of each available size, in pixels.
        batch_size: minimum number of images of each size, so that each size fills a batch; ignored if there is only one size.

    Raises:
        ValueError: if there are several sizes, and one of them has fewer than ``batch_size`` images.

    Attributes:
        groups: index into ``sizes`` of each image's size, ``[n]`` int64; None if there is only one size.
    """

    def __init__(self, files: CaptionedFiles, sizes: Sequence[Size], batch_size: int = 0) -> None:
        self.files, self.shard_sizes = files, files.shard_sizes
        self.transforms = [to_size(*size) for size in sizes]
        self.groups = sort_into_buckets(files, sizes, batch_size) if len(sizes) > 1 else None

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample as a dict with ``image`` ``[3, H, W]`` float32 in -1 .. 1, ``caption`` and the given ``index``.

        Raises:
            BrokenSampleError: if the image cannot be decoded, or its caption is missing or not valid.
        """
        text = self.files.caption(index)
        data = self.files.member(index, EXTENSIONS)[1]
        transform = self.transforms[0 if self.groups is None else self.groups[index]]
        image = transform(decode_image(data, self.files.describe(index)))
        return {"image": image, "caption": text, "index": index}


def to_size(height: int, width: int) -> v2.Compose:
    """Build a transform that scales an image to cover a size, center-crops it, and converts it to a tensor.

    Args:
        height: height in pixels.
        width: width in pixels.

    Returns:
        Transform from a PIL image to a tensor ``[3, height, width]`` float32 in -1 .. 1.
    """

    def cover(image: Image.Image) -> Image.Image:
        scale = max(height / image.height, width / image.width)
        size = [max(height, round(image.height * scale)), max(width, round(image.width * scale))]
        return v2.functional.resize(image, size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)

    return v2.Compose(
        [cover, v2.CenterCrop((height, width)), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), _signed]
    )


def _signed(image: Tensor) -> Tensor:
    return image * 2 - 1
