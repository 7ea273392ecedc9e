"""Sizes and attention of the stages of a hierarchical vision transformer (VLT)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_mhla.attention import AttentionConfig
from lightning_mhla.attention.config import KINDS

Size = Literal["T", "S", "B", "L"]

SIZES: dict[str, dict[str, list[Any]]] = {
    "T": {"dims": [64, 128, 256, 512], "depths": [2, 2, 6, 2], "heads": [1, 2, 4, 8], "layer_scale": [1.0] * 4},
    "S": {"dims": [64, 128, 320, 512], "depths": [3, 5, 9, 3], "heads": [1, 2, 5, 8], "layer_scale": [1.0] * 4},
    "B": {
        "dims": [96, 192, 384, 512],
        "depths": [4, 6, 12, 6],
        "heads": [1, 2, 6, 8],
        "layer_scale": [1.0, 1.0, 1e-6, 1e-6],
    },
    "L": {"dims": [96, 192, 448, 640], "depths": [4, 7, 19, 8], "heads": [1, 2, 7, 10], "layer_scale": [1e-6] * 4},
}
"""Published sizes: width, number of blocks, heads and initial layer scale of each stage.

Source: RAVLT's code (github.com/qhfan/RALA).
"""

BLOCK_GRIDS = [[7, 7], [4, 4]]
"""Number of attention blocks along each axis in the first two stages (arXiv 2601.07832, section 5.1)."""

RAVLT: dict[str, Any] = {
    "rotary": True,
    "normalize_before_rotary": True,
    "feature_map": "elu",
    "lepe": 5,
    "gate": True,
    "gate_activation": "identity",
}
"""Attention options of the blocks in RAVLT (arXiv 2411.07635), except for the kind of attention."""


@dataclass(frozen=True)
class StageConfig:
    """Configuration of the stages of a hierarchical vision transformer (VLT).

    Give either the name of a published size, or dims, depths and heads. These are lists with one value for each stage.

    Args:
        size: T, S, B or L for a published size of RAVLT (arXiv 2411.07635), which sets dims, depths and heads, and also
            layer_scale unless that is given; null to give dims, depths and heads.
        dims: width of each stage; required if size is null, otherwise null.
        depths: number of transformer blocks in each stage; required if size is null, otherwise null.
        heads: number of attention heads in each stage; required if size is null, otherwise null.
        layer_scale: initial factor of the residual branches in each stage; null for the published values of size, or
            1 everywhere if size is not given.
        linear_stages: number of stages, counted from the first, that use the configured kind of attention; later stages use
            softmax attention.
        block_grids: number of attention blocks along height and width in each linear stage, for kinds of attention that use
            blocks, such as mhla; null for 7 x 7 in the first and 4 x 4 in the second stage.
        patch_size: side of a token in the first stage, in pixels: 4, 2 or 1.
        mlp_ratio: inner width of the MLPs divided by the width of the tokens.
        head_width: width of the projection before the head: 1024 in RAVLT, 2048 in MAViT (arXiv 2507.00698).

    Raises:
        ValueError: if values do not fit together. The message names them.
    """

    size: Size | None = None
    dims: list[int] | None = None
    depths: list[int] | None = None
    heads: list[int] | None = None
    layer_scale: list[float] | None = None
    linear_stages: int = 2
    block_grids: list[list[int]] | None = None
    patch_size: int = 4
    mlp_ratio: float = 3.5
    head_width: int = 1024

    def __post_init__(self) -> None:
        if self.size is not None and self.size not in SIZES:
            raise ValueError(f"size={self.size!r} is not one of {list(SIZES)}")
        explicit = [name for name in ("dims", "depths", "heads") if getattr(self, name) is not None]
        if self.size is not None and explicit:
            raise ValueError(f"size={self.size!r} sets dims, depths and heads; leave them out, or leave size out")
        if self.size is None and len(explicit) < 3:
            raise ValueError(f"give size ({', '.join(SIZES)}), or all of dims, depths and heads")
        stages = len(self.of("dims"))
        if not stages:
            raise ValueError("dims=[] must list the width of at least one stage")
        for name in ("depths", "heads", "layer_scale"):
            if len(self.of(name)) != stages:
                raise ValueError(f"{name}={self.of(name)} must have a value for each of the {stages} stages")
        for name in ("dims", "depths", "heads"):
            if min(self.of(name)) < 1:
                raise ValueError(f"{name}={self.of(name)} must be positive")
        if self.head_width < 1 or min(self.of("dims")) * self.mlp_ratio < 1:
            raise ValueError(f"head_width={self.head_width} and mlp_ratio={self.mlp_ratio} must be positive")
        for dim, heads in zip(self.of("dims"), self.of("heads"), strict=True):
            if dim % heads:
                raise ValueError(f"a stage of width {dim} is not divisible by its heads={heads}")
        if not 0 <= self.linear_stages <= stages:
            raise ValueError(f"linear_stages={self.linear_stages} must be 0 to {stages}")
        if self.patch_size not in (1, 2, 4):
            raise ValueError(f"patch_size={self.patch_size} must be 4, 2 or 1")

    def of(self, name: str) -> list[Any]:
        """Return the values of an option, one for each stage: integers, or floats for ``layer_scale``.

        Values that were set explicitly take precedence over those of the published ``size``. Without either, ``layer_scale`` is
        1 in each stage.

        Args:
            name: name of the option: ``"dims"``, ``"depths"``, ``"heads"`` or ``"layer_scale"``.
        """
        if (explicit := getattr(self, name)) is not None:
            return list(explicit)
        if self.size is not None:
            return SIZES[self.size][name]
        return [1.0] * len(self.dims or [])

    def grids(self, image_size: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the number of rows and the number of columns of tokens in each stage.

        Args:
            image_size: height and width of the image, in pixels.

        Raises:
            ValueError: if the height or width of the image is not a multiple of the side of a token in some stage.
        """
        steps = [self.patch_size * 2**stage for stage in range(len(self.of("dims")))]
        for stage, step in enumerate(steps):
            if any(side % step for side in image_size):
                raise ValueError(
                    f"stage {stage + 1} cannot divide an image of {image_size[0]} x {image_size[1]} pixels into tokens "
                    f"of {step} x {step}: use sides that are multiples of {steps[-1]}, or fewer stages"
                )
        return [(image_size[0] // step, image_size[1] // step) for step in steps]

    def attention(self, config: AttentionConfig, stage: int) -> AttentionConfig:
        """Return the attention configuration of one stage.

        The first ``linear_stages`` stages use ``config``, with the blocks of the stage if this kind of attention uses blocks.
        Later stages use softmax attention with the other options of ``config``.

        Args:
            config: attention configuration of the linear stages. If its kind uses blocks, it must not set ``block_grid`` or
                ``block_size``, because ``block_grids`` sets the blocks of each stage.
            stage: index of the stage, counted from 0.

        Raises:
            ValueError: if the kind of attention uses blocks in this stage, and either ``config`` sets ``block_grid`` or
                ``block_size``, or ``block_grids`` has fewer entries than there are linear stages.
        """
        if stage >= self.linear_stages:
            return replace(config.with_kind("softmax"), block_grid=None, block_size=None)
        if not KINDS[config.kind].uses_blocks:
            return config
        grids = self.block_grids if self.block_grids is not None else BLOCK_GRIDS
        if config.block_grid is not None or config.block_size is not None:
            raise ValueError(
                "the blocks of a VLT differ by stage: set block_grids of the stages instead of blocks of the attention"
            )
        if len(grids) < self.linear_stages:
            raise ValueError(
                f"block_grids={grids} must have an entry for each of the linear_stages={self.linear_stages}"
            )
        return replace(config, block_grid=list(grids[stage]))
