"""Source of captioned images in shards and folders."""

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
    """Source of captioned images.

    Attributes:
        groups: number of the size of each image; None where there is one.

    Args:
        files: the images.
        sizes: height and width that images are brought to.
        batch_size: images that each of several sizes must have at least.
    """

    def __init__(self, files: CaptionedFiles, sizes: Sequence[Size], batch_size: int = 0) -> None:
        self.files, self.shard_sizes = files, files.shard_sizes
        self.transforms = [to_size(*size) for size in sizes]
        self.groups = sort_into_buckets(files, sizes, batch_size) if len(sizes) > 1 else None

    def __len__(self) -> int:
        """Number of images."""
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read ``image`` ``[3, H, W]`` in -1 .. 1, ``caption`` and ``index``."""
        text = self.files.caption(index)
        data = self.files.member(index, EXTENSIONS)[1]
        transform = self.transforms[0 if self.groups is None else self.groups[index]]
        image = transform(decode_image(data, self.files.describe(index)))
        return {"image": image, "caption": text, "index": index}


def to_size(height: int, width: int) -> v2.Compose:
    """Build a transform: scale an image to cover ``height x width``, crop the middle, ``[3, H, W]`` float32 in -1 .. 1."""

    def cover(image: Image.Image) -> Image.Image:
        scale = max(height / image.height, width / image.width)
        size = [max(height, round(image.height * scale)), max(width, round(image.width * scale))]
        return v2.functional.resize(image, size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)

    return v2.Compose(
        [cover, v2.CenterCrop((height, width)), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), _signed]
    )


def _signed(image: Tensor) -> Tensor:
    return image * 2 - 1
