"""Calls to the GPU kernels of flash-linear-attention (package ``fla-core``)."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from mhla_kernels.backend import BACKENDS
from torch import Tensor


@cache
def installed() -> bool:
    """Return whether fla-core is installed, without importing it."""
    return find_spec("fla") is not None


def chosen(backend: str, q: Tensor, widest: int | None = None) -> bool:
    """Return whether a recurrence uses the Triton kernels of flash-linear-attention (fla-core) instead of PyTorch.

    Args:
        backend: ``"torch"``, ``"triton"``, or ``"auto"`` to use the kernels if they can run.
        q: queries, ``[B, N, H, Dk]``.
        widest: largest Dk that the kernels support; None for no limit.

    Raises:
        ValueError: if the backend is unknown, or if it is ``"triton"`` and the kernels cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}")
    fits = widest is None or q.shape[-1] <= widest
    able = installed() and q.is_cuda and q.dtype != torch.float64 and fits
    if backend == "triton" and not able:
        reason = "fla-core is not installed (pip install 'lightning-mhla[fla]')"
        if installed():
            limit = "" if widest is None else f", keys of at most {widest} features"
            reason = (
                f"they take tensors on a GPU, not float64{limit}; these are {list(q.shape)}, {q.dtype} on {q.device}"
            )
        raise ValueError(f"backend='triton' needs the kernels of flash-linear-attention: {reason}; use backend='auto'")
    return able and backend != "torch"


def state_space_dual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float | None,
    state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Compute the state-space dual of Mamba-2 with fla-core's GPU kernel.

    Unlike :func:`lightning_mhla.recurrence.state_space_dual`, this function does not check its arguments.

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        log_decay: logarithm of the decay at each token, ``[B, N, H]``, at most 0.
        scale: factor on the products of queries and keys; None for ``Dk ** -0.5``.
        state: state after earlier tokens, ``[B, H, Dk, Dv]``, or ``[S, H, Dk, Dv]`` for S packed sequences; None for zeros.
        bounds: index of the first token of each of the S sequences packed in one row (B = 1), followed by N; None for one
            sequence in each row.

    Returns:
        Outputs, ``[B, N, H, Dv]`` in v's dtype, and the state after the last token, shaped as ``state``, in float32.
    """
    from fla.ops.simple_gla import chunk_simple_gla

    out, final = chunk_simple_gla(
        q, k.to(q.dtype), v.to(q.dtype), g=log_decay.float(), **_options(q, scale, state, bounds)
    )
    return out.to(v.dtype), final


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float | None,
    state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Compute gated linear attention with fla-core's GPU kernel.

    Unlike :func:`lightning_mhla.recurrence.gated_linear_attention`, this function does not check its arguments.

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        log_decay: logarithm of the decay of each key feature at each token, ``[B, N, H, Dk]``, at most 0.
        scale: factor on the products of queries and keys; None for ``Dk ** -0.5``.
        state: state after earlier tokens, ``[B, H, Dk, Dv]``, or ``[S, H, Dk, Dv]`` for S packed sequences; None for zeros.
        bounds: index of the first token of each of the S sequences packed in one row (B = 1), followed by N; None for one
            sequence in each row.

    Returns:
        Outputs, ``[B, N, H, Dv]`` in v's dtype, and the state after the last token, shaped as ``state``, in float32.
    """
    from fla.ops.gla import chunk_gla

    out, final = chunk_gla(q, k.to(q.dtype), v.to(q.dtype), g=log_decay.float(), **_options(q, scale, state, bounds))
    return out.to(v.dtype), final


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    scale: float | None,
    state: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule with fla-core's GPU kernel.

    Unlike :func:`lightning_mhla.recurrence.gated_delta_rule`, this function does not check its arguments.

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys of length 1, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        beta: fraction of the old value that is replaced, ``[B, N, H]``, from 0 to 2.
        log_decay: logarithm of the decay at each token, ``[B, N, H]``, at most 0.
        scale: factor on the products of queries and keys; None for ``Dk ** -0.5``.
        state: state after earlier tokens, ``[B, H, Dk, Dv]``, or ``[S, H, Dk, Dv]`` for S packed sequences; None for zeros.
        bounds: index of the first token of each of the S sequences packed in one row (B = 1), followed by N; None for one
            sequence in each row.

    Returns:
        Outputs, ``[B, N, H, Dv]`` in v's dtype, and the state after the last token, shaped as ``state``, in float32.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    keys, values, beta = (x.to(q.dtype) for x in (k, v, beta))
    options = _options(q, scale, state, bounds)
    out, final = chunk_gated_delta_rule(q, keys, values, g=log_decay.float(), beta=beta, **options)
    return out.to(v.dtype), final


def _options(q: Tensor, scale: float | None, state: Tensor | None, bounds: list[int] | None) -> dict[str, Any]:
    lengths = None if bounds is None else torch.tensor(bounds, dtype=torch.int64, device=q.device)
    initial = None if state is None else state.float()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return {"scale": scale, "initial_state": initial, "output_final_state": True, "cu_seqlens": lengths}
