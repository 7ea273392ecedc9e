"""Token grid of a diffusers transformer, and the projections of its attention modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mhla.attention import AttentionConfig
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.swap.host import TokenGrid, blocks_along, build_beside, fit

PATCHES = ("patch_embedding", "patch_embed", "pos_embed")
"""Possible names of the submodule whose convolution turns a model's input into tokens."""

UNSUPPORTED = {
    "group_norm": None,
    "spatial_norm": None,
    "residual_connection": False,
    "rescale_output_factor": 1.0,
    "fused_projections": False,
    "is_causal": False,
    "added_kv_proj_dim": None,
}
"""Attributes of diffusers' attention modules that swapped attention does not support, and the values they must have."""

HALF_MAX = torch.finfo(torch.float16).max


class InputGrid(TokenGrid):
    """Hook that records how many tokens the current input of a diffusers model has along each axis.

    The hook is a forward pre-hook of the model's patch convolution. Since the convolution is inside the model,
    ``torch.compile`` traces the hook together with the attention.

    Args:
        name: name of the model's class, for error messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __call__(self, convolution: nn.Conv2d | nn.Conv3d, args: tuple[Any, ...]) -> None:
        """Record how many tokens an input has along each axis.

        Args:
            convolution: patch convolution, 2D for images or 3D for clips; its stride is the size of a patch along each axis.
            args: positional arguments of the convolution, the input first: ``[batch, channels, height, width]`` for images,
                ``[batch, channels, frames, height, width]`` for clips.

        Raises:
            ValueError: if the number of axes of the input does not match the convolution.
        """
        patch = convolution.stride
        if args[0].dim() != len(patch) + 2:
            raise ValueError(
                f"{self.name} got an input of shape {list(args[0].shape)}; swapped attention requires batch, channels and "
                f"the {len(patch)} axes of its patches"
            )
        self.enter(tuple(size // step for size, step in zip(args[0].shape[2:], patch, strict=True)))


def block_modules(model: nn.Module, name: str) -> list[Any]:
    """Return the attribute ``name`` of each transformer block of a diffusers model; None for blocks that do not have it."""
    blocks = getattr(model, "blocks", None) or getattr(model, "transformer_blocks", None) or []
    return [getattr(block, name, None) for block in blocks]


def original_processor(model: nn.Module, processors: Mapping[str, str]) -> str | None:
    """Return the class name of the attention processor that the new attention replaces; None for unsupported models.

    Args:
        model: diffusers model.
        processors: class name of the processor, by name of the model's class or of one of its base classes.
    """
    names = (base.__name__ for base in type(model).__mro__)
    return next((processors[name] for name in names if name in processors), None)


def split_heads(x: Tensor, norm: Any, width: int) -> Tensor:
    """Split projected queries, keys or values into heads, and normalize them.

    Args:
        x: projected tokens, ``[B, N, H * D]`` for B rows of N tokens and H heads.
        norm: norm layer of the diffusers attention module, which normalizes either each head or all heads together; None for
            no normalization.
        width: width D of a head.

    Returns:
        Heads, ``[B, N, H, D]``. The dtype is that of ``x``, except that float16 becomes float32, because sums over a block
        overflow in float16.
    """
    # the width of its weight tells whether a norm is over each head or across all of them
    across = norm is not None and norm.weight.shape[-1] != width
    heads = (norm(x) if norm is not None and across else x).unflatten(-1, (-1, width))
    heads = heads if norm is None or across else norm(heads)
    heads = heads.to(x.dtype)  # autocast gives norms in float32 on a GPU
    return heads.float() if x.dtype == torch.float16 else heads


def merge_heads(attn: Any, x: Tensor) -> Tensor:
    """Project the concatenated outputs of all heads to output tokens.

    Args:
        attn: diffusers attention module, whose output layers are used.
        x: outputs of H heads of width D, ``[B, N, H * D]`` for B rows of N tokens.

    Returns:
        Output tokens, ``[B, N, C]`` for width C. In float16, infinite values are replaced by the largest finite ones.
    """
    if attn.to_out[0].weight.dtype == torch.float16:  # split_heads converted the heads to float32
        x = x.half()
    for layer in attn.to_out:
        x = layer(x)
    return x.clip(-HALF_MAX, HALF_MAX) if x.dtype == torch.float16 else x  # SANA's own processor clips, too


def patch_convolution(model: nn.Module) -> nn.Conv2d | nn.Conv3d:
    """Return the convolution that turns the input of a diffusers model into tokens.

    Raises:
        ValueError: if no submodule ``patch_embedding``, ``patch_embed`` or ``pos_embed`` is or contains a convolution.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and name.partition(".")[0] in PATCHES:
            return module
    raise ValueError(f"{type(model).__name__} has no patch convolution named {' or '.join(PATCHES)}")


