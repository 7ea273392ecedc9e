"""Putting the kernels together: a forward and a backward pass of either form, on plain tensors.

A buffer that a kernel fills whole is allocated empty; those that it adds to, or fills in part, are zeroed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhla_kernels.triton_backend.attend import DK, DQ, DV, OUT, attend
from mhla_kernels.triton_backend.call import Call
from mhla_kernels.triton_backend.mixers import MIXERS
from mhla_kernels.triton_backend.pairs import pair_gradient
from mhla_kernels.triton_backend.summaries import summarize


def forward(call: Call) -> Tensor:
    """Outputs ``[B, N, H, V]``."""
    mixed = running = None
    if call.chunked:
        summary, running = summarize(call, call.k, call.v)
        mixed = MIXERS[call.arguments.mixer].mix(call, summary)
    return attend(call, OUT.value, (call.q, call.k, call.v), call.q, mixed, running, None)[0]


def backward(call: Call, gradient: Tensor, with_mixing: bool) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v and of the coefficients (none if not asked for); summaries are computed anew."""
    q, k, v = call.q, call.k, call.v
    mixer = MIXERS[call.arguments.mixer]
    gradient = gradient.to(q.dtype)
    summary = running = mixed = later = d_mixed = None
    if call.chunked:
        summary, running = summarize(call, k, v)
        mixed = mixer.mix(call, summary)
    weights = None
    if call.normalize:
        shape = (call.rows, call.tables.tokens)
        weights = q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)
    dq, _ = attend(call, DQ.value, (gradient, v, k), q, mixed, running, weights)
    if call.chunked:
        d_mixed, later = summarize(call, q, gradient, weights, reverse=True)
        mixed = mixer.mix(call, d_mixed, transposed=True)
    dv, _ = attend(call, DV.value, (k, q, gradient), k, mixed, later, weights)
    wants_own = with_mixing and call.chunked and call.causal
    dk, own = attend(call, DK.value, (v, gradient, q), k, mixed, later, weights, wants_own)
    if not with_mixing:
        return dq, dk, dv, []
    if d_mixed is None or summary is None:
        return dq, dk, dv, [_reduce(pair_gradient(call, gradient, weights), call)]
    return dq, dk, dv, [_reduce(x, call) for x in mixer.gradients(call, d_mixed, summary, own)]


def _reduce(gradient: Tensor, call: Call) -> Tensor:
    """``[B * H, ...]`` summed over the batch, and over the heads where they share coefficients."""
    gradient = gradient.unflatten(0, (-1, call.heads)).sum(0)
    return gradient.sum(0, keepdim=True) if call.coefficients[0].shape[0] == 1 else gradient
