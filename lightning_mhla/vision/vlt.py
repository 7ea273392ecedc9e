"""VLT: the hierarchical vision transformer of RALA, with any kind of attention in its first stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from huggingface_hub import PyTorchModelHubMixin
from timm.layers import DropPath, SelectAdaptivePool2d, register_notrace_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout, build_attention
from lightning_mhla.model.sizes import both_sides
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.vision.base import ImageCheck, VisionModel, taken_indices
from lightning_mhla.vision.preprocessing import Preprocessing
from lightning_mhla.vision.stages import StageConfig

EPS = 1e-6
"""Of the layer norms."""


@register_notrace_module
class MapAttention(nn.Module):
    """Attention over the tokens of a map of any size: blocks keep their number, and become uneven where they must.

    Args:
        dim: channels of the map.
        heads: attention heads.
        grid: rows and columns it is made for; other maps come as they are needed.
        config: see :class:`lightning_mhla.AttentionConfig`.
    """

    def __init__(self, dim: int, heads: int, grid: tuple[int, int], config: AttentionConfig) -> None:
        super().__init__()
        self.blocks = tuple(config.block_grid or (1, 1))
        self.attn: Attention = build_attention(config, dim, heads, BlockLayout(grid, self.blocks))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, H, W, dim]`` to the same shape."""
        grid = (x.shape[1], x.shape[2])
        if grid != self.attn.layout.grid:
            self.attn.fit(BlockLayout(grid, self.blocks), x.device)
        return self.attn(x.flatten(1, 2)).unflatten(1, grid)


class ConvMlp(nn.Module):
    """Two linear layers, and between them a depthwise 3 x 3 convolution that is added to its input.

    Args:
        dim: channels.
        inner: channels between the layers.
    """

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.act = nn.GELU()
        self.conv = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.fc2 = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, H, W, dim]`` to the same shape."""
        x = self.act(self.fc1(x))
        return self.fc2(x + _convolved(self.conv, x))


class VLTBlock(nn.Module):
    """Positional convolution, attention and MLP, each added to the map; the last two behind a norm and scaled.

    Args:
        dim: channels.
        heads: attention heads.
        grid: rows and columns.
        attention: see :class:`lightning_mhla.AttentionConfig`.
        mlp_ratio: inner width of the MLP over ``dim``.
        layer_scale: start of the factors of the two branches.
        drop_path: probability that a sample skips a branch while training.
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
        """``[B, H, W, dim]`` to the same shape."""
        x = x + _convolved(self.position, x)
        x = x + self.drop_path(self.scale1 * self.mixer(self.norm1(x)))
        return x + self.drop_path(self.scale2 * self.mlp(self.norm2(x)))


