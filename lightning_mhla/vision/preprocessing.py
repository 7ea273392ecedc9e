"""Image preprocessing of a classifier, with options that are stored beside the weights of the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of red, green and blue in ImageNet's images, for pixels in [0, 1] (timm's defaults)."""


@dataclass(frozen=True)
class Preprocessing:
    """Deterministic transform from an image to the input of a classifier, for validation and prediction.

    Args:
        image_size: height and width of the result, in pixels.
        channels: number of channels of the result: 3 for color, 1 for gray.
        crop_share: side of the central crop divided by the side of the resized image. null resizes the complete image to a
            square instead, without keeping its aspect ratio.
        mean: values to subtract from pixels in [0, 1]: three for red, green and blue, or a single one for all channels.
        std: values by which the pixels are divided after the subtraction: three for red, green and blue, or a single one for
            all channels.

    Raises:
        ValueError: if a value is out of range, or if ``mean`` or ``std`` has a wrong number of values.
    """

    image_size: int
    channels: int = 3
    crop_share: float | None = 0.9
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # values read from JSON are lists
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) not in (1, 3):
                raise ValueError(f"{name}={list(values)} must have one value for each of 3 colors, or a single one")
        if self.image_size < 1:
            raise ValueError(f"image_size={self.image_size} must be at least 1")
        if self.channels not in (1, 3):
            raise ValueError(f"channels={self.channels} must be 3, or 1 for grayscale images")
        if self.mode == "L" and len(self.mean) + len(self.std) > 2:
            raise ValueError(
                f"mean={list(self.mean)} and std={list(self.std)} must have one value each for gray images (channels=1 and "
                "crop_share=None)"
            )
        if self.crop_share is not None and not 0 < self.crop_share <= 1:
            raise ValueError(f"crop_share={self.crop_share} must be above 0 and at most 1, which crops nothing")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std={list(self.std)} must be positive, because pixels are divided by it")

    @cached_property
    def _transform(self) -> Any:
        from timm import data as timm_data  # not at the top, since it imports all of timm's models

        transform = timm_data.create_transform(
            self.image_size, crop_pct=self.crop_share, interpolation="bicubic", mean=self.mean, std=self.std
        )
        return transform if self.channels == 3 else v2.Compose([transform, _to_grey])

    def __call__(self, image: Image.Image) -> Tensor:
        """Transform an image to a float32 tensor ``[channels, image_size, image_size]``.

        Args:
            image: image in the Pillow mode :attr:`mode`.
        """
        if self.crop_share is not None:
            tensor: Tensor = self._transform(image)
            return tensor
        side = (self.image_size, self.image_size)
        resize = v2.Resize(side, interpolation=v2.InterpolationMode.BOX, antialias=True)
        pixels = v2.functional.to_dtype(v2.functional.pil_to_tensor(resize(image)), torch.float32, scale=True)
        return v2.functional.normalize(pixels, list(self.mean), list(self.std))

    @property
    def mode(self) -> str:
        """Pillow mode of the input images: ``"L"`` if ``channels`` is 1 and ``crop_share`` is None, otherwise ``"RGB"``."""
        return "L" if self.crop_share is None and self.channels == 1 else "RGB"

    def as_dict(self) -> dict[str, Any]:
        """Return the options as numbers, lists and None, for JSON and checkpoints."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def _to_grey(image: Tensor) -> Tensor:
    return image.mean(0, keepdim=True)
