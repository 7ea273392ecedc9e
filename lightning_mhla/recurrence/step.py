"""One token of a recurrence, for generation: the definition itself."""

from __future__ import annotations

import torch
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
    """Output ``[B, 1, H, V]`` and state ``[B, H, K, V]`` after one token.

    Args:
        q: ``[B, 1, H, K]``.
        k: ``[B, 1, H, K]``.
        v: ``[B, 1, H, V]``.
        log_decay: ``[B, 1, H]`` or ``[B, 1, H, K]``.
        scale: scale of the products; None for ``K ** -0.5``.
        initial_state: ``[B, H, K, V]``; None for zeros.
        beta: ``[B, 1, H]``, of the delta rule; None without it.
    """
    wide = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    query, key, value, decay = (x[:, 0].to(wide) for x in (q, k, v, log_decay))
    batch, heads, width = key.shape
    state = key.new_zeros(batch, heads, width, value.shape[-1]) if initial_state is None else initial_state.to(wide)
    state = (decay[..., None, None] if decay.dim() == 2 else decay[..., None]).exp() * state
    if beta is not None:
        value = beta[:, 0, :, None].to(wide) * (value - (key[..., None, :] @ state)[..., 0, :])
    state = state + key[..., None] * value[..., None, :]
    query = query * (width**-0.5 if scale is None else scale)
    return (query[..., None, :] @ state).transpose(1, 2).to(v.dtype), state