class Stage(nn.Module):
    """Blocks at one resolution, behind the convolution that halves it, in every stage but the first.

    Args:
        before: channels that come in; None for the first stage.
        dim: channels.
        blocks: the blocks.
    """

    def __init__(self, before: int | None, dim: int, blocks: Sequence[VLTBlock]) -> None:
        super().__init__()
        self.downsample = (
            nn.Identity() if before is None else nn.Sequential(nn.Conv2d(before, dim, 3, 2, 1), nn.BatchNorm2d(dim))
        )
        self.blocks = nn.ModuleList(blocks)
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """``[B, before, H, W]`` to ``[B, dim, H / 2, W / 2]``."""
        x = self.downsample(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = cast(Tensor, checkpoint(block, x, use_reentrant=False))
            else:
                x = block(x)
        return x.permute(0, 3, 1, 2)


class VLT(
    VisionModel,
    PyTorchModelHubMixin,
    library_name="lightning-mhla",
    coders={
        AttentionConfig: (asdict, lambda options: AttentionConfig(**options)),
        StageConfig: (asdict, lambda options: StageConfig(**options)),
        Preprocessing: (Preprocessing.as_dict, lambda options: Preprocessing(**options)),
    },
):
    """Image to class scores in stages of falling resolution: RAVLT (arXiv 2411.07635) and, with kind mhla, MHLA-VLT.

    A stem of four convolutions; blocks of a positional convolution, attention and a convolutional MLP; a projection, mean
    pooling and the head. The paper does not say which parts of RALA stay beside MHLA: each is an option of ``attention``.
    RAVLT's are ``lepe: 5``, ``rotary: true`` with ``normalize_before_rotary: true``, ``gate: true`` with ``gate_activation:
    identity``, ``feature_map: elu``, and ``key_weighting: true``.

    Images may be of any size that the stages can halve; coefficients are for blocks, whose number stays.
    ``save_pretrained(folder)`` and ``VLT.from_pretrained(folder)`` keep and load it: safetensors and ``config.json``. The
    methods that timm's models have are there too.

    Args:
        image_size: side of the square image, or height and width, in pixels.
        num_classes: scores that come out; 0 for the features before them.
        attention: of the linear stages, see :class:`lightning_mhla.AttentionConfig`; the others take its options too.
        stages: see :class:`StageConfig`.
        channels: number of channels of the image.
        drop_path: stochastic depth of the last block; it rises linearly from 0 at the first.
        checkpointing: recompute blocks in the backward pass.
        global_pool: ``"avg"``, ``"max"``, ``"avgmax"`` or ``"fast"``; empty for none, without classes.
        class_names: names of the classes, for :meth:`predict`.
        preprocessing: what :meth:`predict` does with an image; exports bring both.

    Raises:
        ValueError: for sizes that do not fit together.
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
        self.config, self.num_classes, self.in_chans = stages, num_classes, channels
        dims, depths, heads, scales = (stages.of(name) for name in ("dims", "depths", "heads", "layer_scale"))
        grids = stages.grids(both_sides("image_size", image_size))
        rates = torch.linspace(0, drop_path, sum(depths), device="cpu").tolist()
        self.stem = nn.Sequential(ImageCheck(stages.grids), *_stem(channels, dims[0], stages.patch_size))
        self.stages = nn.Sequential()
        for index, (dim, depth, number, scale) in enumerate(zip(dims, depths, heads, scales, strict=True)):
            own = stages.attention(attention, index)
            try:
                blocks = [
                    VLTBlock(dim, number, grids[index], own, stages.mlp_ratio, scale, rates.pop(0))
                    for _ in range(depth)
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
        """``[B, channels, H, W]`` to the map of the last stage."""
        return self.stages(self.stem(images))

    @override
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.global_pool(self.act(self.norm(self.proj(x))))
        return x if pre_logits else self.head(x)

    @override
    def maps(self, images: Tensor, taken: list[int], stop_early: bool, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """Maps of the stages; there is no norm behind them."""
        x, found = self.stem(images), []
        for index, stage in enumerate(self.stages):
            if stop_early and index > max(taken):
                break
            x = stage(x)
            if index in taken:
                found.append(x)
        return x, found

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages behind the last of ``indices``, and the head; returns the indices."""
        taken = taken_indices(indices, len(self.stages))
        self.stages = self.stages[: max(taken) + 1]
        if prune_head:
            self.num_features = self.head_hidden_size = self.feature_info[max(taken)]["num_chs"]
            self.proj, self.norm, self.act = nn.Identity(), nn.Identity(), nn.Identity()
            self.reset_classifier(0, "")
        return taken

    @override
    def set_pool(self, kind: str) -> None:
        if kind not in ("avg", "max", "avgmax", "fast", ""):
            raise ValueError(f"global_pool={kind!r} is not 'avg', 'max', 'avgmax', 'fast' or empty")
        self.global_pool = SelectAdaptivePool2d(pool_type=kind, flatten=bool(kind))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass."""
        for stage in self.stages:
            cast(Stage, stage).checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Names of parameters by depth, for timm's layer-wise learning rates."""
        return {
            "stem": r"^stem",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^stages\.(\d+)", (0,))],
        }


def _stem(channels: int, dim: int, patch_size: int) -> list[nn.Module]:
    inner = dim // 2
    layers: list[nn.Module] = []
    shapes = [(channels, inner, 2 if patch_size == 4 else 1), (inner, inner, 1), (inner, inner, 1)]
    for before, after, stride in shapes:
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.GELU()]
    last = nn.Conv2d(inner, dim, 3, 1 if patch_size == 1 else 2, 1)
    return [*layers, last, nn.BatchNorm2d(dim)]


def _convolved(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution of ``[B, H, W, C]``."""
    return convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
