"""Forward and backward passes of the attention operator as sequences of Triton kernel launches.

A buffer that a kernel fills completely is allocated uninitialized. A buffer that it adds to, or fills in part, is zeroed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mhla_kernels.triton_backend import spanning
from mhla_kernels.triton_backend.attend import DK, DQ, DV, OUT, attend
from mhla_kernels.triton_backend.call import Call
from mhla_kernels.triton_backend.mixers import MIXERS
from mhla_kernels.triton_backend.pairs import pair_gradient
from mhla_kernels.triton_backend.summaries import are_overflowed, summarize


def forward(call: Call, keys: Call) -> Tensor:
    """Run the forward pass of attention with Triton kernels, and return the outputs, ``[B, N, H, V]``.

    Args:
        call: arguments of the attention operator, with lookup tables and launch options. In cross-attention, the object for
            which the rows of the matrix of scores are the queries.
        keys: the same object as ``call``; in cross-attention, the object for which the rows are the keys.
    """
    if call.terms:
        return spanning.forward(call)
    mixed = running = None
    if call.chunked:
        summary, running = summarize(keys, keys.k, keys.v)
        mixed = MIXERS[call.arguments.mixer].mix(call, summary)
        if call.block_causal:  # as in the PyTorch form, a block whose own sums overflowed reads NaN, not a wrong number
            mixed.masked_fill_(are_overflowed(summary)[..., None], torch.nan)
    return attend(call, OUT.value, (call.q, keys.k, keys.v), mixed, running, None)[0]


def backward(call: Call, keys: Call, gradient: Tensor, needs_gradient: Sequence[bool]) -> list[Tensor | None]:
    """Run the backward pass of attention with Triton kernels.

    The key-value summaries of the blocks are computed again, because the forward pass does not save them. At most two
    sets of summaries, in float32, exist at the same time.

    Args:
        call: arguments of the attention operator, with lookup tables and launch options. In cross-attention, the object for
            which the rows of the matrix of scores are the queries.
        keys: the same object as ``call``; in cross-attention, the object for which the rows are the keys.
        gradient: gradient of the outputs, ``[B, N, H, V]``.
        needs_gradient: four flags: whether to compute the gradient of q, of k, of v, and of all mixing coefficients.

    Returns:
        Gradients of q, k, v and of each coefficient tensor, in this order and in the shapes of these tensors. A gradient of
        q, k or v that is not wanted is None. Gradients of coefficients that are not wanted are left out.
    """
    of_q, of_k, of_v, of_mixing = needs_gradient
    q, k, v = call.q, keys.k, keys.v
    gradient = gradient.to(q.dtype)
    if call.terms:
        of_tokens, of_span = spanning.backward(call, gradient, needs_gradient)
        return [*of_tokens, *(sum_rows(x, call) for x in of_span)]
    mixer = MIXERS[call.arguments.mixer]
    mixed = running = later = weights = diagonal = dq = dk = dv = None
    coefficients: list[Tensor] = []
    if call.normalize:
        shape = (call.rows, call.tables.tokens)
        weights = q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)
    summary = None
    if call.chunked and (of_q or of_mixing or call.normalize):
        # For DQ and for the gradient of the coefficients; DV and DK read sums over the queries instead.
        summary, running = summarize(keys, k, v)
    if of_q or call.normalize:  # mode DQ also writes the weights that the other modes read
        mixed = None if summary is None else mixer.mix(call, summary)
        dq, _ = attend(call, DQ.value, (gradient, v, k), mixed, running, weights)
    mixed = running = None  # frees these summaries before those of the other direction are allocated
    if call.chunked and (of_k or of_v or of_mixing):
        d_mixed, later = summarize(call, q, gradient, weights, reverse=True)
        if of_mixing:
            assert summary is not None
            coefficients = mixer.gradients(call, d_mixed, summary)
        summary = None
        if of_k or of_v or call.token_causal:
            mixed = mixer.mix(keys, d_mixed, transposed=True)
    if of_v:
        dv, _ = attend(keys, DV.value, (k, q, gradient), mixed, later, weights)
    # in causal attention, m[i, i] weights pairs of tokens inside block i, which the mixing of summaries does not include
    needs_diagonal = of_mixing and call.chunked and call.token_causal
    if of_k or needs_diagonal:
        dk, diagonal = attend(keys, DK.value, (v, gradient, q), mixed, later, weights, needs_diagonal)
    if of_mixing and not call.chunked:
        coefficients = [pair_gradient(keys, gradient, weights)]
    if diagonal is not None:
        mixer.add_own(call, coefficients, diagonal)
    return [dq if of_q else None, dk if of_k else None, dv, *(sum_rows(x, call) for x in coefficients)]


def sum_rows(gradient: Tensor, call: Call) -> Tensor:
    """Sum a gradient of mixing coefficients over the batch, and over the heads if they share the coefficients.

    Args:
        gradient: gradient for each batch row and head, ``[B * H, ...]``.
        call: arguments of the attention operator, which include the coefficients.

    Returns:
        Summed gradient, ``[H, ...]``, or ``[1, ...]`` for shared coefficients.
    """
    gradient = gradient.unflatten(0, (-1, call.heads)).sum(0)
    return gradient.sum(0, keepdim=True) if call.coefficients[0].shape[0] == 1 else gradient
