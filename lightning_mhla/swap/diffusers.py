"""Transformers of diffusers as hosts: attention of ours as the processor of their attention modules.

Projections of queries, keys, values and outputs, and the norms of queries and keys, stay where they are and as they are.
The new attention is the *processor* of diffusers' attention module, so that the model's other names do not change, and
what it adds (mixing coefficients, output norm, gate) is found under ``...attn1.processor``. A swapped model takes images or
clips of any size: blocks are fitted to each, and where an axis has fewer tokens than blocks, the coefficients are resized
(:func:`mhla_kernels.resize_mixing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout, Projections
from lightning_mhla.attention.positions import Rotary
from lightning_mhla.swap.host import HostLibrary, TokenGrid, blocks_along, build_beside, fit

HOST_PARTS = ("to_q", "to_k", "to_v", "to_out", "heads", "set_processor", "processor")
PROCESSORS = {
    "WanTransformer3DModel": "WanAttnProcessor",
    "WanVACETransformer3DModel": "WanAttnProcessor",
    "WanAnimateTransformer3DModel": "WanAttnProcessor",
    "ChronoEditTransformer3DModel": "WanAttnProcessor",
    "SkyReelsV2Transformer3DModel": "SkyReelsV2AttnProcessor",
    "DiTTransformer2DModel": "AttnProcessor2_0",
    "PixArtTransformer2DModel": "AttnProcessor2_0",
    "SanaTransformer2DModel": "SanaLinearAttnProcessor2_0",
    "SanaVideoTransformer3DModel": "SanaLinearAttnProcessor3_0",
}
"""Models of diffusers whose token grid we know, and the processor whose place in them we can take."""

PATCHES = ("patch_embedding", "patch_embed", "pos_embed")
"""Parts of these models that hold the convolution that makes their tokens."""

UNSUPPORTED = {
    "group_norm": None,
    "spatial_norm": None,
    "residual_connection": False,
    "rescale_output_factor": 1.0,
    "fused_projections": False,
    "is_cross_attention": False,
    "is_causal": False,
    "added_kv_proj_dim": None,
}
"""Options of diffusers' attention that the swapped one does not know, and what they must be."""


HALF_MAX = torch.finfo(torch.float16).max


class InputGrid(TokenGrid):
    """The grid of a model's present input, a forward pre-hook of the convolution that makes its patches.

    The hook belongs to a module inside the model, so that a compiled model traces it together with the attention.

    Args:
        name: of the model's class, for messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __call__(self, convolution: nn.Conv2d | nn.Conv3d, args: tuple[Any, ...]) -> None:
        """Keep the grid of an input ``[B, C, ...]``.

        Raises:
            ValueError: for an input with other axes.
        """
        patch = convolution.stride
        if args[0].dim() != len(patch) + 2:
            raise ValueError(
                f"{self.name} is called with {list(args[0].shape)}; swapped attention wants batch, channels and the "
                f"{len(patch)} axes of its patches"
            )
        self.enter(tuple(size // step for size, step in zip(args[0].shape[2:], patch, strict=True)))


class SwappedAttention(nn.Module):
    """An attention of ours as the processor of a diffusers attention module, whose projections and norms it uses.

    Args:
        attention: without projections.
        blocks: along each axis of the token grid.
        grid: grid of the model's present input.
    """

    def __init__(self, attention: Attention, blocks: tuple[int, ...], grid: InputGrid) -> None:
        super().__init__()
        self.attention, self.blocks, self.grid = attention, blocks, grid
        self.fitted: tuple[BlockLayout, torch.device] | None = None

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        """As :meth:`forward`; diffusers reads the arguments off this signature, and leaves out those it does not have.

        Raises:
            ValueError: for rotary angles of another form than Wan's.
        """
        if image_rotary_emb is not None:
            raise ValueError(
                "the model's rotary angles (image_rotary_emb) have a form that swapped attention does not know"
            )
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

    def forward(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Self-attention of tokens ``[B, N, C]`` in raster order of the grid.

        Args:
            attn: the module whose processor this is.
            hidden_states: the tokens.
            encoder_hidden_states: None: self-attention only.
            attention_mask: None: all tokens count.
            rotary_emb: cosine and sine ``[1, N, 1, D]``, each angle twice (Wan's).

        Raises:
            ValueError: for cross-attention or a mask.
        """
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("swapped attention is self-attention without a mask; this layer was called otherwise")
        attention, layout = self.attention, self.grid.layout(self.blocks, hidden_states.shape[1])
        alone = fit(self, attention, layout, hidden_states.device)
        rotary = None
        if rotary_emb is not None:
            cos, sin = (angles[0, :, 0] for angles in rotary_emb)
            rotary = Rotary(cos[:, 0::2].float(), sin[:, 1::2].float(), interleaved=True)
        host = Projections(lambda x: _split_heads(attn, x, attention), lambda x: _merge_heads(attn, x))
        return attention(hidden_states, rotary=rotary, projections=host, layout=alone)


