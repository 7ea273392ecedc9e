"""The mixer of Mamba-2, a selective state-space model, as an attention kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention.config import AttentionConfig
from lightning_mhla.attention.head_decay import HeadDecay, HeadScale
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.output import apply_gate, merge_heads
from lightning_mhla.attention.recurrent import (
    NORM_EPS,
    ConvolvedOptions,
    Operands,
    RecurrentAttention,
)
from lightning_mhla.recurrence import state_space_dual


@dataclass(frozen=True)
class Mamba2Options(ConvolvedOptions):
    """Options of Mamba-2's mixer.

    Args:
        direction: see :class:`RecurrentOptions`.
        backend: see there.
        conv: see :class:`ConvolvedOptions`.
        groups: number of heads of B and C, a divisor of the number of heads. null means the number of key and value heads if
            it is smaller than the number of heads, else 1.
    """

    groups: int | None = None


class Mamba2(RecurrentAttention, kind="mamba2"):
    """The mixer of Mamba-2 (arXiv 2405.21060, sections 6 and 7); arguments as for :class:`Attention`.

    In Mamba-2's names the queries are C, the keys B and the values x; the width of a key is its state size N and that of a
    value its head width P. B and C have few heads (``groups``), which serve all those of x. All three pass a causal depthwise
    convolution over 4 tokens and SiLU. ``state = exp(dt A) state + dt B x^T`` and ``y = C state + D x``, with
    ``dt = softplus(W x + bias)``, A = -exp(rate) and D learned for each head; then an RMSNorm over all heads together of
    ``y SiLU(z)``, z being a projection of the input. No position. Mamba-2 has N = 128, P = 64 and heads that are together
    twice as wide as the model.
    """

    Options = Mamba2Options
    options: Mamba2Options
    conv_bias = True

    def __init__(self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig, **options: Any) -> None:
        super().__init__(dim, heads, layout, config, **options)
        self.decay = HeadDecay(dim, heads, 1.0)
        self.through = HeadScale(heads)
        self.norm = nn.RMSNorm(heads * self.value_width, NORM_EPS)

    @override
    def projected_heads(self) -> tuple[int, int, int]:
        """Return ``groups`` heads for B and C; another module's projections have their own."""
        if not self.projects:
            return super().projected_heads()
        fewer = self.key_value_heads if self.key_value_heads < self.heads else 1
        groups = fewer if self.options.groups is None else self.options.groups
        if groups < 1 or self.heads % groups:
            raise ValueError(f"groups={groups} must divide the {self.heads} heads")
        return groups, groups, self.heads

    @override
    def reset_gates(self) -> None:
        self.decay.reset_parameters()
        nn.init.trunc_normal_(self.decay.proj.weight, std=0.02)
        self.through.reset_parameters()

    @override
    def operands(self, inputs: AttentionInputs) -> Operands:
        steps, decay = self.decay(inputs.x)
        return Operands(inputs.q, inputs.k, inputs.v, {"log_decay": decay, "step": steps})

    @override
    def recur(self, operands: Operands, **options: Any) -> tuple[Tensor, Tensor]:
        q, k, v, gates = operands
        v = v * gates["step"][..., None].to(v.dtype)
        return state_space_dual(q, k, v, gates["log_decay"], scale=1.0, **options)

    @override
    def skip(self, out: Tensor, operands: Operands) -> Tensor:
        """Add D x."""
        return out + self.through.weight.to(out.dtype)[:, None] * operands.v

    @override
    def finish(self, out: Tensor, inputs: AttentionInputs) -> Tensor:
        """Apply the gate first, then one norm over all heads."""
        assert self.norm is not None
        return self.norm(apply_gate(merge_heads(out, inputs, self.lepe), inputs.x, self.gate, "silu"))
