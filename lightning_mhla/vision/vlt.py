"""Hierarchical vision transformer (VLT) of the RALA paper (arXiv 2411.07635), with a configurable kind of attention."""

# Longer than other modules because it contains the complete model.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from timm.layers import DropPath, SelectAdaptivePool2d, register_notrace_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout, build_attention
from lightning_mhla.model.sizes import both_sides
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from lightning_mhla.vision.base import ImageCheck, VisionModel, taken_indices
from lightning_mhla.vision.preprocessing import Preprocessing
from lightning_mhla.vision.stages import StageConfig

EPS = 1e-6
"""Epsilon of the layer norms."""


@register_notrace_module
class MapAttention(nn.Module):
    """Attention over the positions of a feature map of any size.

    For kinds of attention that use blocks, ``config.block_grid`` is the number of blocks along each axis of the map, regardless
    of its size. If ``block_grid`` is None, the map is a single block. Blocks have different sizes if the map cannot be divided
    evenly.

    Args:
        dim: number of channels of the map.
        heads: number of attention heads.
        grid: numbers of rows and columns for which the layer is built. The layer adapts to maps of a different size when it
            receives them.
        config: configuration of the attention, see :class:`lightning_mhla.AttentionConfig`.
    """

    def __init__(self, dim: int, heads: int, grid: tuple[int, int], config: AttentionConfig) -> None:
        super().__init__()
        self.blocks = tuple(config.block_grid or (1, 1))
        self.attn: Attention = build_attention(config, dim, heads, BlockLayout(grid, self.blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention to feature maps ``[B, H, W, dim]``; the output has the same shape."""
        grid = (x.shape[1], x.shape[2])
        if grid != self.attn.layout.grid:
            self.attn.fit(BlockLayout(grid, self.blocks), x.device)
        return self.attn(x.flatten(1, 2)).unflatten(1, grid)


class ConvMlp(nn.Module):
    """MLP of two linear layers over feature maps, with a residual depthwise 3 x 3 convolution between them.

    Args:
        dim: number of channels of the map.
        inner: number of channels between the linear layers.
    """

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.act = nn.GELU()
        self.conv = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.fc2 = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to feature maps ``[B, H, W, dim]``; the output has the same shape."""
        x = self.act(self.fc1(x))
        return self.fc2(x + _convolved(self.conv, x))


class VLTBlock(nn.Module):
    """Block of a hierarchical vision transformer: positional convolution, attention and MLP, each with a residual connection.

    Attention and MLP each have a layer norm before them, and a learned factor for each channel of their output.

    Args:
        dim: number of channels of the map.
        heads: number of attention heads.
        grid: numbers of rows and columns of the map.
        attention: configuration of the attention, see :class:`lightning_mhla.AttentionConfig`.
        mlp_ratio: inner width of the MLP divided by ``dim``.
        layer_scale: initial value of the learned factors.
        drop_path: probability that a sample skips the attention in training, and independently that it skips the MLP.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        grid: tuple[int, int],
        attention: AttentionConfig,
        mlp_ratio: float,
        layer_scale: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.position = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim, EPS), nn.LayerNorm(dim, EPS)
        self.mixer = MapAttention(dim, heads, grid, attention)
        self.mlp = ConvMlp(dim, int(dim * mlp_ratio))
        self.scale1, self.scale2 = (nn.Parameter(torch.full((dim,), layer_scale)) for _ in range(2))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to feature maps ``[B, H, W, dim]``; the output has the same shape."""
        x = x + _convolved(self.position, x)
        x = x + self.drop_path(self.scale1 * self.mixer(self.norm1(x)))
        return x + self.drop_path(self.scale2 * self.mlp(self.norm2(x)))


class Stage(nn.Module):
    """Stage of a hierarchical vision transformer (VLT): a sequence of blocks at one resolution.

    In all stages but the first, a convolution before the blocks halves height and width.

    Args:
        in_dim: number of channels of the input; None for the first stage, which has no convolution.
        dim: number of channels in the blocks.
        blocks: blocks of the stage, in order.
    """

    def __init__(self, in_dim: int | None, dim: int, blocks: Sequence[VLTBlock]) -> None:
        super().__init__()
        self.downsample = (
            nn.Identity() if in_dim is None else nn.Sequential(nn.Conv2d(in_dim, dim, 3, 2, 1), nn.BatchNorm2d(dim))
        )
        self.blocks = nn.ModuleList(blocks)
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the stage to feature maps ``[B, C, H, W]`` with C channels and H x W positions.

        Returns:
            Feature maps ``[B, dim, H / 2, W / 2]``, or ``[B, dim, H, W]`` in the first stage.
        """
        # The blocks take channels last, for their linear layers.
        x = self.downsample(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = cast(Tensor, checkpoint(block, x, use_reentrant=False))
            else:
                x = block(x)
        return x.permute(0, 3, 1, 2)


class VLT(
    VisionModel,
    library_name="lightning-mhla",
    coders={
        AttentionConfig: (asdict, lambda options: AttentionConfig(**options)),
        StageConfig: (asdict, lambda options: StageConfig(**options)),
        Preprocessing: (Preprocessing.as_dict, lambda options: Preprocessing(**options)),
    },
):
    """Hierarchical vision transformer for classification, such as RAVLT (attention kind rala) or MHLA-VLT (kind mhla).

    The model consists of a stem of four convolutions, several stages, a projection, pooling and the head. Each stage after
    the first halves the resolution. A block has a positional convolution, attention and a convolutional MLP.

    MHLA-VLT (arXiv 2601.07832) is RAVLT (arXiv 2411.07635) with MHLA instead of RALA, the attention of RAVLT. The MHLA paper
    does not say which parts of RALA its model keeps, so each part is an option of ``attention``. To keep all parts, set
    ``lepe: 5``, ``rotary: true`` with ``normalize_before_rotary: true``, ``gate: true`` with ``gate_activation: identity``,
    ``feature_map: elu``, and ``key_weighting: true``.

    Images may have any size that the stages can divide into tokens. The number of attention blocks and the shape of the mixing
    coefficients do not depend on this size. ``save_pretrained(folder)`` writes the model as safetensors and ``config.json``,
    and ``VLT.from_pretrained(folder)`` loads it. The model also implements the methods of timm's models.

    Args:
        image_size: side of the square images, or height and width, in pixels, for which the model is built. It also accepts
            images of different sizes.
        num_classes: number of class scores; 0 for a model without a head.
        attention: configuration of the attention in the first ``stages.linear_stages`` stages, see
            :class:`lightning_mhla.AttentionConfig`. Later stages use softmax attention with the other options unchanged.
        stages: sizes of the stages, see :class:`StageConfig`.
        channels: number of channels of the image.
        drop_path: stochastic depth rate of the last block. The rate rises linearly from 0 in the first block.
        checkpointing: whether to recompute blocks in the backward pass instead of keeping their activations.
        global_pool: name of timm's pooling layer, ``"avg"``, ``"max"``, ``"avgmax"`` or ``"fast"``; an empty string for no
            pooling, which needs ``num_classes=0``.
        class_names: names of the classes, for :meth:`predict`; None if unknown. Exported models contain them.
        preprocessing: transform of images, for :meth:`predict`; None if unknown. Exported models contain it.

    Raises:
        ValueError: if an option is out of range, or sizes do not fit together, for example if the stages cannot divide the
            image into tokens.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int],
        num_classes: int,
        attention: AttentionConfig,
        stages: StageConfig,
        *,
        channels: int = 3,
        drop_path: float = 0.0,
        checkpointing: bool = False,
        global_pool: str = "avg",
        class_names: list[str] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        super().__init__()
        attention, stages = as_dataclass(AttentionConfig, attention), as_dataclass(StageConfig, stages)
        check_range(least=0, below=1, drop_path=drop_path)
        self.in_chans = channels
        dims, depths, heads, scales = (stages.of(name) for name in ("dims", "depths", "heads", "layer_scale"))
        grids = stages.grids(both_sides("image_size", image_size))
        # On the CPU, because a model that is built on the meta device has no values to read.
        rates = torch.linspace(0, drop_path, sum(depths), device="cpu").tolist()
        self.stem = nn.Sequential(ImageCheck(stages.grids), *_stem(channels, dims[0], stages.patch_size))
        self.stages = nn.Sequential()
        for index, (dim, depth, number, scale) in enumerate(zip(dims, depths, heads, scales, strict=True)):
            stage_attention = stages.attention(attention, index)
            try:
                blocks = [
                    VLTBlock(
                        dim,
                        number,
                        grids[index],
                        stage_attention.at_layer(sum(depths[:index]) + block),
                        stages.mlp_ratio,
                        scale,
                        rates.pop(0),
                    )
                    for block in range(depth)
                ]
            except ValueError as error:
                raise ValueError(f"stage {index + 1}: {error}") from error
            self.stages.append(Stage(dims[index - 1] if index else None, dim, blocks))
        self.num_features, self.head_hidden_size = dims[-1], stages.head_width
        self.feature_info = [
            {"num_chs": dim, "reduction": stages.patch_size * 2**index, "module": f"stages.{index}"}
            for index, dim in enumerate(dims)
        ]
        self.proj: nn.Module = nn.Conv2d(dims[-1], stages.head_width, 1)
        self.norm: nn.Module = nn.BatchNorm2d(stages.head_width)
        self.act: nn.Module = nn.SiLU()
        self.apply(_initialize)
        self.reset_classifier(num_classes, global_pool)
        self.set_grad_checkpointing(checkpointing)
        self.describe(class_names, preprocessing)

    @property
    @override
    def layers(self) -> list[nn.Module]:
        return [block for stage in self.stages for block in cast(Stage, stage).blocks]

    @override
    def forward_features(self, images: Tensor) -> Tensor:
        """Compute the last stage's feature map of images ``[B, channels, H, W]``.

        Returns:
            Feature map ``[B, C, h, w]`` with C channels and h x w positions.

        Raises:
            ValueError: if the stages cannot divide images of this size into tokens.
        """
        return self.stages(self.stem(images))

    @override
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.global_pool(self.act(self.norm(self.proj(x))))
        return x if pre_logits else self.head(x)

    @override
    def maps(self, images: Tensor, map_indices: list[int], stop_early: bool, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """Compute the final features, and the feature maps after some of the stages.

        Args:
            images: images, ``[B, channels, H, W]``.
            map_indices: indices of the stages whose maps are returned, counted from 0.
            stop_early: whether to skip the stages after the last requested one. The returned features are then the map of that
                stage.
            norm: has no effect here, since no norm follows a stage.

        Returns:
            The map of the last stage that ran, and the requested maps in the order of ``map_indices``, ``[B, C, h, w]`` each,
            with C channels and h x w positions.
        """
        x, outputs = self.stem(images), []
        for index, stage in enumerate(self.stages):
            if stop_early and index > max(map_indices):
                break
            x = stage(x)
            outputs.append(x)
        return x, [outputs[index] for index in map_indices]

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last requested one, and optionally the head.

        Args:
            indices: indices of the requested stages, where negative ones count from the end; or a number n for the last n
                stages.
            prune_norm: has no effect here, since no norm follows a stage.
            prune_head: whether to remove projection, pooling and head, which only fit the map of the original last stage.

        Returns:
            Indices of the requested stages, counted from 0.

        Raises:
            ValueError: if an index is out of range, or no stage is requested.
        """
        stage_indices = taken_indices(indices, len(self.stages))
        self.is_pruned = self.is_pruned or prune_head or max(stage_indices) + 1 < len(self.stages)
        self.stages = self.stages[: max(stage_indices) + 1]
        self.feature_info = self.feature_info[: len(self.stages)]
        if prune_head:
            self.num_features = self.head_hidden_size = self.feature_info[max(stage_indices)]["num_chs"]
            self.proj, self.norm, self.act = nn.Identity(), nn.Identity(), nn.Identity()
            self.reset_classifier(0, "")
        return stage_indices

    @override
    def set_pool(self, kind: str) -> None:
        if kind not in ("avg", "max", "avgmax", "fast", ""):
            raise ValueError(f"global_pool={kind!r} is not 'avg', 'max', 'avgmax', 'fast' or empty")
        self.global_pool = SelectAdaptivePool2d(pool_type=kind, flatten=bool(kind))

    @property
    @override
    def pool_name(self) -> str:
        return self.global_pool.pool_type

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable or disable activation checkpointing, which recomputes blocks in the backward pass to save memory."""
        for stage in self.stages:
            cast(Stage, stage).checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameter names by depth, for timm's layer-wise learning rates.

        Args:
            coarse: whether to treat all blocks of a stage as one group.

        Returns:
            A dict in the format of timm's ``group_with_matcher``: the entries ``"stem"`` and ``"blocks"`` hold regular
            expressions that match the names of parameters.
        """
        return {
            "stem": r"^stem",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^stages\.(\d+)", (0,))],
        }


def _stem(channels: int, dim: int, patch_size: int) -> list[nn.Module]:
    inner = dim // 2
    layers: list[nn.Module] = []
    # Two of the four convolutions halve the map for patches of 4 pixels, one for patches of 2, none for patches of 1.
    shapes = [(channels, inner, 2 if patch_size == 4 else 1), (inner, inner, 1), (inner, inner, 1)]
    for in_channels, out_channels, stride in shapes:
        layers += [nn.Conv2d(in_channels, out_channels, 3, stride, 1), nn.BatchNorm2d(out_channels), nn.GELU()]
    last = nn.Conv2d(inner, dim, 3, 1 if patch_size == 1 else 2, 1)
    return [*layers, last, nn.BatchNorm2d(dim)]


def _convolved(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """Apply a convolution to feature maps in channels-last order, ``[B, H, W, C]``, and return them in this order."""
    return convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
