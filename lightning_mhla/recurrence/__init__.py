"""Linear attention by recurrences with decay: the operators of the baselines, as functions of tensors.

Every function takes q, k ``[B, N, H, Dk]`` and v ``[B, N, H, Dv]`` and returns ``(out, final_state)``, ``[B, N, H, Dv]`` and
``[B, H, Dk, Dv]``. On a CPU they work on chunks of tokens, without a loop over tokens; on a GPU through the kernels of
flash-linear-attention where ``fla-core`` is installed.
"""

from lightning_mhla.recurrence.decay import retention, state_space_dual
from lightning_mhla.recurrence.delta import gated_delta_rule
from lightning_mhla.recurrence.gated import gated_linear_attention

__all__ = ["gated_delta_rule", "gated_linear_attention", "retention", "state_space_dual"]
