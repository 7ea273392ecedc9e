"""Mixer layer of Mamba-2, a selective state-space model, as a kind of attention."""

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
    """Options of the mixer layer of Mamba-2, in addition to those of :class:`ConvolvedOptions`.

    Args:
        groups: number of key heads (B) and query heads (C), a divisor of the number of heads. None means the layer's
            ``key_value_heads`` if it is smaller than the number of heads, otherwise 1.
    """

    groups: int | None = None


class Mamba2(RecurrentAttention, kind="mamba2"):
    """Mixer layer of Mamba-2, a selective state-space model (arXiv 2405.21060, sections 6 and 7).

    In the notation of Mamba-2, queries are C, keys are B, and values are x. The width of a key is the state size N, and the
    width of a value is the head width P. B and C have only ``groups`` heads, each of which serves several heads of x.

    First, a causal depthwise convolution over 4 tokens (option ``conv``) and SiLU are applied to C, B and x. Then
    ``state = exp(dt A) state + dt B x^T`` and ``y = state^T C + D x`` are computed. The step ``dt = softplus(W u + bias)``
    depends on the token u. ``A = -exp(rate)`` and D are learned for each head. The output is ``y SiLU(z)``, normalized by one
    RMSNorm over all heads, where z is a projection of the token. There is no positional encoding.

    In the published models, N is 128, P is 64, and all heads together are twice as wide as the model. The constructor takes the
    arguments of :class:`Attention`.
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
        """Return the numbers of query (C), key (B) and value (x) heads that the input projection computes.

        C and B have as many heads as the option ``groups`` states (see :class:`Mamba2Options` for its default). A layer without
        its own projections ignores this option.

        Raises:
            ValueError: if ``groups`` does not divide the number of heads.
        """
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
        # Multiplied here and not in `operands`, because `skip` adds D x without the step.
        v = v * gates["step"][..., None].to(v.dtype)
        return state_space_dual(q, k, v, gates["log_decay"], scale=1.0, **options)

    @override
    def skip(self, out: Tensor, operands: Operands) -> Tensor:
        """Add the skip connection ``D x`` to the outputs, where x are the values and D is a learned factor of each head."""
        return out + self.through.weight.to(out.dtype)[:, None] * operands.v

    @override
    def finish(self, out: Tensor, inputs: AttentionInputs) -> Tensor:
        """Merge the heads, add the convolved values (``lepe``) if configured, apply the gate, and normalize over all heads.

        Args:
            out: output of the recurrence, ``[B, N, H, Dv]``.
            inputs: inputs of the layer.

        Returns:
            Input of the output projection, ``[B, N, H * Dv]``.
        """
        assert self.norm is not None
        return self.norm(apply_gate(merge_heads(out, inputs, self.lepe), inputs.x, self.gate, "silu"))
