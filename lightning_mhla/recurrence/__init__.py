"""Attention operators of baseline models: recurrences with decay, as functions of tensors.

Every function takes q and k ``[B, N, H, Dk]`` and v ``[B, N, H, Dv]``. It returns ``(out, final_state)``, of the shapes
``[B, N, H, Dv]`` and ``[B, H, Dk, Dv]``. The functions process chunks of tokens in PyTorch, without a loop over tokens. On a
GPU they use the kernels of flash-linear-attention if ``fla-core`` is installed.
"""

from lightning_mhla.recurrence.decay import retention, state_space_dual
from lightning_mhla.recurrence.delta import gated_delta_rule
from lightning_mhla.recurrence.gated import gated_linear_attention

__all__ = ["gated_delta_rule", "gated_linear_attention", "retention", "state_space_dual"]
