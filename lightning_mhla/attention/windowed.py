"""MHLA with a softmax window, which combines softmax attention to near tokens with mixed summaries of distant blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
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
from lightning_mhla.attention.mixing import DenseCoefficients
from lightning_mhla.attention.positions import PositionLimit, SequenceRotary


class FarWeight(nn.Module):
    """Learned factor for each head that multiplies the attention weights of far tokens.

    Far tokens are the tokens outside the softmax window. The factors are stored as logarithms.

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


@dataclass(frozen=True)
class WindowOptions:
    """Options of attention kind ``"mhla_window"``.

    Args:
        far_init: number added to the initial logarithms of the factors that multiply the attention weights of far tokens (those
            outside the softmax window). With a negative number, training starts closer to attention to near tokens only. With
            ``-.inf``, attention is always to near tokens only.
        feature_positions: number of positions that features for far tokens distinguish by rotary embedding; tokens at later
            positions get the features of the last of these positions. With 1, features ignore positions. None for all
            positions, which works only up to the length of the training texts. Only for causal attention.
        sinks: number of tokens at the start of each sequence that every token attends to by softmax (attention sinks,
            StreamingLLM, arXiv 2309.17453). It is at most the block size. Images and video do not use it: their prefix tokens,
            such as a class token, are always sinks.

    Raises:
        ValueError: if ``sinks`` is negative, ``feature_positions`` is not positive, or ``far_init`` is NaN or positive
            infinity.
    """

    far_init: float = 0.0
    feature_positions: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.feature_positions is not None and self.feature_positions < 1:
            raise ValueError(f"feature_positions={self.feature_positions} must be positive, or null for all positions")
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks} must not be negative")
        if not self.far_init < math.inf:
            raise ValueError(f"far_init={self.far_init} must be a number, or -.inf")


