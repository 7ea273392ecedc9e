"""One step of a recurrence, for generation token by token."""

from __future__ import annotations

import torch
from mhla_kernels.problem import default_scale
from torch import Tensor


def one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one step of a recurrence: decay the state, add one token to it, and read the output.

    Args:
        q: query, ``[B, 1, H, K]``.
        k: key, ``[B, 1, H, K]``.
        v: value, ``[B, 1, H, V]``.
        log_decay: logarithm of the decay of each head, ``[B, 1, H]``, or of each key feature, ``[B, 1, H, K]``.
        scale: factor on the products of queries and keys; None for ``K ** -0.5``.
        initial_state: state before the token, ``[B, H, K, V]``; None for zeros.
        beta: share of the value stored in the state for this key that ``v`` replaces (delta rule), ``[B, 1, H]``; None for
            recurrences that only add values.

    Returns:
        Output, ``[B, 1, H, V]`` in v's dtype, and the state after the token, ``[B, H, K, V]`` in float32 (float64 for float64
        inputs).
    """
    wide = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    query, key, value, decay = (x[:, 0].to(wide) for x in (q, k, v, log_decay))
    batch, heads, width = key.shape
    state = key.new_zeros(batch, heads, width, value.shape[-1]) if initial_state is None else initial_state.to(wide)
    # Decay first: the delta rule subtracts what the decayed state holds for the key. The factor is [B, H, 1 or K, 1].
    state = (decay[..., None, None] if decay.dim() == 2 else decay[..., None]).exp() * state
    if beta is not None:
        value = beta[:, 0, :, None].to(wide) * (value - (key[..., None, :] @ state)[..., 0, :])
    state = state + key[..., None] * value[..., None, :]
    query = query * (default_scale(width) if scale is None else scale)
    return (query[..., None, :] @ state).transpose(1, 2).to(v.dtype), state
