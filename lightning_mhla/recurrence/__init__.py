"""Recurrences of baseline models, such as retention and gated linear attention, as functions of tensors.

Each function takes queries and keys ``[B, N, H, Dk]`` and values ``[B, N, H, Dv]``. It returns the outputs ``[B, N, H, Dv]``
and the final state ``[B, H, Dk, Dv]``. On a GPU, the functions use the kernels of flash-linear-attention if ``fla-core`` is
installed. Otherwise they process chunks of tokens in PyTorch, without a loop over tokens.
"""

from lightning_mhla.recurrence.decay import retention, state_space_dual
from lightning_mhla.recurrence.delta import gated_delta_rule
from lightning_mhla.recurrence.gated import gated_linear_attention

__all__ = ["gated_delta_rule", "gated_linear_attention", "retention", "state_space_dual"]