class WindowedMHLA(MHLA, kind="mhla_window"):
    """Attention layer that reads near tokens by softmax attention and all other tokens by MHLA.

    In causal attention, the near tokens are in the current block and the previous one. Otherwise they are in the current block
    and in the blocks next to it, along each axis and diagonally. Sinks, the first tokens of a sequence or the prefix tokens of
    an image, are near for every token. In bidirectional attention, sinks also attend to every token by softmax.

    :func:`mhla_kernels.mhla_window_attention` computes the attention. The feature map is applied after rotary embedding.
    ``feature_map`` may be:

    - ``relu`` or ``sana``. Both are ``relu(x)`` here, without the small constant that MHLA adds, because near tokens keep the
      sum of weights above zero.
    - ``elu``, ``softplus`` or ``learned``.

    ``identity`` is not supported, because weights must not be negative.

    The weights of tokens outside the softmax window are multiplied by a learned factor for each head (:class:`FarWeight`). The
    feature map ``learned`` divides the features of each query by the largest of them, and the layer multiplies the factor by
    the same number to compensate. The weights of a query always sum to 1, regardless of ``normalize``. The constructor takes
    the arguments of :class:`Attention`.

    Raises:
        ValueError: if the feature map is ``identity``, ``sinks`` exceeds the block size, or ``feature_positions`` is set and
            the layer is not causal; also for the same reasons as in :class:`MHLA`.
    """

    Options = WindowOptions
    mixes_prefix = False  # prefix tokens are sinks
    block_causal = False
    handles = ("key_mask", "rotary", "cu_seqlens")
    unused = ("normalize", "normalize_before_rotary", "key_weighting", "output_norm")

    def __init__(
        self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig | None = None, **options: Any
    ) -> None:
        config = config or AttentionConfig(kind="mhla_window", block_size=layout.block_size)
        super().__init__(dim, heads, layout, config, **options)
        if config.feature_map == "identity":
            raise ValueError("attention kind 'mhla_window' needs features that are not negative, unlike 'identity'")
        if self.options.sinks > (smallest := layout.block_size or layout.block_sizes[0]):
            raise ValueError(f"options.sinks={self.options.sinks} exceeds the {smallest} tokens of a block")
        learned = self.features is not None
        # Far tokens start on the scale of softmax weights. At q = k = 0, where these are exp(0) = 1, the 2 Dk learned features
        # are 1 and their products sum to 2 Dk. Products of other features are divided by sqrt(Dk), as scores are.
        start = -math.log(2 * self.key_width) if learned else -0.5 * math.log(self.key_width)
        self.far = FarWeight(heads, start + self.options.far_init)
        self.context: PositionLimit | None = None
        """Limit on the positions from which queries read the sinks: the length of the layout that the layer was built with.
        None without rotary positions. In a layer without projections, the module that provides the projections sets it."""
        if isinstance(self.rotary, SequenceRotary) and self.projects:
            self.context = PositionLimit(self.rotary.frequencies, layout.num_tokens)
        if self.options.feature_positions and not self.causal:
            raise ValueError("options.feature_positions is for causal attention; leave it out")

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        # dense coefficients had a row and a column for prefix tokens, which changed no output
        key = f"{prefix}mixing.weight"
        if self.layout.prefix_tokens and isinstance(self.mixing, DenseCoefficients) and key in state_dict:
            saved = state_dict[key]
            if saved.shape[-1] == self.mixing.weight.shape[-1] + 1:
                state_dict[key] = saved[..., 1:, 1:]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @override
    def operator_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs  # near tokens are read with fewer key heads than query heads

    def _parts(self, inputs: AttentionInputs, lengths: Sequence[int] = ()) -> dict[str, Any]:
        """Compute the tensors that the functions for windowed attention take as keyword arguments.

        Args:
            inputs: inputs of the attention.
            lengths: number of previous tokens in each row; empty if there are none.

        Returns:
            Dict with these entries:

            - ``q``, ``k`` and ``v``: queries, keys and values.
            - ``q_features`` and ``k_features``: features of queries and keys for far tokens, which are the tokens outside the
              softmax window.
            - ``far``: logarithms ``[B, N, H]`` of the factors that multiply the attention weights of far tokens.
            - ``sink_q``: queries that read the sinks, if they differ from ``q``. This is the case in causal attention with
              sinks if some tokens are at positions beyond the limit ``self.context``.
        """
        q, k = inputs.turned
        parts: dict[str, Any] = {"q": q, "k": k, "v": inputs.v}
        far_q, far_k = q, k
        if self.causal and self.context is not None:
            new: dict[str, Any] = {"lengths": lengths, "cu_seqlens": inputs.cu_seqlens}
            # `apply` returns the same tensor if no token is beyond the limit; the sinks are then read with q itself.
            if self.options.sinks and (sink_q := self.context.apply(q, **new)[0]) is not q:
                parts["sink_q"] = sink_q
            if (tokens := self.options.feature_positions) is not None:
                far_q, far_k = replace(self.context, tokens=tokens).apply(q, k, **new)
        far_k = far_k.repeat_interleave(self.heads // k.shape[2], 2)
        far = self.far.weight.to(torch.promote_types(q.dtype, torch.float32)).expand(q.shape[:3])
        if self.features is not None:
            f, largest, g = self.features(far_q, far_k)
            far = far + largest
        else:
            f, g, remaining_map = apply_features(far_q, far_k, self.config.feature_map)
            if remaining_map == "relu":
                f, g = F.relu(f), F.relu(g)
        return {**parts, "q_features": f, "k_features": g, "far": far}

    def _blocks(self) -> dict[str, Any]:
        return {"mixing": self.mixing(), "block_size": self.blocks["block_size"], "sinks": self.options.sinks}

    @override
    def attend(self, inputs: AttentionInputs) -> Tensor:
        parts: dict[str, Any] = {**self._parts(inputs), "key_mask": inputs.key_mask}
        if self.causal:
            return mhla_window_attention(**parts, **self._blocks(), cu_seqlens=inputs.cu_seqlens)
        if inputs.cu_seqlens is not None:
            raise ValueError(
                "attention kind 'mhla_window' takes cu_seqlens only in causal attention; pad the rows instead"
            )
        mixing, blocks = self.coefficients(inputs.q, inputs.placement)
        layout = self.layout if inputs.placement is None else inputs.placement.layout
        if len(layout.grid) > 1 or layout.prefix_tokens:
            blocks = {**blocks, "block_grid": layout.block_grid, "sinks": layout.prefix_tokens}
        else:
            blocks = {**blocks, "sinks": self.options.sinks}
        return mhla_window_attention(**parts, mixing=mixing, causal=False, **blocks)

    @override
    def weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the attention matrix ``[B, H, N, N]``, computed with :meth:`attend` from one-hot values."""
        # Not super().weights, which computes the matrix from summaries alone, without the softmax window.
        return Attention.weights(self, inputs.repeated(self.heads // inputs.k.shape[2]))

    @override
    def continue_from(
        self, inputs: AttentionInputs, state: MHLAWindowState | None, counts: Sequence[int]
    ) -> tuple[Tensor, MHLAWindowState]:
        parts = self._parts(inputs, () if state is None else state.lengths)
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
        block = self.layout.num_tokens / self.layout.num_blocks
        # the current block counts half in causal attention; otherwise there are three blocks along each axis, if it has as many
        near = 1.5 if self.causal else prod(min(3, count) for count in self.layout.block_grid)
        sinks = self.layout.prefix_tokens or self.options.sinks
        keys = near * block + (sinks if self.causal else 2 * sinks)
        pairs = 2.0 * self.heads * tokens * keys * (self.key_width + self.value_width)
        return pairs + self.summary_flops(tokens, None, self.summaries_mixed(tokens))
