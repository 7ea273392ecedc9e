"""Vision transformer on the shared backbone: stem, positions, mean pooling, head."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

import torch
from huggingface_hub import PyTorchModelHubMixin
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mhla import AttentionConfig, Backbone
from lightning_mhla.model.sizes import Shape, model_shape
from lightning_mhla.system.options import as_dataclass

Size = Literal["tiny", "small", "base"]

SIZES: dict[str, Shape] = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}
"""Width, depth and heads of DeiT-T, DeiT-S and DeiT-B (arXiv 2012.12877, table 1)."""


class ConvStem(nn.Module):
    """Two convolutions in place of the patch embedding, for images too small to be cut into patches.

    Args:
        channels: number of channels of the image.
        dim: width of a token.
        patch_size: pixels along the side of a token.
    """

    def __init__(self, channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        inner = dim // 2
        last = nn.Conv2d(inner, dim, 3, padding=1) if patch_size == 1 else nn.Conv2d(inner, dim, patch_size, patch_size)
        self.layers = nn.Sequential(nn.Conv2d(channels, inner, 3, padding=1), nn.GroupNorm(1, inner), nn.GELU(), last)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, channels, S, S]`` to tokens ``[B, (S / patch_size)^2, dim]``."""
        return self.layers(images).flatten(2).transpose(1, 2)


class VisionTransformer(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="lightning-mhla",
    coders={AttentionConfig: (asdict, lambda options: AttentionConfig(**options))},
):
    """Image to class scores, without a class token: the mean of all tokens goes to the head (as in the paper).

    ``save_pretrained(folder)`` and ``VisionTransformer.from_pretrained(folder)`` keep and load it: safetensors and
    ``config.json``.

    Args:
        image_size: side of the square image, in pixels.
        num_classes: scores that come out.
        attention: see :class:`lightning_mhla.AttentionConfig`.
        size: DeiT's tiny, small or base, for dim, depth and heads.
        dim: width of the tokens, without ``size``.
        depth: number of blocks, without ``size``.
        heads: attention heads, without ``size``.
        patch_size: side of a patch, in pixels.
        channels: number of channels of the image.
        stem: ``"patch"`` (one convolution of the patch's size) or ``"conv"`` (:class:`ConvStem`).
        pad_to: zero pixels are put around the image up to this side; None for none. The paper pads 224 to 256, so that
            14 x 14 tokens become 16 x 16 and blocks are equal.
        mlp_ratio: inner width of the MLP over the tokens'.
        drop_path: stochastic depth of the last block.
        checkpointing: recompute blocks in the backward pass.

    Raises:
        ValueError: for sizes that do not fit together.
    """

    def __init__(
        self,
        image_size: int,
        num_classes: int,
        attention: AttentionConfig,
        *,
        size: Size | None = None,
        dim: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        patch_size: int = 16,
        channels: int = 3,
        stem: Literal["patch", "conv"] = "patch",
        pad_to: int | None = None,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        attention = as_dataclass(AttentionConfig, attention)
        width, layers, number = model_shape(SIZES, size, dim, depth, heads)
        side = image_size if pad_to is None else pad_to
        if side < image_size or (side - image_size) % 2:
            raise ValueError(f"pad_to={pad_to} must exceed image_size={image_size} by an even number of pixels")
        if (side - image_size) // 2 > patch_size:
            raise ValueError(
                f"pad_to={pad_to} puts more than a patch of {patch_size} pixels around images of image_size={image_size}: it "
                "was meant for larger images; give another pad_to, or null"
            )
        if side % patch_size:
            raise ValueError(f"patch_size={patch_size} does not divide the image's side of {side} pixels")
        self.image_size, self.border = image_size, (side - image_size) // 2
        grid = (side // patch_size,) * 2
        self.stem: nn.Module = (
            ConvStem(channels, width, patch_size)
            if stem == "conv"
            else PatchEmbed(side, patch_size, channels, width, strict_img_size=True)
        )
        self.position = nn.Parameter(torch.empty(1, grid[0] * grid[1], width))
        self.backbone = Backbone(
            width,
            layers,
            number,
            grid,
            attention,
            mlp_ratio=mlp_ratio,
            drop_path=drop_path,
            checkpointing=checkpointing,
        )
        self.head = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.position, std=0.02)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, channels, image_size, image_size]`` to scores ``[B, num_classes]``."""
        if images.shape[-2:] != (self.image_size, self.image_size):
            size = self.image_size
            raise ValueError(f"images of {tuple(images.shape[-2:])} pixels for a model of image_size={size}")
        images = F.pad(images, (self.border,) * 4)
        return self.head(self.backbone(self.stem(images) + self.position).mean(1))
