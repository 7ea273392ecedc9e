"""Calls to the GPU kernels of flash-linear-attention (package ``fla-core``)."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from mhla_kernels.backend import BACKENDS
from mhla_kernels.problem import default_scale
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


def run(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float | None,
    state: Tensor | None,
    bounds: list[int] | None,
    **gates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute a recurrence with a GPU kernel of fla-core. The arguments are not checked.

    Args:
        kernel: name of the kernel in ``fla.ops``, such as ``gla.chunk_gla``.
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        log_decay: logarithm of the decay at each token, at most 0, ``[B, N, H]``, or ``[B, N, H, Dk]`` for each key feature.
        scale: factor on the products of queries and keys; None for ``Dk ** -0.5``.
        state: state after earlier tokens, ``[B, H, Dk, Dv]``, or ``[S, H, Dk, Dv]`` for S packed sequences; None for zeros.
        bounds: index of the first token of each of the S sequences packed in one row (B = 1), followed by N; None for one
            sequence in each row.
        gates: further arguments of the kernel, ``[B, N, H]``, such as ``beta`` of the delta rule.

    Returns:
        Outputs, ``[B, N, H, Dv]`` in v's dtype, and the state after the last token, ``[B, H, Dk, Dv]`` or ``[S, H, Dk, Dv]``,
        in float32.
    """
    module, _, name = kernel.rpartition(".")
    out, final = getattr(import_module(f"fla.ops.{module}"), name)(
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        g=log_decay.float(),
        scale=default_scale(q.shape[-1]) if scale is None else scale,
        initial_state=None if state is None else state.float(),
        output_final_state=True,
        cu_seqlens=None if bounds is None else torch.tensor(bounds, dtype=torch.int64, device=q.device),
        **{gate: values.to(q.dtype) for gate, values in gates.items()},
    )
    return out.to(v.dtype), final
