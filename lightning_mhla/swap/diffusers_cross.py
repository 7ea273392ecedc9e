"""Replacement of the cross-attention ``attn2`` in diffusers transformers, such as those of Wan, PixArt and SANA.

The new attention becomes the processor of ``attn2``, whose projections and norms stay in use. The queries are the tokens of the
image or clip, in blocks of the token grid. The context is an encoded text, in blocks that are counted from its first token.
Tokens that the model masks as padding do not influence the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention import (
    ContextSummaries,
    CrossAttention,
    CrossAttentionConfig,
    CrossProjections,
)
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
from lightning_mhla.swap.groups import LayerGroup
from lightning_mhla.swap.masks import context_mask, has_no_values, padding_to_end

CROSS_PROCESSORS = {
    "WanTransformer3DModel": "WanAttnProcessor",
    "WanVACETransformer3DModel": "WanAttnProcessor",
    "ChronoEditTransformer3DModel": "WanAttnProcessor",
    "SkyReelsV2Transformer3DModel": "SkyReelsV2AttnProcessor",
    "PixArtTransformer2DModel": "AttnProcessor2_0",
    "SanaTransformer2DModel": "SanaAttnProcessor2_0",
    "SanaVideoTransformer3DModel": "SanaAttnProcessor2_0",
}
"""Supported diffusers models, each with the class of the processor of ``attn2`` that the new attention replaces."""

TEXT_BLOCK = 16
"""Default number of tokens in a block of the text, few enough to tell the parts of a short caption apart."""

TEXT_TOKENS = 512
"""Default number of text tokens that dense mixing coefficients cover; text encoders of supported models do not exceed it."""

TEXTS = 4
"""Number of texts whose summaries are stored during sampling. Guidance calls a model with two or three texts in turn."""


class TextMemory:
    """Memory of the last four texts that cross-attention layers have read, with the key-value summaries of each layer.

    A summary is the sum of the outer products of keys and values over one block of text tokens. A text is recognized by its
    values, because a model projects the same encoded text to new tensors in every step. The values are copied, because a caller
    may write a different text to the same tensor.

    Attributes:
        texts: encoded text, padding mask, and summaries by cross-attention layer of each text, oldest first.
    """

    def __init__(self) -> None:
        self.texts: deque[tuple[Tensor, Tensor | None, dict[CrossAttention, ContextSummaries]]] = deque(maxlen=TEXTS)

    def read(
        self, attention: CrossAttention, context: Tensor, real: Tensor | None, projections: CrossProjections
    ) -> ContextSummaries:
        """Return the key-value summaries of a text for one layer. They are computed only if they are not stored yet.

        Args:
            attention: cross-attention of the layer.
            context: encoded text, ``[B, Nk, C']`` for B rows of Nk tokens of width C'.
            real: ``[B, Nk]`` bool, False for padding, which is at the end of each row; None if no token is padding.
            projections: functions that compute queries, keys, values and outputs with the layer's original weights.
        """
        same = (layers for text, mask, layers in self.texts if _equal(text, context) and _equal(mask, real))
        if (summaries := next(same, None)) is None:
            summaries = {}
            self.texts.append((context.clone(), None if real is None else real.clone(), summaries))
        if attention not in summaries:
            summaries[attention] = attention.summarize(context, real, projections=projections)
        return summaries[attention]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)  # torch.equal compares shapes, but not dtypes


@contextmanager
def read_texts_once(model: nn.Module) -> Iterator[None]:
    """Context manager that speeds up sampling on a CPU: replaced cross-attention reads the keys of each text only once.

    All denoising steps use the key-value summaries of the first step, with the same outputs up to rounding. The weights of the
    model must not change inside the context. The context has an effect only on a CPU, because fused GPU kernels read keys
    instead of summaries, and only without gradients and outside of compiled graphs. A model whose cross-attention was not
    replaced does not change. Contexts may be nested: an inner context stores its own texts.

    Args:
        model: diffusers transformer.
    """
    memory, processors = TextMemory(), [x for x in model.modules() if isinstance(x, SwappedCrossAttention)]
    outer_memories = [processor.memory for processor in processors]
    for processor in processors:
        processor.memory = memory
    try:
        yield
    finally:
        for processor, outer_memory in zip(processors, outer_memories, strict=True):
            processor.memory = outer_memory


class SwappedCrossAttention(GridProcessor):
    """diffusers attention processor that computes MHLA or another kind of cross-attention with the original projections."""

    attention: CrossAttention
    memory: TextMemory | None = None
    """Texts that were read earlier inside :func:`read_texts_once`; None outside of it."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """Compute cross-attention with the arguments that diffusers passes to an attention processor.

        The arguments and the returned tensor are the same as for :meth:`forward`. diffusers passes only arguments that this
        signature names.
        """
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

    def forward(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """Compute cross-attention from the tokens of an image or clip to the tokens of a text.

        B is the batch size. An image or clip has Nq tokens of width C, and a text has Nk tokens of width C'.

        Args:
            attn: diffusers attention module that uses this processor.
            hidden_states: tokens of the image or clip in raster order, ``[B, Nq, C]``.
            encoder_hidden_states: encoded text, ``[B, Nk, C']``.
            attention_mask: mask that hides padding of the text: ``[B, Nk]``, nonzero or True for visible tokens; or
                ``[B, 1, Nk]``, added to the scores (0 for visible tokens, at most -1000 for padding). None without padding.
            rotary_emb: must be None, since texts have no position on the token grid.

        Returns:
            Outputs ``[B, Nq, C]``.

        Raises:
            ValueError: if ``encoder_hidden_states`` is None or ``rotary_emb`` is not, if the mask does not fit the text, or if
                the text has more tokens than dense mixing coefficients cover.
        """
        if encoder_hidden_states is None or rotary_emb is not None:
            raise ValueError(
                "swapped cross-attention needs encoder_hidden_states, the text that the tokens read, and no rotary_emb"
            )
        attention, alone = self.attention, self.fit(hidden_states)
        real = context_mask(attention_mask, encoder_hidden_states.shape[1], encoder_hidden_states.shape[0])
        real, (context,) = padding_to_end(real, encoder_hidden_states)
        key_width, value_width = attention.key_width, attention.value_width
        host = CrossProjections(
            lambda x: split_heads(attn.to_q(x), attn.norm_q, key_width),
            lambda x: (split_heads(attn.to_k(x), attn.norm_k, key_width), split_heads(attn.to_v(x), None, value_width)),
            lambda x: merge_heads(attn, x),
        )
        if self._may_remember(hidden_states) and self.memory is not None:
            summaries = self.memory.read(attention, context, real, host)
            return attention(hidden_states, summaries, projections=host, layout=alone)
        return attention(hidden_states, context, context_mask=real, projections=host, layout=alone)

    def _may_remember(self, x: Tensor) -> bool:
        eager = not has_no_values(x) and not torch.is_grad_enabled()
        return eager and x.device.type == "cpu" and self.attention.summarizes


class DiffusersCross(LayerGroup[CrossAttention, CrossAttentionConfig]):
    """Implementation of attention replacement for the cross-attention of diffusers transformers."""

    config_class = CrossAttentionConfig

    @override
    def layers(self, model: Any) -> list[Any]:
        name = type(model).__name__
        if original_processor(model, CROSS_PROCESSORS) is None:
            raise ValueError(
                f"{name} calls its cross-attention in ways that are not supported; cross-attention can be swapped in "
                f"{', '.join(CROSS_PROCESSORS)} and classes derived from them; for your own model use "
                "lightning_mhla.MHLACrossAttention"
            )
        layers = block_modules(model, "attn2")
        if not layers or any(layer is None for layer in layers):
            raise ValueError(f"{name} has blocks without cross-attention (attn2); leave out cross=True")
        return layers

    @override
    def complete(self, model: Any, config: CrossAttentionConfig) -> CrossAttentionConfig:
        return replace(
            config, key_block_size=config.key_block_size or TEXT_BLOCK, key_tokens=config.key_tokens or TEXT_TOKENS
        )

    @override
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, CrossAttentionConfig]) -> None:
        processor = str(original_processor(model, CROSS_PROCESSORS))
        check_modules("attn2", layers, processor, {**UNSUPPORTED, "norm_cross": None})

    @override
    def replace(
        self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, CrossAttentionConfig]
    ) -> dict[int, CrossAttention]:
        return put_processors(model, layers, configs, SwappedCrossAttention)

    @override
    def candidates(self, model: Any) -> list[Any]:
        return block_modules(model, "attn2")

    @override
    def holder(self, layer: Any) -> Any:
        return getattr(layer, "processor", None)
