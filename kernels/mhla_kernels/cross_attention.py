"""Choice of backend and algorithm for a cross-attention call with checked arguments, and its computation."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mhla_kernels.backend import Backend, Form, choose_backend
from mhla_kernels.blocks import divide_up
from mhla_kernels.cross.forms import attend_cross, cross_weights
from mhla_kernels.cross.problem import CrossProblem, prepare_cross
from mhla_kernels.forms.cost import cheapest_cross_form
from mhla_kernels.problem import zero_outputs


def cross_attention(problem: CrossProblem, form: Form, backend: Backend) -> Tensor:
    """Compute cross-attention outputs, ``[B, Nq, H, Dv]`` in the dtype of v, contiguous.

    Args:
        problem: checked arguments of the call.
        form: algorithm: ``"parallel"``, ``"chunked"``, ``"reference"`` or ``"auto"``.
        backend: ``"torch"``, ``"triton"`` or ``"auto"``.

    Raises:
        ValueError: if the form or the backend does not support the call.
    """
    q, k, v = problem.q, problem.k, problem.v
    if form == "spanning":
        raise ValueError("form='spanning' is for self-attention; cross-attention takes 'chunked', 'parallel' or 'auto'")
    fused = choose_backend(backend, q, k, v, form) == "triton"
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return zero_outputs(q, k, v, *problem.mixing.tensors.values())
    if fused:
        from mhla_kernels.triton_backend.cross.fused import attend_cross_fused  # needs triton

        fused_form = choose_cross_form(problem, "triton") if form == "auto" else form
        out = attend_cross_fused(problem, fused_form, only_if_sound=backend == "auto")
        if out is not None:  # None: "auto", and these kernels may not be used here
            return out.contiguous()
    if form == "auto":
        form = choose_cross_form(problem, "torch")
    return attend_cross(prepare_cross(problem), form).to(v.dtype).contiguous()


def cross_attention_matrix(problem: CrossProblem) -> Tensor:
    """Compute the weights of cross-attention, ``[B, H, Nq, Nk]``, with zeros for masked queries and masked keys.

    Args:
        problem: checked arguments of the call.
    """
    weights = cross_weights(prepare_cross(problem))
    mask = problem.query_mask
    return weights if mask is None else weights.masked_fill(~mask[:, None, :, None], 0)


def choose_cross_form(problem: CrossProblem, backend: Literal["torch", "triton"]) -> Literal["parallel", "chunked"]:
    """Choose the algorithm with the lower estimated cost for a cross-attention call.

    If a number of tokens is symbolic, as under ``torch.export``, the choice is ``"chunked"``. The cost of packed sequences is
    estimated for sequences of average length, with one exception: if the backend is PyTorch and the bounds are on an
    accelerator or traced, one matrix mixes the blocks of all sequences, so the cost is that of one long sequence.

    Args:
        problem: checked arguments of the call.
        backend: backend that computes the call.
    """
    q, layout = problem.q, problem.layout
    if layout.is_open:
        return "chunked"
    tokens = layout.queries.tokens, layout.keys.tokens
    blocks, rows = (layout.queries.blocks, layout.keys.blocks), q.shape[0] * q.shape[2]
    bounds = layout.queries.cu_seqlens
    if bounds is not None and (backend == "triton" or layout.sequences is not None):
        sequences = max(1, len(bounds) - 1)
        tokens = divide_up(tokens[0], sequences), divide_up(tokens[1], sequences)
        blocks, rows = (divide_up(blocks[0], sequences), divide_up(blocks[1], sequences)), rows * sequences
    return cheapest_cross_form(tokens, blocks, q.shape[-1], problem.v.shape[-1], rows=rows, backend=backend)