def _split_heads(attn: Any, x: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the host, its norms applied over a head or over all of them, as they are wide."""
    q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
    out, width = [], attention.key_width
    for tensor, norm in ((q, attn.norm_q), (k, attn.norm_k)):
        across = norm is not None and norm.weight.shape[-1] != width
        heads = (norm(tensor) if across else tensor).unflatten(-1, (-1, width))
        heads = heads if norm is None or across else norm(heads)
        out.append(heads.to(v.dtype))  # autocast gives norms in float32 on a GPU
    heads = [*out, v.unflatten(-1, (-1, attention.value_width))]
    if v.dtype == torch.float16:  # sums over a block overflow
        heads = [tensor.float() for tensor in heads]
    return heads[0], heads[1], heads[2]


def _merge_heads(attn: Any, x: Tensor) -> Tensor:
    if attn.to_out[0].weight.dtype == torch.float16:
        x = x.half()
    for layer in attn.to_out:
        x = layer(x)
    return x.clip(-HALF_MAX, HALF_MAX) if x.dtype == torch.float16 else x  # as SANA's own processor does


def attention_layers(model: nn.Module) -> list[Any]:
    """The self-attention modules of a diffusers transformer, first to last.

    Raises:
        ValueError: when the model is not built as Wan, DiT and SANA are.
    """
    blocks = getattr(model, "blocks", None) or getattr(model, "transformer_blocks", None) or []
    layers = [getattr(block, "attn1", None) for block in blocks]
    if not layers or any(not all(hasattr(layer, part) for part in HOST_PARTS) for layer in layers):
        raise ValueError(
            f"{type(model).__name__} is no diffusers transformer with self-attention attn1 in each of its blocks, such as "
            "WanTransformer3DModel, DiTTransformer2DModel or SanaTransformer2DModel; for your own model use "
            "lightning_mhla.MHLA in place of its attention"
        )
    return layers


def check_supported(model: Any, hosts: Mapping[int, Any]) -> None:
    """Refuse attention that the swapped one would not compute alike, before anything is changed.

    Args:
        model: whose class must be one of :data:`PROCESSORS` or derived from it.
        hosts: the attention modules that are to be replaced, by the number of their layer.

    Raises:
        ValueError: naming what is not known.
    """
    known = next((base.__name__ for base in type(model).__mro__ if base.__name__ in PROCESSORS), None)
    if known is None:
        raise ValueError(
            f"{type(model).__name__} calls its attention in ways that swapped attention does not know (text among the "
            f"tokens, other rotary angles, other inputs); it can be swapped in {', '.join(PROCESSORS)} and classes derived "
            "from them; for your own model use lightning_mhla.MHLA in place of its attention"
        )
    if (frames := model.config.get("num_frame_per_block", 1)) != 1:
        raise ValueError(
            f"num_frame_per_block={frames} masks attention between frames, which swapped attention does not know"
        )
    for index, host in hosts.items():
        if (processor := type(host.processor).__name__) != PROCESSORS[known]:
            raise ValueError(
                f"attn1 of block {index} has processor {processor}, not {PROCESSORS[known]}, whose place swapped attention "
                "takes; set that one first"
            )
        for name, plain in UNSUPPORTED.items():
            if (value := getattr(host, name, plain)) not in (plain, None):
                raise ValueError(f"attn1 of block {index} has {name}={value!r}, which swapped attention does not know")
        for name in ("norm_q", "norm_k"):
            norm = getattr(host, name)
            if norm is not None and getattr(norm, "weight", None) is None:
                raise ValueError(
                    f"attn1 of block {index} has {name}={norm!r} without weights, which swapped attention does not know"
                )


def build_swapped(host: Any, config: AttentionConfig, axes: int) -> Attention:
    """The attention that takes the place of ``host``'s, on its device and in its dtype."""
    blocks = blocks_along(axes, config)
    heads, weight = host.heads, host.to_q.weight
    key_width = host.to_q.out_features // heads
    return build_beside(
        weight,
        config,
        host.to_q.in_features,
        heads,
        BlockLayout(blocks, blocks),  # of the smallest grid; each input brings its own
        key_value_heads=host.to_k.out_features // key_width,
        key_width=key_width,
        value_width=host.to_v.out_features * key_width // host.to_k.out_features,
    )


class DiffusersHost(HostLibrary):
    """Wan, DiT, PixArt, SANA and their kin. Wherever they turn queries and keys by positions, so does the new attention,
    after the feature map."""

    package = "diffusers"

    @override
    def layers(self, model: Any) -> list[Any]:
        return attention_layers(model)

    @override
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]) -> None:
        check_supported(model, layers)
        for config in configs.values():
            if _turns(model) and "rotary" not in Attention.kinds[config.kind].handles:
                raise ValueError(
                    f"{type(model).__name__} turns queries and keys by their positions, and attention kind "
                    f"{config.kind!r} does not take rotary: handle inputs.rotary, and name it in handles"
                )

    @override
    def replace(
        self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]
    ) -> dict[int, Attention]:
        grid, patches = InputGrid(type(model).__name__), patch_convolution(model)
        axes = len(patches.stride)
        swapped = {
            index: build_swapped(layer, replace(configs[index], rotary=_turns(model)), axes)
            for index, layer in layers.items()
        }
        for index, built in swapped.items():
            layers[index].set_processor(SwappedAttention(built, built.layout.block_grid, grid))
        if swapped:
            patches.register_forward_pre_hook(grid)
        return swapped

    @override
    def swapped(self, model: Any) -> dict[int, Attention]:
        processors = ((index, layer.processor) for index, layer in enumerate(attention_layers(model)))
        return {
            index: processor.attention for index, processor in processors if isinstance(processor, SwappedAttention)
        }


def patch_convolution(model: nn.Module) -> nn.Conv2d | nn.Conv3d:
    """The convolution that makes tokens of a model's input."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and name.partition(".")[0] in PATCHES:
            return module
    raise ValueError(f"{type(model).__name__} has no convolution {' or '.join(PATCHES)} that makes its patches")


def _turns(model: nn.Module) -> bool:
    """Whether a model turns queries and keys by their positions."""
    return hasattr(model, "rope")
