"""Kinds of cross-attention: multi-head linear attention over blocks (MHLA), linear attention and softmax attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal
from weakref import ref

import torch
from mhla_kernels import mhla_attention
from mhla_kernels.attention import without_autocast
from mhla_kernels.blocks import TokenLayout
from mhla_kernels.checks import check_weighting
from mhla_kernels.cross.summaries import read_summaries, summarize_keys
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.attention.config import MIXING_OPTIONS, AttentionConfig, CrossAttentionConfig, check_blocks
from lightning_mhla.attention.cross import CrossAttention, check_cross_config
from lightning_mhla.attention.cross_inputs import ContextSummaries, CrossInputs
from lightning_mhla.attention.cross_mixing import DenseCrossCoefficients, ExponentialCrossCoefficients
from lightning_mhla.attention.features import LearnedFeatures, apply_features
from lightning_mhla.attention.layout import BlockLayout, Placement
from lightning_mhla.attention.lepe import hide_rows
from lightning_mhla.attention.mixing import MixingCoefficients
from lightning_mhla.attention.summaries import EPS, SANA_EPS


class LinearCrossAttention(CrossAttention, kind="linear"):
    """Linear cross-attention, in which all queries share one key-value summary of the context.

    The constructor takes the arguments of :class:`CrossAttention`.
    """

    unused: ClassVar[tuple[str, ...]] = MIXING_OPTIONS
    summarizes: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        heads: int,
        layout: BlockLayout,
        context_layout: BlockLayout,
        config: AttentionConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, layout, context_layout, config, **options)
        self.features = LearnedFeatures(heads, self.key_width) if self.config.feature_map == "learned" else None

    @override
    def attend(self, inputs: CrossInputs) -> Tensor:
        repeats = self.heads // self.key_value_heads
        k, v = inputs.k.repeat_interleave(repeats, 2), inputs.v.repeat_interleave(repeats, 2)
        q, k, feature_map = self._features(inputs.q, k)
        mixing, blocks = self.coefficients(inputs)
        return mhla_attention(
            q, k, v, mixing, query_mask=inputs.query_mask, key_mask=inputs.key_mask, normalize=self.config.normalize,
            feature_map=feature_map, eps=self.eps, **blocks,
        )  # fmt: skip

    @override
    def summaries_of(self, k: Tensor, v: Tensor, key_mask: Tensor | None, context: Placement) -> ContextSummaries:
        repeats, width = self.heads // self.key_value_heads, k.shape[-1]
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        _, k, feature_map = self._features(k[:, :0], k)
        layout = _token_layout(k.shape[1], context.blocks if self.uses_blocks else {"block_size": k.shape[1]})
        with without_autocast(k.device.type):
            return ContextSummaries(summarize_keys(k, v, layout, feature_map, key_mask), context, ref(self), width)

    @override
    def attend_summaries(self, inputs: CrossInputs, summaries: ContextSummaries) -> Tensor:
        q, _, feature_map = self._features(inputs.q, inputs.k)
        weighting = check_weighting(q, False, self.config.normalize, None, self.eps, feature_map)
        one_block = not self.uses_blocks or inputs.queries.layout.num_blocks == 1
        first = inputs.first if self.uses_blocks else 0
        # a mixture without a graph has no gradients to give, one with a graph keeps it alive, and training changes coefficients
        stores = one_block and not torch.is_grad_enabled()
        blocks: dict[str, Any] = {"block_size": q.shape[1]}
        with without_autocast(q.device.type):
            if stores and summaries.mixture is not None and summaries.mixture[0] == first:
                mixtures = summaries.mixture[1]
            else:
                matrix, of_queries = self.coefficients(inputs)
                mixtures = summaries.keys.mix(matrix)
                blocks = blocks if one_block else of_queries
                summaries.mixture = (first, mixtures) if stores else None
            out = read_summaries(
                q, mixtures, _token_layout(q.shape[1], blocks), weighting, feature_map, inputs.query_mask
            )
        return out.to(inputs.q.dtype)

    @property
    def eps(self) -> float:
        """Small constant that is added to the sum of a query's attention weights before the output is divided by this sum."""
        return SANA_EPS if self.config.feature_map == "sana" else EPS

    def _features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Literal["identity", "relu"]]:
        """Return the features of queries and keys, and the feature map that the attention operator still has to apply to them.

        The features are ``[B, Nq, H, K]`` and ``[B, Nk, H, K]``, where K is 2 Dk for learned features, and otherwise Dk.

        Args:
            q: queries, ``[B, Nq, H, Dk]``.
            k: keys, ``[B, Nk, H, Dk]``.
        """
        if self.features is None:
            return apply_features(q, k, self.config.feature_map)
        q, _, k = self.features(q, k)  # a factor on a query's features means nothing
        return q, k, "identity"

    def coefficients(self, inputs: CrossInputs) -> tuple[Tensor, dict[str, Any]]:
        """Return mixing coefficients ``[Mq, Mk]`` or ``[H, Mq, Mk]``, and keyword arguments that describe the blocks.

        The keyword arguments are those of :func:`mhla_kernels.mhla_attention`, such as ``block_size`` and ``key_block_size``.
        Linear attention has one block of queries and one block of keys, so its only coefficient is 1.

        Args:
            inputs: inputs of the call.
        """
        return inputs.q.new_ones(1, 1), {"block_size": inputs.q.shape[1], "key_block_size": inputs.k.shape[1]}


