"""Gated linear attention: a state whose features decay at rates computed from each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.attention.config import AttentionConfig
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.recurrent import Operands, RecurrentAttention, RecurrentOptions
from lightning_mhla.recurrence import gated_linear_attention


@dataclass(frozen=True)
class GLAOptions(RecurrentOptions):
    """Options of gated linear attention.

    Args:
        direction: see :class:`RecurrentOptions`.
        backend: see :class:`RecurrentOptions`.
        decay_rank: rank of the projection that computes the decays.
        decay_divisor: divisor of the log-decays, so that decays start near 1.
    """

    decay_rank: int = 16
    decay_divisor: float = 16.0

    def __post_init__(self) -> None:
        for name in ("decay_rank", "decay_divisor"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


class GatedLinearAttention(RecurrentAttention, kind="gla"):
    """Gated linear attention (GLA, arXiv 2312.06635, section 4); arguments as for :class:`Attention`.

    The decay of a key's features at a token x is given by ``log_decay = logsigmoid(W2 W1 x + b) / 16``, with W1 of rank 16
    (options ``decay_divisor`` and ``decay_rank``). The output passes an RMSNorm for each head and a SiLU gate. There is no
    feature map, normalizer or positional encoding. In the paper, keys are half as wide as the model, which ``key_width`` sets.
    """

    Options = GLAOptions
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
        decay = F.logsigmoid(self.decay(self.reduce(inputs.x)).float()) / self.options.decay_divisor
        return Operands(inputs.q, inputs.k, inputs.v, {"log_decay": decay.unflatten(-1, (self.heads, self.key_width))})

    @override
    def recur(self, operands: Operands, **options: Any) -> tuple[Tensor, Tensor]:
        q, k, v, gates = operands
        return gated_linear_attention(q, k, v, gates["log_decay"], **options)
