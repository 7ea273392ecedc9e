"""Replacement of the self-attention in diffusers transformers, such as those of Wan, DiT, PixArt and SANA.

diffusers separates an attention module from its *processor*, which computes attention with the module's layers. The new
attention becomes the processor. The projections of queries, keys, values and outputs and the norms of queries and keys stay in
the attention module, with the same names. The parameters of the new attention (mixing coefficients, output norm, gate) have
names that contain ``attn1.processor``.

A model with replaced attention accepts images or clips of any size, because the blocks are fitted to each input. If an axis has
fewer tokens than blocks, the mixing coefficients are resized (:func:`mhla_kernels.resize_mixing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention import Attention, AttentionConfig, Projections
from lightning_mhla.attention.positions import Rotary
from lightning_mhla.swap.diffusers_cross import DiffusersCross
from lightning_mhla.swap.diffusers_grid import (
    UNSUPPORTED,
    GridProcessor,
    block_modules,
    check_modules,
    merge_heads,
    original_processor,
    put_processors,
    split_heads,
)
from lightning_mhla.swap.host import HostLibrary

HOST_PARTS = ("to_q", "to_k", "to_v", "to_out", "heads", "set_processor", "processor")
"""Attributes by which a diffusers attention module is recognized."""

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
"""Supported diffusers models, each with the class of the attention processor that the new attention replaces."""


class SwappedAttention(GridProcessor):
    """diffusers attention processor that computes MHLA or another attention kind with the original projections and norms."""

    attention: Attention

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        """Compute self-attention with the arguments that diffusers passes to an attention processor.

        The arguments and the returned tensor are the same as for :meth:`forward`. In addition, ``image_rotary_emb`` must be
        None. diffusers passes only arguments that this signature names.

        Raises:
            ValueError: if an argument other than ``attn``, ``hidden_states`` and ``rotary_emb`` is not None, or if the number
                of tokens does not match the model's current input.
        """
        if image_rotary_emb is not None:
            raise ValueError(
                "the model's rotary angles (image_rotary_emb) have a form that swapped attention does not support"
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
        """Compute self-attention over the tokens of an image or clip.

        B is the batch size, N the number of tokens, C their width, and D the width of a head.

        Args:
            attn: diffusers attention module that uses this processor.
            hidden_states: tokens in raster order, ``[B, N, C]``.
            encoder_hidden_states: must be None, since cross-attention is not supported.
            attention_mask: must be None, since masks are not supported.
            rotary_emb: cosines and sines of the rotary embedding, ``[1, N, 1, D]`` each, with two adjacent entries for each
                angle; None without a rotary embedding.

        Returns:
            Outputs ``[B, N, C]``.

        Raises:
            ValueError: if ``encoder_hidden_states`` or ``attention_mask`` is not None, or if the number of tokens does not
                match the model's current input.
        """
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError(
                "swapped attention is self-attention without a mask; encoder_hidden_states and attention_mask must be None"
            )
        attention, alone = self.attention, self.fit(hidden_states)
        rotary = None
        if rotary_emb is not None:
            # [N, D] each; every angle occurs twice, so that [N, D / 2] are taken.
            cos, sin = (angles[0, :, 0] for angles in rotary_emb)
            rotary = Rotary(cos[:, 0::2].float(), sin[:, 1::2].float(), interleaved=True)
        key_width, value_width = attention.key_width, attention.value_width

        def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q = split_heads(attn.to_q(x), attn.norm_q, key_width)
            return q, split_heads(attn.to_k(x), attn.norm_k, key_width), split_heads(attn.to_v(x), None, value_width)

        host = Projections(split, lambda x: merge_heads(attn, x))
        return attention(hidden_states, rotary=rotary, projections=host, layout=alone)


def attention_layers(model: nn.Module) -> list[Any]:
    """Return the self-attention modules of a diffusers transformer in the order of its layers.

    Raises:
        ValueError: if the model has no transformer blocks, or if a block does not have a self-attention module named ``attn1``.
    """
    layers = block_modules(model, "attn1")
    if not layers or any(not all(hasattr(layer, part) for part in HOST_PARTS) for layer in layers):
        raise ValueError(
            f"{type(model).__name__} is not a diffusers transformer with self-attention attn1 in each of its blocks, such as "
            "WanTransformer3DModel, DiTTransformer2DModel or SanaTransformer2DModel; for your own model use "
            "lightning_mhla.MHLA in place of its attention"
        )
    return layers


def check_supported(model: Any, hosts: Mapping[int, Any]) -> None:
    """Check that the attention of a diffusers model can be replaced. The model does not change.

    Args:
        model: diffusers model.
        hosts: mapping from layer number to the diffusers attention module to replace.

    Raises:
        ValueError: if the model's class is not supported, if the model masks attention between frames, or if an attention
            module has an unsupported processor, option or norm.
    """
    processor = original_processor(model, PROCESSORS)
    if processor is None:
        raise ValueError(
            f"{type(model).__name__} calls its attention in ways that swapped attention does not support (text among the "
            f"tokens, different rotary angles or inputs); supported are {', '.join(PROCESSORS)} and classes derived from "
            "them; for your own model use lightning_mhla.MHLA in place of its attention"
        )
    if (frames := model.config.get("num_frame_per_block", 1)) != 1:
        raise ValueError(
            f"num_frame_per_block={frames} masks attention between frames, which swapped attention does not support"
        )
    check_modules("attn1", hosts, processor, {**UNSUPPORTED, "is_cross_attention": False})


class DiffusersHost(HostLibrary):
    """Implementation of attention replacement for diffusers transformers, such as those of Wan, DiT, PixArt and SANA.

    If a model applies a rotary embedding to queries and keys, the new attention applies it too, after its feature map.
    """

    package = "diffusers"
    cross = DiffusersCross()

    @override
    def layers(self, model: Any) -> list[Any]:
        return attention_layers(model)

    @override
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]) -> None:
        check_supported(model, layers)
        for config in configs.values():
            if _rotates(model) and "rotary" not in Attention.kinds[config.kind].handles:
                raise ValueError(
                    f"{type(model).__name__} rotates queries and keys by their positions, but attention kind "
                    f"{config.kind!r} does not support rotary: handle inputs.rotary, and name it in handles"
                )

    @override
    def replace(
        self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]
    ) -> dict[int, Attention]:
        rotary = _rotates(model)
        configs = {index: replace(config, rotary=rotary) for index, config in configs.items()}
        return put_processors(model, layers, configs, SwappedAttention)

    @override
    def holder(self, layer: Any) -> Any:
        return layer.processor


def _rotates(model: nn.Module) -> bool:
    return hasattr(model, "rope")
