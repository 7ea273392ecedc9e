"""Gated delta rule: a recurrence with a decaying state, in which the new value of a key replaces the old value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from mhla_kernels.attention import without_autocast
from mhla_kernels.backend import Backend
from torch import Tensor

from lightning_mhla.recurrence import kernels
from lightning_mhla.recurrence.chunks import ChunkedInputs, check, check_gate, prepare, rows_of
from lightning_mhla.recurrence.products import decay_weights
from lightning_mhla.recurrence.step import one_token


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule (Gated DeltaNet, arXiv 2412.06464, equation 10).

    The state and the output at token t are

        state_t = exp(log_decay_t) (I - beta_t k_t k_t^T) state_{t-1} + beta_t k_t v_t^T
        out_t = scale * state_t^T q_t

    The PyTorch implementation processes the tokens in chunks. Inside a chunk, the value that a token replaces depends on the
    earlier tokens. All values of the chunk are therefore computed together, by solving a triangular system (arXiv 2406.06484,
    section 3, extended by the decay).

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys of L2 norm 1, ``[B, N, H, Dk]``. The caller normalizes them. With larger norms, the state may grow unbounded.
        v: values, ``[B, N, H, Dv]``.
        beta: fraction of the old value that is replaced, ``[B, N, H]``, from 0 to 2.
        log_decay: logarithm of the decay at each token, ``[B, N, H]``, at most 0.
        scale: factor on the products of queries and keys; None for ``Dk ** -0.5``.
        initial_state: state after earlier tokens, ``[B, H, Dk, Dv]``, or ``[S, H, Dk, Dv]`` for S packed sequences; None for
            zeros.
        cu_seqlens: index of the first token of each of the S sequences packed in one row (B = 1), followed by N; None for one
            sequence in each row.
        backend: ``"torch"`` for PyTorch operations; ``"triton"`` for the GPU kernels of fla-core, which support keys of up to
            256 features; ``"auto"`` for these kernels if they can run, otherwise PyTorch.

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
    check_gate("beta", beta, q.shape[:3])
    native = kernels.chosen(backend, q, 256)
    with without_autocast(q.device.type):
        if q.shape[1] == 1 and bounds is None:
            return one_token(q, k, v, log_decay, scale, initial_state, beta)
        if native:
            kernel = "gated_delta_rule.chunk_gated_delta_rule"
            return kernels.run(kernel, q, k, v, log_decay, scale, initial_state, bounds, beta=beta)
        problem = prepare(q, k, v, scale, initial_state, bounds)
        return _in_chunks(problem, problem.split(beta)[..., None], problem.split(log_decay))


def _in_chunks(problem: ChunkedInputs, beta: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = problem.q, problem.k, problem.v
    weights = decay_weights(log_decay)
    # Both [B, H, M, C, 1]; weights and overlap are [B, H, M, C, C].
    from_start, to_end = log_decay.cumsum(-1)[..., None].exp(), weights[..., -1, :, None]
    # (I + overlap) values = beta (v - decayed k @ state): token i subtracts what earlier tokens of the chunk wrote for its key.
    # The diagonal of I + overlap is 1 and is not stored (`unitriangular`).
    overlap = (k @ k.transpose(-1, -2) * weights * beta).tril(-1)
    # One solve for both right-hand sides: the value that each token writes with a zero state before the chunk, and the key
    # by which it reads from that state what it has to subtract.
    right_sides = torch.cat([v, k * from_start], -1) * beta
    solutions = torch.linalg.solve_triangular(overlap, right_sides, upper=False, unitriangular=True)
    written, state_keys = solutions.split([v.shape[-1], k.shape[-1]], -1)
    scores, queries = q @ k.transpose(-1, -2) * weights, q * from_start
    keys, decay = (k * to_end).transpose(-1, -2), from_start[..., -1:, :]
    outs, final = [], []
    # The update of the state depends on the state itself, so `scan_chunks`, which takes all updates at once, does not apply.
    pieces = [x.unbind(2) for x in (written, state_keys, scores, queries, keys, decay)]
    for sequence, (first, last) in enumerate(pairwise(problem.bounds)):
        state = rows_of(problem.initial, problem.bounds, sequence)
        for chunk in range(first, last):
            written_c, state_keys_c, scores_c, queries_c, keys_c, decay_c = (piece[chunk] for piece in pieces)
            values = written_c - state_keys_c @ state
            outs.append(queries_c @ state + scores_c @ values)
            state = decay_c * state + keys_c @ values
        final.append(state)
    # Without tokens, v is empty and has the shape of the outputs.
    out = torch.stack(outs, 2) if outs else v
    return problem.merge(out), torch.cat(final)