def build_for(layer: Any, config: AttentionConfig, axes: int) -> Any:
    """Build the attention that replaces the one in a diffusers attention module, on the same device and in the same dtype.

    Args:
        layer: diffusers attention module, whose projections stay in use.
        config: configuration of the new attention. In a ``CrossAttentionConfig``, ``key_tokens`` and ``key_block_size`` must be
            set.
        axes: number of axes of the token grid: 2 for images, 3 for clips.

    Returns:
        The new attention, without projections.

    Raises:
        ValueError: if the attention kind uses blocks and ``config`` does not give a number of blocks for each axis.
    """
    blocks = blocks_along(axes, config)
    key_width = layer.to_q.out_features // layer.heads
    key_heads = layer.to_k.out_features // key_width
    return build_beside(
        layer.to_q.weight,
        config,
        layer.to_q.in_features,
        layer.heads,
        BlockLayout(blocks, blocks),  # the smallest possible grid; it is replaced by that of each input
        key_value_heads=key_heads,
        key_width=key_width,
        value_width=layer.to_v.out_features // key_heads,
    )


def put_processors(
    model: Any, layers: Mapping[int, Any], configs: Mapping[int, Any], kind: type[GridProcessor]
) -> dict[int, Any]:
    """Replace the processors of attention modules with new ones, in place. The model is unchanged if an exception is raised.

    Args:
        model: diffusers model.
        layers: mapping from layer number to the diffusers attention module to change.
        configs: mapping from layer number to the configuration of the new attention.
        kind: class of the new processors.

    Returns:
        Mapping from layer number to the new attention module.

    Raises:
        ValueError: if a configuration does not give a number of blocks for each axis, or the model has no patch convolution.
    """
    grid, patches = InputGrid(type(model).__name__), patch_convolution(model)
    built = {index: build_for(layer, configs[index], len(patches.stride)) for index, layer in layers.items()}
    for index, attention in built.items():
        layers[index].set_processor(kind(attention, attention.layout.block_grid, grid))
        layers[index].register_forward_pre_hook(check_processor)
    if built:
        patches.register_forward_pre_hook(grid)
    return built


def check_processor(attn: Any, args: tuple[Any, ...]) -> None:
    """Forward pre-hook that checks that a module with replaced attention still has its new attention.

    diffusers sets other processors in ``fuse_qkv_projections``, ``set_attn_processor`` and pipelines with perturbed attention.
    The layer would then compute its original attention, with weights that were trained for the new one.

    Args:
        attn: diffusers attention module.
        args: positional arguments of the module, which are not used.

    Raises:
        ValueError: if the processor of the module does not compute the new attention.
    """
    if not isinstance(attn.processor, GridProcessor):
        raise ValueError(
            f"the swapped attention of a layer was replaced by {type(attn.processor).__name__}, which computes the original "
            "attention; call unfuse_qkv_projections() if fuse_qkv_projections() was called, or load the model again and leave "
            "its attention processors as they are"
        )


class GridProcessor(nn.Module):
    """Base class of diffusers attention processors that compute a new attention with the original projections.

    Args:
        attention: the new attention, without projections.
        blocks: number of blocks along each axis of the token grid.
        grid: hook that records the token grid of the model's current input.
    """

    def __init__(self, attention: Any, blocks: tuple[int, ...], grid: InputGrid) -> None:
        super().__init__()
        self.attention, self.blocks, self.grid = attention, blocks, grid
        self.fitted: tuple[BlockLayout, torch.device] | None = None

    @property
    def swapped(self) -> Any:
        """Attention module that replaces the original attention."""
        return self.attention

    def fit(self, tokens: Tensor) -> BlockLayout | None:
        """Set the block layout of the attention for the model's current input.

        Args:
            tokens: input of the attention, ``[B, N, C]``.

        Returns:
            None if the layout was set. While ``torch.compile`` or ``torch.export`` traces the model, the attention must not
            change. In this case, the layout is returned instead, and the caller must pass it to the attention.
        """
        return fit(self, self.attention, self.grid.layout(self.blocks, tokens.shape[1]), tokens.device)


def check_modules(name: str, modules: Mapping[int, Any], processor: str, unsupported: Mapping[str, Any]) -> None:
    """Check that diffusers' attention modules have no feature that swapped attention lacks.

    Args:
        name: attribute of the transformer blocks that holds these modules, such as ``attn1``, for error messages.
        modules: attention modules, by number of the transformer block.
        processor: name of the class of the processor that the new attention replaces.
        unsupported: attributes of features that swapped attention does not support, with the value that turns each feature off.
            An attribute must be None or have this value.

    Raises:
        ValueError: if a module has a different processor, an unsupported attribute value, or a norm without weights.
    """
    for index, module in modules.items():
        if (present := type(module.processor).__name__) != processor:
            raise ValueError(
                f"{name} of block {index} has processor {present}, an IP-Adapter or another change, but swapped attention "
                f"replaces {processor}; set that processor first"
            )
        attributes = {key: getattr(module, key, plain) for key, plain in unsupported.items()}
        features = {key: value for key, value in attributes.items() if value not in (unsupported[key], None)}
        norms = {key: getattr(module, key) for key in ("norm_q", "norm_k")}
        bare = {key: norm for key, norm in norms.items() if norm is not None and getattr(norm, "weight", None) is None}
        for key, value in {**features, **bare}.items():
            without = " without weights" if key in bare else ""
            raise ValueError(
                f"{name} of block {index} has {key}={value!r}{without}, which swapped attention does not support"
            )
