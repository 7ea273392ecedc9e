"""Gated DeltaNet: attention with a decaying state, in which each token replaces the value stored under its key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention.config import AttentionConfig
from lightning_mhla.attention.head_decay import HeadDecay
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.recurrent import ConvolvedOptions, Operands, RecurrentAttention
from lightning_mhla.recurrence import gated_delta_rule


class GatedDeltaNet(RecurrentAttention, kind="gated_deltanet"):
    """Attention layer of Gated DeltaNet (arXiv 2412.06464, section 3.4).

    A causal depthwise convolution over 4 tokens (option ``conv``) and SiLU are applied to queries, keys and values. Queries and
    keys are then normalized to unit length. For a token x, each head has the gates ``beta = sigmoid(W_b x)`` and
    ``log_decay = -exp(rate) softplus(W_a x + bias)`` of :func:`lightning_mhla.recurrence.gated_delta_rule`, where ``W_a``,
    ``W_b``, ``rate`` and ``bias`` are learned. The output of each head is normalized by an RMSNorm and multiplied by a SiLU
    gate. There is no positional encoding. The constructor takes the arguments of :class:`Attention`.
    """

    Options = ConvolvedOptions
    recurrence = staticmethod(gated_delta_rule)
    options: ConvolvedOptions

    def __init__(self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig, **options: Any) -> None:
        super().__init__(dim, heads, layout, config, **options)
        self.decay = HeadDecay(dim, heads, 0.0)
        self.beta = nn.Linear(dim, heads, bias=False)

    @override
    def reset_gates(self) -> None:
        self.decay.reset_parameters()
        for layer in (self.decay.proj, self.beta):
            nn.init.trunc_normal_(layer.weight, std=0.02)

    @override
    def operands(self, inputs: AttentionInputs) -> Operands:
        q, k = (_of_length_one(x) for x in (inputs.q, inputs.k))
        _, decay = self.decay(inputs.x)
        return Operands(q, k, inputs.v, {"beta": self.beta(inputs.x).sigmoid(), "log_decay": decay})


def _of_length_one(x: Tensor) -> Tensor:
    """Divide vectors ``[..., D]`` by the square root of their squared length plus 1e-6. Sums are in float32 or wider."""
    wide = x.float() if x.dtype != torch.float64 else x
    # The constant is inside the root, so that the gradient at a zero vector is finite.
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
