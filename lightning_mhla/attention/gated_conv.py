"""Gated short convolution, a layer to alternate with layers of linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mhla_kernels.blocks import TokenLayout
from mhla_kernels.checks import check_packed
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.base import Attention
from lightning_mhla.attention.config import MIXING_OPTIONS, AttentionConfig
from lightning_mhla.attention.inputs import AttentionInputs, check_state
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.lepe import hide_rows
from lightning_mhla.attention.positions import sequence_positions
from lightning_mhla.attention.recurrent import RecurrentState
from lightning_mhla.attention.short_conv import ShortConvolution


@dataclass(frozen=True)
class ConvolutionOptions:
    """Options of the gated convolution.

    Args:
        conv: width of the convolution: the number of tokens that each output depends on, including the output's own token.

    Raises:
        ValueError: if ``conv`` is less than 1.
    """

    conv: int = 3

    def __post_init__(self) -> None:
        if self.conv < 1:
            raise ValueError(f"conv={self.conv} must be positive")


class GatedConvolution(Attention, kind="gated_conv"):
    """Gated short convolution ``q * conv(v)``: a causal depthwise convolution of the values, multiplied by the queries.

    This is BaseConv of Zoology and Based (arXiv 2312.04927, equation 3; arXiv 2402.18668), which alternates with attention
    layers. Queries are as wide as values, and there are no keys. The constructor takes the arguments of :class:`Attention`,
    but ignores ``key_width``.

    Raises:
        ValueError: if ``projections`` is False, or for the same reasons as in :class:`Attention`.
    """

    Options = ConvolutionOptions
    options: ConvolutionOptions
    handles = ("key_mask", "rotary", "cu_seqlens")
    unused = (*MIXING_OPTIONS, "normalize", "feature_map", "output_norm", "rotary")
    causal_only = True

    def __init__(self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig, **options: Any) -> None:
        super().__init__(dim, heads, layout, config, **{**options, "key_width": options.get("value_width")})
        if not self.projects:
            raise ValueError("gated_conv gates values by queries, and needs projections of its own")
        self.conv = ShortConvolution(heads * self.value_width, self.options.conv, bias=True)

    @override
    def projected_heads(self) -> tuple[int, int, int]:
        """Return the numbers of query, key and value heads that the input projection computes. There are no key heads."""
        return self.heads, 0, self.heads

    @override
    def operator_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs  # there are no keys to repeat

    @override
    def attend(self, inputs: AttentionInputs) -> Tensor:
        positions = None
        if inputs.cu_seqlens is not None:
            rows, tokens = inputs.x.shape[:2]
            # the operator's check reads no bounds from a GPU, and none that torch traces
            packed = check_packed(TokenLayout(tokens, 1), inputs.cu_seqlens, rows, None, True, lambda _: None)
            positions = sequence_positions(inputs.x, packed.cu_seqlens)
        return self._gated(inputs, None, positions)

    @override
    def continue_from(
        self, inputs: AttentionInputs, state: RecurrentState | None, counts: Sequence[int]
    ) -> tuple[Tensor, RecurrentState]:
        check_state(state, RecurrentState, self.config.kind)
        last = None if state is None else state.last
        previous_lengths = (0,) * len(counts) if state is None else state.lengths
        after = RecurrentState(
            tuple(a + b for a, b in zip(previous_lengths, counts, strict=True)),
            # no recurrence, whose state has a row for each row of the batch
            inputs.v.new_empty(len(counts), 0),
            self.conv.carry(inputs.v.flatten(2), last, counts),
            self.config.kind,
        )
        return self._gated(inputs, last, None), after

    @override
    def weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the convolution weights as an attention matrix ``[B, H, N, N]``.

        The weights are averaged over the features of each head. They do not include the queries, which act as a gate.
        """
        tokens, taps = inputs.x.shape[1], self.options.conv
        back = torch.arange(tokens, device=inputs.x.device)[:, None] - torch.arange(tokens, device=inputs.x.device)
        head_weights = self.conv.weight.flip(0).unflatten(-1, (self.heads, -1)).mean(-1).T  # [H, taps], own token first
        # Clamped, because indices outside the taps are evaluated too before `where` drops them.
        matrix = torch.where((back >= 0) & (back < taps), head_weights[:, back.clamp(0, taps - 1)], 0)
        return matrix.expand(len(inputs.x), -1, -1, -1)

    @override
    def operator_flops(self, tokens: int) -> float:
        return 2.0 * tokens * self.conv.weight.numel()

    def _gated(self, inputs: AttentionInputs, last: Tensor | None, positions: Tensor | None) -> Tensor:
        mixed = self.conv(hide_rows(inputs.v, inputs.key_mask).flatten(2), last, positions)
        return hide_rows(inputs.q * mixed.unflatten(-1, inputs.q.shape[2:]), inputs.key_mask)
