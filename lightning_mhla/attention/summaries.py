"""Base class of kinds of attention that read key-value summaries of blocks, such as mhla and linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from mhla_kernels import attention_matrix, mhla_attention, mhla_prefill, mhla_step
from mhla_kernels.mixing import MixingLike
from mhla_kernels.sequence_parallel import mhla_sequence_parallel
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.base import Attention
from lightning_mhla.attention.config import AttentionConfig
from lightning_mhla.attention.features import LearnedFeatures, apply_features
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.layout import BlockLayout, Placement
from lightning_mhla.attention.lepe import hide_rows

EPS, SANA_EPS = 1e-6, 1e-15
"""Constants added to the normalizer: the default, and the one in diffusers' ``SanaLinearAttnProcessor2_0``."""


class SummaryAttention(Attention):
    """Base class of linear attention in which the queries of a block read mixed key-value summaries of blocks.

    The summary of a block is the sum of ``k v^T`` over its tokens. A mixed summary is a weighted sum of summaries. Derived
    classes implement :meth:`coefficients`, which returns the mixing coefficients. :func:`mhla_kernels.mhla_attention` computes
    the attention. The constructor takes the arguments of :class:`Attention`.

    Raises:
        ValueError: if the layer is causal and its configuration sets ``key_weighting`` or ``normalize_before_rotary``, or for
            the same reasons as in :class:`Attention`.
    """

    handles: ClassVar[tuple[str, ...]] = ("key_mask", "rotary", "cu_seqlens", "share")

    def __init__(self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig, **options: Any) -> None:
        super().__init__(dim, heads, layout, config, **options)
        if self.causal:
            for name in ("key_weighting", "normalize_before_rotary"):
                if getattr(self.config, name):
                    raise ValueError(f"{name} is for attention that sees every token; leave it out of causal attention")
        self.features = LearnedFeatures(heads, self.key_width) if self.config.feature_map == "learned" else None

    def coefficients(self, q: Tensor, placement: Placement | None = None) -> tuple[MixingLike, dict[str, Any]]:
        """Return the mixing coefficients, and a keyword argument that describes the blocks.

        Args:
            q: queries after the feature map, ``[B, N, H, D]``.
            placement: permutation of the tokens into block order, for this call only; None for the layout of the last
                :meth:`fit`.

        Returns:
            Mixing coefficients, either a dense tensor or a ``Mixing`` object, and a dict with the argument ``block_size`` or
            ``block_offsets`` for the functions of ``mhla_kernels``.
        """
        raise NotImplementedError

    @override
    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute the attention outputs ``[B, N, H, Dv]`` of all tokens.

        If sequences are distributed over processes, the processes of the group must call this method together.
        """
        if self._normalizes_before_rotary(inputs):
            return self._attend_normalized(inputs)
        q, k, mixing, options = self._operands(inputs)
        share = inputs.share
        if share is None:
            return mhla_attention(
                q, k, inputs.v, mixing, causal=self.causal, key_mask=inputs.key_mask, cu_seqlens=inputs.cu_seqlens, **options
            )  # fmt: skip
        options["block_size"] = share.block_size  # linear attention is the same in blocks of any size
        return mhla_sequence_parallel(
            q, k, inputs.v, mixing, group=share.group, tokens=share.tokens, causal=True, **options
        )

    def _normalizes_before_rotary(self, inputs: AttentionInputs) -> bool:
        return self.config.normalize and inputs.rotary is not None and self.features is None

    def _attend_normalized(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention outputs ``[B, N, H, Dv]`` with rotary embedding in the weights, but not in the normalizer."""
        # Never causal: with rotary, a normalizer requires normalize_before_rotary, which a causal layer rejects.
        q, k, mixing, options = self._operands(inputs)
        plain_q, plain_k, _, plain = self._operands(replace(inputs, rotary=None))
        eps = plain.pop("eps")
        for call_options in (options, plain):
            call_options |= {"normalize": False, "scale": 1.0, "key_mask": inputs.key_mask, "eps": eps}
        out = mhla_attention(q, k, inputs.v, mixing, **options)
        wide = torch.promote_types(inputs.q.dtype, torch.float32)
        # With values of 1, the output is the sum of a query's weights. It is the divisor, so it is not rounded to bfloat16.
        ones = inputs.v.new_ones(*inputs.v.shape[:3], 1, dtype=wide)
        sums = mhla_attention(plain_q.to(wide), plain_k.to(wide), ones, mixing, **plain)
        return hide_rows((out / (sums + eps)).to(inputs.v.dtype), inputs.key_mask)

    @override
    def weights(self, inputs: AttentionInputs) -> Tensor:
        if self._normalizes_before_rotary(inputs):
            return super().weights(inputs)
        q, k, mixing, options = self._operands(inputs)
        return attention_matrix(q, k, mixing, causal=self.causal, key_mask=inputs.key_mask, **options)

    @override
    def continue_from(self, inputs: AttentionInputs, state: Any, counts: Sequence[int]) -> tuple[Tensor, Any]:
        (q, k, mixing, options), v = self._operands(inputs), inputs.v
        if self.causal == "block":
            if state is not None and set(counts) == {options["block_size"]} == {q.shape[1]}:
                return mhla_step(q, k, v, mixing, state, causal="block", donate_state=True, **options)
            return mhla_prefill(q, k, v, mixing, causal="block", lengths=counts, state=state, **options)
        if state is not None and q.shape[1] == 1 and all(counts):
            out, state = mhla_step(q[:, 0], k[:, 0], v[:, 0], mixing, state, donate_state=True, **options)
            return out[:, None], state
        return mhla_prefill(q, k, v, mixing, lengths=counts, state=state, **options)

    def summary_flops(self, tokens: int, chunk: float | None, mixed: float) -> float:
        """Return the number of floating-point operations of attention with block summaries on one sequence.

        The number includes building, mixing and reading the summaries, causal attention inside blocks, and learned features.

        Args:
            tokens: number of tokens of the sequence.
            chunk: average number of tokens in a block, for causal attention inside blocks; None if attention inside blocks is
                not causal, as in bidirectional and block-causal attention.
            mixed: number of weighted summaries that are added up in each head, in total over all blocks of the sequence.
        """
        width = self.key_width if self.features is None else 2 * self.key_width
        summary = width * self.value_width
        inside = 0.0 if chunk is None else (chunk + 1) / 2 * (width + self.value_width)
        mapped = 0 if self.features is None else 2 * self.key_width**2
        return 2.0 * self.heads * (tokens * (2 * summary + inside + mapped) + mixed * summary)

    def _operands(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, MixingLike, dict[str, Any]]:
        if self.features is not None:
            q, _, k = self.features(*inputs.turned)  # a factor on a query's features means nothing
            feature_map = "identity"
        else:
            q, k, feature_map = apply_features(
                inputs.q, inputs.k, self.config.feature_map, inputs.rotary, self.config.key_weighting, inputs.key_mask
            )
        mixing, blocks = self.coefficients(q, inputs.placement)
        eps = self.normalizer_eps(inputs)
        return q, k, mixing, {"normalize": self.config.normalize, "feature_map": feature_map, "eps": eps, **blocks}

    def normalizer_eps(self, inputs: AttentionInputs) -> float:
        """Return the small constant that is added to the sum of a query's attention weights before dividing by this sum.

        Derived classes may choose it by ``inputs``, for example by the number of tokens.
        """
        return SANA_EPS if self.config.feature_map == "sana" else EPS
