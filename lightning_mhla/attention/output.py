"""Stage between an operator and the projection of its output: norm, local positional encoding, gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mhla.attention.config import AttentionConfig, GateActivation
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.lepe import LocalPositionalEncoding

OUTPUT_NORM_EPS = 1e-6
"""Epsilon of the RMSNorm of each head's output, as in the paper's public code; torch's default in bfloat16 is 0.008."""

OPEN_GATE = 1.2784645427610738
"""Bias at which SiLU is 1."""


def build_norm(config: AttentionConfig, width: int) -> nn.RMSNorm | None:
    """Build the RMSNorm over the ``width`` output features of a head; None if the configuration has no such norm."""
    has_norm = not config.normalize if config.output_norm is None else config.output_norm
    return nn.RMSNorm(width, OUTPUT_NORM_EPS) if has_norm else None


def merge_heads(out: Tensor, inputs: AttentionInputs, lepe: LocalPositionalEncoding | None) -> Tensor:
    """Merge the heads, ``[B, N, H, Dv]`` to ``[B, N, H * Dv]``, and add the values convolved by ``lepe`` unless it is None."""
    if lepe is None:
        return out.flatten(2)
    values = inputs.v.repeat_interleave(out.shape[2] // inputs.v.shape[2], 2).flatten(2)
    return out.flatten(2) + lepe(values, inputs.key_mask, inputs.placement)


def apply_gate(out: Tensor, x: Tensor, gate: nn.Module | None, activation: GateActivation) -> Tensor:
    """Multiply ``out`` ``[B, N, H * Dv]`` by ``activation(gate(x))`` for tokens ``x``; return it unchanged without a gate."""
    if gate is None:
        return out
    values = gate(x)
    return out * (values if activation == "identity" else F.silu(values))


@torch.no_grad()
def open_stage(gate: nn.Linear | None, lepe: LocalPositionalEncoding | None, activation: GateActivation) -> None:
    """Initialize the output gate and ``lepe``, if there are any, so that they leave the output unchanged.

    Raises:
        ValueError: if the gate has no bias.
    """
    if lepe is not None:
        for parameter in lepe.parameters():
            nn.init.zeros_(parameter)
    if gate is not None:
        if gate.bias is None:
            raise ValueError("weights without a gate cannot start a layer whose gate has no bias; set gate: false")
        nn.init.zeros_(gate.weight)
        nn.init.constant_(gate.bias, 1.0 if activation == "identity" else OPEN_GATE)
