"""Gated linear attention: a recurrence with one decay for each feature of the keys."""

from __future__ import annotations

from collections.abc import Sequence

from mhla_kernels.attention import without_autocast
from mhla_kernels.backend import Backend
from torch import Tensor

from lightning_mhla.recurrence import kernels
from lightning_mhla.recurrence.chunks import check, check_gate, prepare, scan_chunks
from lightning_mhla.recurrence.products import decayed_products, suffix_sums
from lightning_mhla.recurrence.step import one_token


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute gated linear attention (GLA, arXiv 2312.06635, equation 3), in which each key feature has its own decay.

    The state and the output at token t are

        state_t = diag(exp(log_decay_t)) state_{t-1} + k_t v_t^T
        out_t = scale * state_t^T q_t

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        log_decay: logarithm of the decay of each key feature at each token, ``[B, N, H, Dk]``, at most 0.
        scale: factor on the products of queries and keys; None for ``Dk ** -0.5``.
        initial_state: state after earlier tokens, ``[B, H, Dk, Dv]``, or ``[S, H, Dk, Dv]`` for S packed sequences; None for
            zeros.
        cu_seqlens: index of the first token of each of the S sequences packed in one row (B = 1), followed by N; None for one
            sequence in each row.
        backend: ``"torch"`` for PyTorch operations; ``"triton"`` for the GPU kernels of fla-core; ``"auto"`` for these kernels
            if they can run, otherwise PyTorch.

    Returns:
        Outputs, ``[B, N, H, Dv]`` in v's dtype, and the final state, ``[B, H, Dk, Dv]`` or ``[S, H, Dk, Dv]``, in float32
        (float64 for float64 inputs).

    Raises:
        ValueError: if shapes do not match, if ``cu_seqlens`` is not valid, if ``backend`` is unknown, or if it is ``"triton"``
            and the kernels cannot run.
        TypeError: if q, k or v does not hold floating-point numbers.
    """
    bounds = check(q, k, v, initial_state, cu_seqlens)
    check_gate("log_decay", log_decay, q.shape)
    native = kernels.chosen(backend, q)
    with without_autocast(q.device.type):
        if q.shape[1] == 1 and bounds is None:
            return one_token(q, k, v, log_decay, scale, initial_state)
        if native:
            return kernels.run("gla.chunk_gla", q, k, v, log_decay, scale, initial_state, bounds)
        problem = prepare(q, k, v, scale, initial_state, bounds)
        q, k, v = problem.q, problem.k, problem.v
        decay = problem.split(log_decay)
        # [B, H, M, C, K], since each key feature has its own decay.
        from_start = decay.cumsum(-2).exp()
        # suffix sums, not the difference of two prefix sums: a weak decay would be lost in it behind a strong one
        update = (k * suffix_sums(decay).exp()).transpose(-1, -2) @ v
        # The decay over a chunk, [B, H, M, K, 1], multiplies the rows of the states [K, V].
        states, final = scan_chunks(from_start[..., -1:, :].transpose(-1, -2), update, problem.initial, problem.bounds)
        out = (q * from_start) @ states + decayed_products(q, k, decay) @ v
        return problem.merge(out), final
