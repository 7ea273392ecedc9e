"""Steps of an attention layer between attention and output projection: norm, local positional encoding and gate."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mhla.attention.config import AttentionConfig, GateActivation
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.lepe import LocalPositionalEncoding

OUTPUT_NORM_EPS = 1e-6
"""Epsilon of the RMSNorm of each head's output, as in the public code of MHLA. In bfloat16, torch's default is 0.008."""

OPEN_GATE = 1.2784645427610738
"""Input at which SiLU is 1. As the bias of a gate with zero weights, it leaves the output unchanged."""


def build_norm(config: AttentionConfig, width: int) -> nn.RMSNorm | None:
    """Build the RMSNorm for the output of each head, if the configuration has one.

    Args:
        config: configuration of the layer.
        width: number of output features of a head.

    Returns:
        The norm; None if ``config.output_norm`` is False, or if it is None and ``config.normalize`` is True.
    """
    has_norm = not config.normalize if config.output_norm is None else config.output_norm
    return nn.RMSNorm(width, OUTPUT_NORM_EPS) if has_norm else None


def merge_heads(out: Tensor, inputs: AttentionInputs, lepe: LocalPositionalEncoding | None) -> Tensor:
    """Merge the heads of an attention output, and add the local positional encoding.

    Args:
        out: attention output, ``[B, N, H, Dv]``.
        inputs: queries, keys and values of the layer. The encoding is computed from the values.
        lepe: local positional encoding; None to add nothing.

    Returns:
        Merged output, ``[B, N, H * Dv]``.
    """
    if lepe is None:
        return out.flatten(2)
    values = inputs.v.repeat_interleave(out.shape[2] // inputs.v.shape[2], 2).flatten(2)
    return out.flatten(2) + lepe(values, inputs.key_mask, inputs.placement)


def apply_gate(out: Tensor, x: Tensor, gate: nn.Module | None, activation: GateActivation) -> Tensor:
    """Multiply an attention output by the gate ``activation(gate(x))``.

    Args:
        out: attention output, ``[B, N, H * Dv]``.
        x: tokens, ``[B, N, dim]``.
        gate: projection from tokens to the features of ``out``; None to return ``out`` unchanged.
        activation: ``"silu"`` or ``"identity"``.

    Returns:
        Gated output, ``[B, N, H * Dv]``.
    """
    if gate is None:
        return out
    values = gate(x)
    return out * (values if activation == "identity" else F.silu(values))


def open_stage(gate: nn.Linear | None, lepe: LocalPositionalEncoding | None, activation: GateActivation) -> None:
    """Initialize the gate and the local positional encoding, if present, so that neither changes the layer's output.

    Args:
        gate: projection of the gate; None for a layer without a gate.
        lepe: local positional encoding; None for a layer without one.
        activation: activation of the gate, ``"silu"`` or ``"identity"``.

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
