"""Recurrences with one decay for each head: retention and the state-space dual of Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence

from mhla_kernels.attention import without_autocast
from mhla_kernels.backend import Backend
from torch import Tensor

from lightning_mhla.recurrence import kernels
from lightning_mhla.recurrence.chunks import ChunkedInputs, check, check_gate, prepare, scan_chunks
from lightning_mhla.recurrence.products import decay_weights
from lightning_mhla.recurrence.step import one_token


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute retention: linear attention whose weights decay with distance, at a fixed rate for each head.

    RetNet (arXiv 2307.08621, equation 5) defines the output of token t as

        out_t = scale * sum_{j <= t} exp(-decay (t - j)) (q_t . k_j) v_j

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        decay: decay rate of each head, ``[H]``, at least 0.
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
    check_gate("decay", decay, q.shape[2:3])
    log_decay = -decay.expand(q.shape[:3])
    return state_space_dual(
        q, k, v, log_decay, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, backend=backend
    )


def state_space_dual(
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
    """Compute the state-space dual of Mamba-2 (arXiv 2405.21060, section 6) in the notation of attention.

    The state and the output at token t are

        state_t = exp(log_decay_t) state_{t-1} + k_t v_t^T
        out_t = scale * state_t^T q_t

    In the notation of Mamba-2, q is C, k is B, v is ``dt x``, log_decay is ``dt A``, and the scale is 1.

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        log_decay: logarithm of the decay at each token, ``[B, N, H]``, at most 0.
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
    check_gate("log_decay", log_decay, q.shape[:3])
    # Called even if one token makes the kernels unnecessary, so that backend="triton" without them is an error for any length.
    native = kernels.chosen(backend, q)
    with without_autocast(q.device.type):
        if q.shape[1] == 1 and bounds is None:
            return one_token(q, k, v, log_decay, scale, initial_state)
        if native:
            return kernels.run("simple_gla.chunk_simple_gla", q, k, v, log_decay, scale, initial_state, bounds)
        problem = prepare(q, k, v, scale, initial_state, bounds)
        return _in_chunks(problem, problem.split(log_decay))


def _in_chunks(problem: ChunkedInputs, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = problem.q, problem.k, problem.v
    # Unused entries of a last chunk have key 0 and log-decay 0, so that they change neither the state nor its decay.
    weights = decay_weights(log_decay)
    to_end = weights[..., -1, :, None]  # not a quotient of running decays, which may be 0 / 0
    # [B, H, M, C, 1], like `to_end`; the last entry of a chunk is the decay over the complete chunk.
    from_start = log_decay.cumsum(-1)[..., None].exp()
    # Sums of k v^T, [B, H, M, K, V], each product decayed to the end of its chunk.
    update = (k * to_end).transpose(-1, -2) @ v
    states, final = scan_chunks(from_start[..., -1:, :], update, problem.initial, problem.bounds)
    out = (q * from_start) @ states + (q @ k.transpose(-1, -2) * weights) @ v
    return problem.merge(out), final