def _token_layout(tokens: int, blocks: Mapping[str, Any]) -> TokenLayout:
    """Return the partition of ``tokens`` tokens into blocks, given by ``block_size`` or ``block_offsets`` in ``blocks``."""
    return TokenLayout(tokens, blocks.get("block_size", 0), blocks.get("block_offsets"))


class MHLACrossAttention(LinearCrossAttention, kind="mhla"):
    """Cross-attention layer with multi-head linear attention over blocks of tokens (MHLA, arXiv 2601.07832).

    Each block of the context has a key-value summary, the sum of ``k v^T`` over its tokens. The queries of a block read a sum
    of all summaries, weighted by learned mixing coefficients. For example, 16 x 16 tokens of an image in 4 x 4 blocks read a
    text of up to 64 tokens in blocks of 8:

        layout, text = BlockLayout((16, 16), blocks=(4, 4)), BlockLayout((64,), block_size=8)
        attention = MHLACrossAttention(dim=384, heads=6, layout=layout, context_layout=text, context_dim=512)
        y = attention(torch.randn(2, 256, 384), torch.randn(2, 40, 512))

    Dense mixing coefficients have one entry for each pair of blocks of the two layouts. Exponential ones need two grids with
    the same number of axes, and do not limit the number of blocks. With ``mixing_init="uniform"``, or if the grids have
    different numbers of axes, the layer starts as linear attention.

    The constructor takes the arguments of :class:`CrossAttention`, and a configuration of kind ``"mhla"``. If the
    configuration sets ``block_grid`` or ``block_size``, they must agree with ``layout``.

    Raises:
        ValueError: if the configuration does not agree with the layouts, or for the same reasons as in :class:`CrossAttention`.
    """

    unused: ClassVar[tuple[str, ...]] = ()
    uses_blocks: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        heads: int,
        layout: BlockLayout,
        context_layout: BlockLayout,
        config: AttentionConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, layout, context_layout, config, **options)
        config = self.config
        check_blocks(config, layout)
        if isinstance(config, CrossAttentionConfig) and (
            config.key_block_size not in (None, context_layout.block_size)
            or config.key_tokens not in (None, context_layout.num_tokens)
        ):
            raise ValueError(
                f"the configuration asks for a context with key_tokens={config.key_tokens} and "
                f"key_block_size={config.key_block_size}, not {context_layout}"
            )
        shared: dict[str, Any] = {
            "heads": heads if config.mixing_per_head else None,
            "init": config.mixing_init,
            "trainable": config.mixing_trainable,
        }
        self.mixing: MixingCoefficients
        if config.mixing == "exponential":
            self.mixing = ExponentialCrossCoefficients(
                layout, context_layout, config.mixing_terms, min_decay=config.mixing_min_decay, **shared
            )
        else:
            self.mixing = DenseCrossCoefficients(layout, context_layout, **shared)

    @override
    def coefficients(self, inputs: CrossInputs) -> tuple[Tensor, dict[str, Any]]:
        """Return the learned coefficients, ``[Mq, Mk]`` or ``[H, Mq, Mk]``, and keyword arguments that describe the blocks.

        The keyword arguments are those of :func:`mhla_kernels.mhla_attention`, such as ``block_size`` and ``key_block_size``.

        Args:
            inputs: inputs of the call.
        """
        queries, context = inputs.queries, inputs.context
        mixing = self.mixing(queries.layout.block_grid, context.layout.block_grid, inputs.first)
        return mixing, {**queries.blocks, **{f"key_{name}": value for name, value in context.blocks.items()}}


class SoftmaxCrossAttention(CrossAttention, kind="softmax"):
    """Softmax cross-attention ``softmax(q k^T / sqrt(Dk)) v``, computed with PyTorch's fused kernels.

    The constructor takes the arguments of :class:`CrossAttention`.
    """

    unused: ClassVar[tuple[str, ...]] = (*MIXING_OPTIONS, "normalize", "feature_map", "output_norm")

    @override
    def attend(self, inputs: CrossInputs) -> Tensor:
        visible, v = inputs.key_mask, inputs.v
        mask, some = None, None
        if visible is not None:
            some = visible.any(1, keepdim=True)
            mask = (visible | ~some)[:, None, None]  # a row without any key would be NaN
            v = hide_rows(v, visible)
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, v))
        grouped = self.heads != self.key_value_heads
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)
        return out if some is None else hide_rows(out, some.expand(out.shape[:2]))


def build_cross_attention(
    config: AttentionConfig, dim: int, heads: int, layout: BlockLayout, context_layout: BlockLayout, **options: Any
) -> CrossAttention:
    """Build a cross-attention layer of the kind that ``config.kind`` names.

    Args:
        config: configuration of the layer.
        dim: width of the tokens.
        heads: number of query heads.
        layout: token grid of the queries and its partition into blocks.
        context_layout: token grid of the context and its partition into blocks.
        **options: further keyword arguments of :class:`CrossAttention`, such as ``context_dim``.

    Raises:
        ValueError: if the kind has no cross-attention, or the arguments do not fit together (see :class:`CrossAttention`).
    """
    check_cross_config(config, config.kind)
    return CrossAttention.kinds[config.kind](dim, heads, layout, context_layout, config, **options)
