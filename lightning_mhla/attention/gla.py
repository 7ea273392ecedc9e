"""Gated linear attention: attention with a recurrent state whose decay rates are computed from each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.attention.config import AttentionConfig
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.recurrent import Operands, RecurrentAttention, RecurrentOptions
from lightning_mhla.recurrence import gated_linear_attention


@dataclass(frozen=True)
class GLAOptions(RecurrentOptions):
    """Options of gated linear attention, in addition to those of :class:`RecurrentOptions`.

    Args:
        decay_rank: rank of the projection from tokens to decays.
        decay_divisor: number by which the log-decays are divided. A larger number makes the initial decays closer to 1.

    Raises:
        ValueError: if ``decay_rank`` or ``decay_divisor`` is not positive.
    """

    decay_rank: int = 16
    decay_divisor: float = 16.0

    def __post_init__(self) -> None:
        for name in ("decay_rank", "decay_divisor"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


class GatedLinearAttention(RecurrentAttention, kind="gla"):
    """Gated linear attention (GLA, arXiv 2312.06635, section 4).

    For a token x, the log-decays of the key features are ``logsigmoid(W2 W1 x + b) / 16``, where W1 x has width 16. The options
    ``decay_divisor`` and ``decay_rank`` change these two numbers. The output of each head is normalized by an RMSNorm and
    multiplied by a SiLU gate. There is no feature map, normalizer or positional encoding. In the paper, all keys of a token
    together are half as wide as the token; set ``key_width`` accordingly. The constructor takes the arguments of
    :class:`Attention`.
    """

    Options = GLAOptions
    recurrence = staticmethod(gated_linear_attention)
    options: GLAOptions

    def __init__(self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig, **options: Any) -> None:
        super().__init__(dim, heads, layout, config, **options)
        rank = self.options.decay_rank
        self.reduce = nn.Linear(dim, rank, bias=False)
        self.decay = nn.Linear(rank, heads * self.key_width)

    @override
    def reset_gates(self) -> None:
        for layer in (self.reduce, self.decay):
            nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.decay.bias)

    @override
    def operands(self, inputs: AttentionInputs) -> Operands:
        wide = torch.promote_types(inputs.x.dtype, torch.float32)
        decay = F.logsigmoid(self.decay(self.reduce(inputs.x)).to(wide)) / self.options.decay_divisor
        return Operands(inputs.q, inputs.k, inputs.v, {"log_decay": decay.unflatten(-1, (self.heads, self.key_width))})
