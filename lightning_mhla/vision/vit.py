"""Vision transformer: stem, position embedding, transformer blocks, mean pooling and classification head."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch
from timm.layers import PatchEmbed, register_notrace_module
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla import AttentionConfig, Backbone
from lightning_mhla.model.sizes import Shape, model_shape
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from lightning_mhla.vision.base import ImageCheck, VisionModel, taken_indices
from lightning_mhla.vision.preprocessing import Preprocessing

register_notrace_module(Backbone)

Size = Literal["tiny", "small", "base"]

SIZES: dict[str, Shape] = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}
"""Width, depth and number of heads of DeiT-T, DeiT-S and DeiT-B (arXiv 2012.12877, table 1)."""


class ConvStem(nn.Module):
    """Stem of two convolutions that converts small images to tokens, in place of the usual patch embedding.

    Args:
        channels: number of channels of the image.
        dim: width of a token.
        patch_size: side of the image patch that becomes one token, in pixels.
    """

    def __init__(self, channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        inner = dim // 2
        last = nn.Conv2d(inner, dim, 3, padding=1) if patch_size == 1 else nn.Conv2d(inner, dim, patch_size, patch_size)
        self.layers = nn.Sequential(nn.Conv2d(channels, inner, 3, padding=1), nn.GroupNorm(1, inner), nn.GELU(), last)

    def forward(self, images: Tensor) -> Tensor:
        """Compute tokens ``[B, (S / patch_size)^2, dim]`` from images ``[B, channels, S, S]`` of S x S pixels."""
        return self.layers(images).flatten(2).transpose(1, 2)


class VisionTransformer(
    VisionModel,
    library_name="lightning-mhla",
    coders={
        AttentionConfig: (asdict, lambda options: AttentionConfig(**options)),
        Preprocessing: (Preprocessing.as_dict, lambda options: Preprocessing(**options)),
    },
):
    """Vision transformer for image classification, with mean pooling of the tokens instead of a class token.

    ``save_pretrained(folder)`` writes the model as safetensors and ``config.json``, and
    ``VisionTransformer.from_pretrained(folder)`` loads it. The model also implements the methods of timm's models, such as
    ``forward_features``.

    Args:
        image_size: side of the square image, in pixels.
        num_classes: number of class scores; 0 for a model without a head.
        attention: configuration of the attention, see :class:`lightning_mhla.AttentionConfig`.
        size: published size of DeiT (tiny, small or base), which sets dim, depth and heads; None to set them individually.
        dim: width of the tokens; required if ``size`` is None, otherwise None.
        depth: number of transformer blocks; required if ``size`` is None, otherwise None.
        heads: number of attention heads; required if ``size`` is None, otherwise None.
        patch_size: side of a patch, in pixels.
        channels: number of channels of the image.
        stem: ``"patch"`` (one convolution of the size of a patch) or ``"conv"`` (:class:`ConvStem`).
        pad_to: side in pixels to which images are padded with zeros; None for no padding. The MHLA paper (arXiv 2601.07832)
            pads images from 224 to 256 pixels, so that 14 x 14 tokens become 16 x 16 and all attention blocks have equal size.
        mlp_ratio: inner width of the MLPs divided by the width of the tokens.
        drop_path: stochastic depth rate of the last block. The rate rises linearly from 0 in the first block.
        checkpointing: whether to recompute blocks in the backward pass instead of keeping their activations.
        global_pool: ``"avg"`` for the mean of the tokens, or an empty string to keep all tokens.
        class_names: names of the classes, for :meth:`predict`; None if unknown. Exported models contain them.
        preprocessing: transform of images, for :meth:`predict`; None if unknown. Exported models contain it.

    Raises:
        ValueError: if an option is out of range, or sizes do not fit together, for example if ``patch_size`` does not divide
            the side of the image.
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
        global_pool: str = "avg",
        class_names: list[str] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        super().__init__()
        attention = as_dataclass(AttentionConfig, attention)
        check_range(least=0, below=1, drop_path=drop_path)
        if stem not in ("patch", "conv"):
            raise ValueError(f"stem={stem!r} is not 'patch' or 'conv'")
        width, layers, number = model_shape(SIZES, size, dim, depth, heads)
        side = image_size if pad_to is None else pad_to
        if side < image_size or (side - image_size) % 2:
            raise ValueError(f"pad_to={pad_to} must exceed image_size={image_size} by an even number of pixels")
        if (side - image_size) // 2 > patch_size:
            raise ValueError(
                f"pad_to={pad_to} adds more than one patch of {patch_size} pixels to each side of images of "
                f"image_size={image_size}; give a smaller pad_to, or null"
            )
        if side % patch_size:
            raise ValueError(f"patch_size={patch_size} does not divide the image's side of {side} pixels")
        self.image_size, self.border, self.in_chans = image_size, (side - image_size) // 2, channels
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
        self.check = ImageCheck(self._check)
        self.patch_size, self.grid, self.num_features, self.head_hidden_size = patch_size, grid, width, width
        self.feature_info = [
            {"num_chs": width, "reduction": patch_size, "module": f"backbone.blocks.{index}"} for index in range(layers)
        ]
        nn.init.trunc_normal_(self.position, std=0.02)
        self.reset_classifier(num_classes, global_pool)
        self.describe(class_names, preprocessing)

    def _check(self, size: tuple[int, int]) -> None:
        if size != (self.image_size, self.image_size):
            raise ValueError(f"images of {size} pixels do not fit the model, which has image_size={self.image_size}")

    @property
    @override
    def layers(self) -> list[nn.Module]:
        return list(self.backbone.blocks)

    @override
    def forward_features(self, images: Tensor) -> Tensor:
        """Compute the final tokens of images ``[B, channels, image_size, image_size]``.

        Returns:
            Tokens ``[B, N, dim]``, with N tokens per image.

        Raises:
            ValueError: if the images do not have the size ``image_size``.
        """
        return self.backbone(self.stem(F.pad(self.check(images), (self.border,) * 4)) + self.position)

    @override
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = x.mean(1) if self.global_pool == "avg" else x
        return x if pre_logits else self.head(x)

    @override
    def maps(self, images: Tensor, map_indices: list[int], stop_early: bool, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """Compute the final tokens, and the feature maps after some of the transformer blocks.

        The maps omit tokens that consist only of the padding that ``pad_to`` adds.

        Args:
            images: images, ``[B, channels, image_size, image_size]``.
            map_indices: indices of the blocks whose maps are returned, counted from 0.
            stop_early: has no effect here, since all blocks run.
            norm: whether to apply the final norm to the maps.

        Returns:
            The final tokens, ``[B, N, dim]`` with N tokens per image, and the maps in the order of ``map_indices``,
            ``[B, dim, H, W]`` each, with H rows and W columns of tokens.
        """
        outputs: dict[int, Tensor] = {}
        hooks = [self.layers[index].register_forward_hook(partial(_keep, outputs, index)) for index in map_indices]
        try:
            features = self.forward_features(images)
        finally:
            for hook in hooks:
                hook.remove()
        maps = [self.backbone.norm(outputs[index]) if norm else outputs[index] for index in map_indices]
        if self.backbone.inverse is not None:  # inside the backbone tokens are in block order
            maps = [tokens.index_select(1, self.backbone.inverse) for tokens in maps]
        # Only tokens that consist of padding alone are left out.
        edge = self.border // self.patch_size
        inner = slice(edge, self.grid[0] - edge)
        return features, [tokens.transpose(1, 2).unflatten(-1, self.grid)[:, :, inner, inner] for tokens in maps]

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last requested one, and optionally the final norm and the head.

        Args:
            indices: indices of the requested blocks, where negative ones count from the end; or a number n for the last n
                blocks.
            prune_norm: whether to remove the final norm.
            prune_head: whether to remove pooling and head.

        Returns:
            Indices of the requested blocks, counted from 0.

        Raises:
            ValueError: if an index is out of range, or no block is requested.
        """
        block_indices = taken_indices(indices, len(self.layers))
        self.is_pruned = self.is_pruned or prune_norm or max(block_indices) + 1 < len(self.layers)
        self.backbone.blocks = self.backbone.blocks[: max(block_indices) + 1]
        self.feature_info = self.feature_info[: len(self.layers)]
        if prune_norm:
            self.backbone.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return block_indices

    @override
    def set_pool(self, kind: str) -> None:
        if kind not in ("avg", ""):
            raise ValueError(f"global_pool={kind!r} is not 'avg' or empty")
        self.global_pool = kind

    @property
    @override
    def pool_name(self) -> str:
        return self.global_pool

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable or disable activation checkpointing, which recomputes blocks in the backward pass to save memory."""
        self.backbone.checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameter names by depth, for timm's layer-wise learning rates.

        Args:
            coarse: has no effect here; part of timm's interface.

        Returns:
            A dict in the format of timm's ``group_with_matcher``: the entries ``"stem"`` and ``"blocks"`` hold regular
            expressions that match the names of parameters.
        """
        return {
            "stem": r"^stem|^position",
            "blocks": [(r"^backbone\.blocks\.(\d+)", None), (r"^backbone\.norm", (99999,))],
        }


def _keep(maps: dict[int, Tensor], index: int, module: nn.Module, inputs: object, output: Tensor) -> None:
    maps[index] = output
