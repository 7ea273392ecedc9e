"""Parallel form of attention in PyTorch: products of all token pairs, multiplied by the coefficients of their blocks.

The number of operations grows with N squared. Two large matrix products take most of the time, which makes this form the
fastest one for up to a few hundred tokens. The tokens are not moved into blocks. Instead, the coefficients are expanded to
pairs of tokens, once for all batch rows.

On a CPU, attention is computed in parts; see :mod:`mhla_kernels.forms.parallel_parts`.

Shape letters: B batch, H heads, N queries, J keys (N in self-attention), M blocks, K key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mhla_kernels.blocks import TokenBlocks
from mhla_kernels.forms.parallel_parts import ParallelParts
from mhla_kernels.forms.parts import rows_in_part
from mhla_kernels.forms.weights import expand_pairs
from mhla_kernels.problem import Weighting
from mhla_kernels.torch_private import has_values, is_batched_gradient, is_wrapped


def parallel(
    q_BNHK: Tensor,
    k_BJHK: Tensor,
    v_BJHV: Tensor,
    mixing: Tensor,
    weighting: Weighting,
    queries: TokenBlocks,
    keys: TokenBlocks,
    relu: bool = False,
) -> Tensor:
    """Compute attention from the products of all token pairs (the parallel form).

    Args:
        q_BNHK: queries, ``[B, N, H, K]``.
        k_BJHK: keys, ``[B, J, H, K]``.
        v_BJHV: values, ``[B, J, H, V]``.
        mixing: coefficients between Mq blocks of queries and Mk blocks of keys, ``[Mq, Mk]`` or ``[H, Mq, Mk]``.
        weighting: causality and normalization of the attention weights.
        queries: index of the block and of the packed sequence that contain each query.
        keys: index of the block and of the packed sequence that contain each key.
        relu: whether the feature map ``relu(x) + 1e-6`` is still to be applied to queries and keys.

    Returns:
        Outputs, ``[B, N, H, V]``.
    """
    algorithm, coefficients = ParallelParts(weighting, queries, keys, relu), expand_pairs(mixing, queries, keys)
    tensors = (q_BNHK, k_BJHK, v_BJHV, coefficients)
    if not _suits_parts(*tensors):
        return algorithm.at_once(*tensors)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        out: Tensor = _InParts.apply(*tensors, algorithm)
        return out
    return algorithm.in_parts(*tensors)[0]


def _suits_parts(q: Tensor, k: Tensor, *others: Tensor) -> bool:
    """Return whether an attention call can be computed in parts, and would have more than one part.

    The tensors must be on a CPU. Tensors inside transformations of ``torch.func``, tensors with tangents of forward-mode
    differentiation and traced tensors are not supported.

    Args:
        q: queries, ``[B, N, H, K]``.
        k: keys, ``[B, J, H, K]``.
        others: all other tensors of the call.
    """
    tensors = (q, k, *others)
    return (
        q.device.type == "cpu"
        and has_values(*tensors)
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and not any(map(_has_tangent, tensors))
        # last, because sizes may be symbols while a graph is recorded
        and rows_in_part(q, q.shape[1] * k.shape[1]) < len(q) * q.shape[2]
    )


def _has_tangent(x: Tensor) -> bool:
    """Return whether a tensor carries a tangent of forward-mode differentiation."""
    return forward_ad.unpack_dual(x).tangent is not None


class _InParts(torch.autograd.Function):
    """Autograd function that makes :meth:`ParallelParts.in_parts` differentiable.

    The forward pass saves its arguments and outputs, and returns a copy of the outputs, which callers may change in place. It
    does not save the weights of the token pairs, so the backward pass computes them again.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, algorithm: ParallelParts) -> Tensor:
        out, totals = algorithm.in_parts(q, k, v, coefficients)
        ctx.save_for_backward(q, k, v, coefficients, out, totals)
        ctx.algorithm = algorithm
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, totals = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        is_plain = not (is_wrapped(gradient) or is_batched_gradient(gradient) or _has_tangent(gradient))
        if torch.is_grad_enabled() or not is_plain:
            return (*_gradients_at_once(needed, gradient, tensors, ctx.algorithm), None)
        return (*ctx.algorithm.gradients(needed, gradient, tensors, out, totals), None)


def _gradients_at_once(
    needed: tuple[bool, ...], gradient: Tensor, tensors: list[Tensor], algorithm: ParallelParts
) -> tuple[Tensor | None, ...]:
    """Compute gradients from :meth:`ParallelParts.at_once`, so that they can be differentiated again.

    Args:
        needed: for each tensor, whether its gradient is needed.
        gradient: gradient of the outputs, ``[B, N, H, V]``.
        tensors: queries, keys, values and coefficients, as :meth:`ParallelParts.in_parts` takes them.
        algorithm: options of the attention call, with the method ``at_once``.

    Returns:
        Gradient of each tensor; None for each one that is not needed.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, because the same tensor may be queries and keys, with a gradient for each
        copies = [x.view_as(x) for x in tensors]
        chosen = [x for x, is_needed in zip(copies, needed, strict=True) if is_needed]
        gradients = iter(torch.autograd.grad(algorithm.at_once(*copies), chosen, gradient, create_graph=again))
    return tuple(next(gradients) if is_needed else None for is_needed in needed)
