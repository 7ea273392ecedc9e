"""MHLA with a softmax window: softmax attention to near tokens, mixed summaries of distant blocks, a common normalizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from mhla_kernels import MHLAWindowState, mhla_window_attention, mhla_window_prefill, mhla_window_step
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.attention.base import Attention
from lightning_mhla.attention.config import AttentionConfig
from lightning_mhla.attention.features import apply_features
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.mhla import MHLA


class FarWeight(nn.Module):
    """Learned factor for each head that multiplies the attention weights of far tokens.

    Far tokens are the tokens before the softmax window. The factors are stored as logarithms.

    Args:
        heads: number of heads.
        start: initial value of the logarithms.
    """

    def __init__(self, heads: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the logarithm of each head's factor to its initial value, ``start``."""
        nn.init.constant_(self.weight, self.start)


class WindowedMHLA(MHLA, kind="mhla_window"):
    """Causal attention: softmax over the current and the previous block, MHLA over earlier blocks.

    :func:`mhla_kernels.mhla_window_attention` computes the attention. The feature map is applied after rotary embedding.
    ``feature_map`` may be:

    - ``relu`` or ``sana``, which are both ``relu(x)`` here. Unlike in MHLA, no small constant is added to them, since near
      tokens keep the sum of weights above zero;
    - ``elu``, ``softplus`` or ``learned``.

    ``identity`` is not supported, because weights must not be negative.

    The weights of tokens before the softmax window are multiplied by a learned factor for each head (:class:`FarWeight`). The
    feature map ``learned`` divides the features of each query by the largest of them, and the layer multiplies the factor by
    the same number to compensate. The weights of a query always sum to 1, regardless of ``normalize``. The constructor takes
    the arguments of :class:`Attention`.
    """

    causal_only = True
    handles = ("key_mask", "rotary", "cu_seqlens")
    unused = ("normalize", "output_norm")

    def __init__(
        self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig | None = None, **options: Any
    ) -> None:
        config = config or AttentionConfig(kind="mhla_window", block_size=layout.block_size)
        super().__init__(dim, heads, layout, config, **options)
        if config.feature_map == "identity":
            raise ValueError("attention kind 'mhla_window' needs features that are not negative, unlike 'identity'")
        learned = self.features is not None
        self.far = FarWeight(heads, -math.log(2 * self.key_width) if learned else -0.5 * math.log(self.key_width))

    @override
    def operator_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs  # near tokens are read with fewer key heads than query heads

    def _parts(self, inputs: AttentionInputs) -> dict[str, Any]:
        """Compute the keyword arguments of the windowed attention.

        They are the queries, keys and values, the features of queries and keys for far tokens (those before the softmax
        window), and the logarithms ``[B, N, H]`` of the factors that multiply the attention weights of far tokens.
        """
        q, k = inputs.turned
        every = k.repeat_interleave(self.heads // k.shape[2], 2)
        far = self.far.weight.float().expand(q.shape[:3])
        if self.features is not None:
            f, largest, g = self.features(q, every)
            far = far + largest
        else:
            f, g, remaining_map = apply_features(q, every, self.config.feature_map)
            if remaining_map == "relu":
                f, g = F.relu(f), F.relu(g)
        return {"q": q, "k": k, "v": inputs.v, "q_features": f, "k_features": g, "far": far}

    def _blocks(self) -> dict[str, Any]:
        return {"mixing": self.mixing(), "block_size": self.blocks["block_size"]}

    @override
    def attend(self, inputs: AttentionInputs) -> Tensor:
        masks: dict[str, Any] = {"key_mask": inputs.key_mask, "cu_seqlens": inputs.cu_seqlens}
        return mhla_window_attention(**self._parts(inputs), **self._blocks(), **masks)

    @override
    def weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the attention matrix ``[B, H, N, N]``, computed by :meth:`attend` with one-hot values."""
        heads = self.heads // inputs.k.shape[2]
        k, v = (x.repeat_interleave(heads, 2) for x in (inputs.k, inputs.v))
        return Attention.weights(self, replace(inputs, k=k, v=v))

    @override
    def continue_from(
        self, inputs: AttentionInputs, state: MHLAWindowState | None, counts: Sequence[int]
    ) -> tuple[Tensor, MHLAWindowState]:
        parts = self._parts(inputs)
        if state is not None and inputs.q.shape[1] == 1 and all(counts):
            token = {name: x[:, 0] for name, x in parts.items()}
            out, state = mhla_window_step(**token, **self._blocks(), state=state, donate_state=True)
            return out[:, None], state
        return mhla_window_prefill(**parts, **self._blocks(), lengths=counts, state=state)

    @override
    def operator_flops(self, tokens: int) -> float:
        """Return the number of floating-point operations of softmax over near tokens and MHLA over distant blocks.

        Args:
            tokens: number of tokens of one sequence.
        """
        near = 1.5 * self.layout.num_tokens / self.layout.num_blocks
        pairs = 2.0 * self.heads * tokens * near * (self.key_width + self.value_width)
        return pairs + self.summary_flops(tokens, None, self.summaries_mixed(tokens))
