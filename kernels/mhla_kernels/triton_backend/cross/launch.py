"""Forward and backward passes of cross-attention as sequences of the Triton kernels of self-attention.

Each kernel runs over the tokens of one side: outputs and gradients of q over the queries, summaries and gradients of k and v
over the keys. Summaries of one side are mixed for the blocks of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mhla_kernels.triton_backend.attend import DK, DQ, DV, OUT, attend
from mhla_kernels.triton_backend.cross.call import CrossArguments, sides
from mhla_kernels.triton_backend.launch import sum_rows
from mhla_kernels.triton_backend.mix import DenseMixer
from mhla_kernels.triton_backend.pairs import pair_gradient
from mhla_kernels.triton_backend.summaries import summarize

MIXER = DenseMixer()


def forward(arguments: CrossArguments) -> Tensor:
    """Run the forward pass of cross-attention, and return the outputs, ``[B, Nq, H, V]``."""
    queries, keys = sides(arguments)
    q, k, v = arguments[:3]
    mixed = MIXER.mix(queries, summarize(keys, k, v)[0]) if queries.chunked else None
    return attend(queries, OUT.value, (q, k, v), q, mixed, None, None)[0]


def backward(arguments: CrossArguments, gradient: Tensor, needs_gradient: Sequence[bool]) -> list[Tensor | None]:
    """Run the backward pass of cross-attention.

    The summaries of the key blocks are computed again, because the forward pass does not save them.

    Args:
        arguments: arguments of the operator.
        gradient: gradient of the outputs, ``[B, Nq, H, V]``.
        needs_gradient: four flags: whether to compute the gradient of q, of k, of v, and of the matrix.

    Returns:
        Gradients of q, k, v and of the matrix; None for each one that is not wanted.
    """
    of_q, of_k, of_v, of_mixing = needs_gradient
    queries, keys = sides(arguments)
    q, k, v = arguments[:3]
    gradient = gradient.to(q.dtype)
    summary = mixed = weights = dq = dk = dv = d_matrix = None
    if queries.normalize:
        shape = (queries.rows, queries.tables.tokens)
        weights = q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)
    if queries.chunked and (of_q or of_mixing or queries.normalize):
        summary, _ = summarize(keys, k, v)
    if of_q or queries.normalize:  # mode DQ also writes the weights that the other modes read
        mixed = None if summary is None else MIXER.mix(queries, summary)
        dq, _ = attend(queries, DQ.value, (gradient, v, k), q, mixed, None, weights)
    mixed = None  # frees these summaries before those of the other direction are allocated
    if queries.chunked and (of_k or of_v or of_mixing):
        d_mixed, _ = summarize(queries, q, gradient, weights, reverse=True)
        if of_mixing:
            assert summary is not None
            (d_matrix,) = MIXER.gradients(queries, d_mixed, summary)
        summary = None
        if of_k or of_v:
            mixed = MIXER.mix(keys, d_mixed, transposed=True)
    if of_v:
        dv, _ = attend(keys, DV.value, (k, q, gradient), k, mixed, None, weights)
    if of_k:
        dk, _ = attend(keys, DK.value, (v, gradient, q), k, mixed, None, weights)
    if of_mixing and not queries.chunked:
        d_matrix = pair_gradient(keys, gradient, weights)
    return [dq if of_q else None, dk, dv, None if d_matrix is None else sum_rows(d_matrix, queries)]
