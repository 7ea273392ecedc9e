"""Softmax attention to near tokens and linear attention to mixed summaries of far tokens, with one common normalizer.

On a CPU, torch's flash attention computes the softmax part without storing the scores. It also returns the logarithm of each
sum of weights, which is needed to combine the parts. If its backward pass gets the combined output and the combined logarithm
in place of its own, it returns the gradients of the combined attention. :func:`combine_scores` computes the same result from
explicit scores, on all devices, under tracers and for higher derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mhla_kernels.attention import without_autocast
from mhla_kernels.torch_private import cpu_flash_attention, cpu_flash_attention_backward, has_values

LEAST_WEIGHT = 0.8
"""Exponent e of the lower bound ``tiny ** e`` (5e-31 in float32) of a sum of far weights.

:func:`combine_scores` divides all weights of a query by a number, and applies this bound when it chooses that number.
"""

MOST_GRADIENT = 0.5
"""Exponent e of ``max ** e``, the largest factor on a sum over far tokens if that sum is zero.

The factor has no effect on the output, but it bounds the gradients of mixing coefficients that are zero.
"""

LARGEST = 0.47
"""Exponent e of ``max ** e`` (1e18 in float32), the largest absolute value of queries and keys in flash attention.

Products of such queries and keys do not overflow.
"""

FEWEST_QUERIES, FEWEST_TRAINED = 8, 64
"""Smallest numbers of queries in a block for which flash attention is used, without and with a backward pass.

On one thread of an AMD EPYC (torch 2.14.1), flash attention is faster than explicit scores for blocks of 32, 66 and 128 queries
without a backward pass. With a backward pass, it is slower for blocks of 32 queries, and faster for blocks of 66.
"""


class NearTokens(NamedTuple):
    """Group of S near tokens that the C queries of a block attend to by softmax.

    Attributes:
        k: keys, ``[B, H, ..., S, Dk]``.
        v: values, ``[B, H, ..., S, V]``.
        visible: bool mask of the tokens that a query attends to, broadcastable to ``[B, 1, ..., C, S]``.
        q: queries that read these tokens, multiplied by the scale of the scores, ``[B, H, ..., C, Dk]``; None for the queries
            that are passed to :func:`combine`.
    """

    k: Tensor
    v: Tensor
    visible: Tensor
    q: Tensor | None = None


class FarTokens(NamedTuple):
    """Sums over the far tokens of each of C queries, with the weights of linear attention.

    Attributes:
        sums: V sums of weighted values, and the sum of the weights, ``[B, H, ..., C, V + 1]``.
        log_factor: logarithm of a factor on these sums, ``[B, H, ..., C, 1]``.
    """

    sums: Tensor
    log_factor: Tensor


def scale_features(f: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """Divide the features of each query by the largest of them, and add the logarithm of this divisor to ``far``.

    The divisor is 1 if all features are zero. Without the division, second derivatives would overflow for features near 1e-11,
    because they contain the squared inverse of the sum of the weights.

    Args:
        f: nonnegative features of the queries, ``[..., C, K]``.
        far: logarithm of a factor on the weights of far tokens, ``[..., C, 1]``.

    Returns:
        The divided features, at most 1, and ``far`` plus the logarithm of the divisor, ``[..., C, 1]``.
    """
    size = f.detach().amax(-1, keepdim=True) if f.shape[-1] else torch.ones_like(far)
    size = size.masked_fill(size < torch.finfo(f.dtype).tiny, 1)
    return f / size, far + size.log()


def read_mixed(f: Tensor, mixed: Tensor, far: Tensor) -> FarTokens:
    """Compute the sums over far tokens from mixed summaries of their blocks.

    Args:
        f: features of the queries, ``[B, H, ..., C, K]``.
        mixed: for each feature of the keys, V sums of weighted values and the sum of weights, ``[B, H, ..., K, V + 1]``.
        far: logarithm of a factor on the weights of far tokens, ``[B, H, ..., C, 1]``.
    """
    f, log_factor = scale_features(f, far)
    return FarTokens(f @ mixed, log_factor)


def combine(q: Tensor, near: Sequence[NearTokens], far: FarTokens) -> Tensor:
    """Combine softmax attention to near tokens and linear attention to far tokens into one output for each query.

    Args:
        q: queries, multiplied by the scale of the scores, ``[B, H, ..., C, Dk]``.
        near: groups of near tokens, at least one. Their leading axes equal the axes of ``q`` or have length 1.
        far: sums over the far tokens.

    Returns:
        Outputs, ``[B, H, ..., C, V]``; zeros for a query that attends to no token.
    """
    queries = [q if tokens.q is None else tokens.q for tokens in near]
    if not _suits_flash(queries, near, far):
        return combine_scores(q, near, far)
    # Flash attention adds minus infinity to the scores of masked keys, so a score of plus infinity becomes NaN and spoils its
    # row. Keys with very large numbers are therefore set to zero. Rows that attend to such a key, or whose query has such
    # numbers, come from the exact computation. No other rows do, because a later token must not change a bit of them.
    limit = torch.finfo(q.dtype).max ** LARGEST
    distinct = {id(x): x for x in (*queries, *(tokens.k for tokens in near))}
    if all(_largest(x) <= limit for x in distinct.values()):
        return _with_flash(queries, near, far)
    exact = combine_scores(q, near, far)
    is_exact = ~_fit(q, limit)
    bounded, bounded_queries = [], []
    for query, tokens in zip(queries, near, strict=True):
        fits, key_fits = _fit(query, limit), _fit(tokens.k, limit)
        bounded.append(tokens._replace(k=tokens.k.where(key_fits, 0)))
        bounded_queries.append(query.where(fits, 0))
        is_exact = is_exact | ~fits | (tokens.visible & ~key_fits.transpose(-1, -2)).any(-1, keepdim=True)
    return exact.where(is_exact, _with_flash(bounded_queries, bounded, far))


def combine_scores(q: Tensor, near: Sequence[NearTokens], far: FarTokens) -> Tensor:
    """Combine softmax attention to near tokens and linear attention to far tokens, from explicit scores of the near tokens.

    The arguments and the result are the same as for :func:`combine`.

    For stability, all weights of a query are divided by a number close to the largest of them. This divisor is a constant for
    autograd, since the output does not depend on it. Far weights are not first divided by their own sum, because coefficients
    of zero would then get no gradient.
    """
    sums, log_factor = far
    numbers = torch.finfo(sums.dtype)
    weight = sums.detach()[..., -1:]  # the divisor is a constant for autograd
    no_far = weight <= 0
    largest = (log_factor.detach() + weight.clamp(min=numbers.tiny**LEAST_WEIGHT).log()).masked_fill(
        no_far, numbers.min
    )
    # One tensor [B, H, ..., C, S] for each group of near tokens.
    scores = [
        ((q if query is None else query) @ k.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
        for k, _, visible, query in near
    ]
    log_divisor = reduce(torch.maximum, [x.detach().amax(-1, keepdim=True) for x in scores if x.shape[-1]], largest)
    weights = [(x - log_divisor).exp() for x in scores]
    factor = _far_factor(log_factor, log_divisor, no_far)
    total = sum((x.sum(-1, keepdim=True) for x in weights), factor * sums[..., -1:])
    out = sum((x @ tokens.v for x, tokens in zip(weights, near, strict=True)), factor * sums[..., :-1])
    unseen = total <= 0  # adding it keeps 0 / 0 out of the forward and the backward pass
    return (out / (total + unseen)).masked_fill(unseen, 0)


def _far_factor(log_factor: Tensor, log_divisor: Tensor, no_far: Tensor) -> Tensor:
    """Return the factor on the sums over far tokens, ``exp(log_factor - log_divisor)``.

    Where ``no_far`` is True, the sums are zero. The factor is bounded there, because zero times infinity would be NaN. All
    tensors are ``[..., C, 1]``.
    """
    bound = torch.where(no_far, MOST_GRADIENT * math.log(torch.finfo(log_factor.dtype).max), torch.inf)
    return torch.minimum(log_factor - log_divisor, bound).exp()


def _suits_flash(queries: Sequence[Tensor], near: Sequence[NearTokens], far: FarTokens) -> bool:
    """Return whether torch's flash attention for CPUs supports these tensors, and is likely to be faster than explicit scores.

    Args:
        queries: queries of each group of near tokens.
        near: groups of near tokens.
        far: sums over the far tokens.
    """
    q = queries[0]
    if q.device.type != "cpu" or q.shape[-2] < FEWEST_QUERIES or q.shape[-1] != near[0].v.shape[-1]:
        return False
    tensors = (*queries, *far, *(x for tokens in near for x in tokens[:2]))
    if q.shape[-2] < FEWEST_TRAINED and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return has_values(*tensors) and all(forward_ad.unpack_dual(x).tangent is None for x in tensors)


def _largest(x: Tensor) -> float:
    """Return the largest absolute value of a tensor: NaN if it contains NaN, 0 if it is empty."""
    if not x.numel():
        return 0.0
    low, high = (bound.item() for bound in x.detach().aminmax())
    return high if math.isnan(high) else max(-low, high)


def _fit(x: Tensor, limit: float) -> Tensor:
    """Return whether all entries of each vector ``[..., D]`` are in ``[-limit, limit]``, ``[..., 1]`` bool; False for NaN."""
    return (x.abs() <= limit).all(-1, keepdim=True)


def _with_flash(queries: Sequence[Tensor], near: Sequence[NearTokens], far: FarTokens) -> Tensor:
    tokens, masks = [], []
    for q, group in zip(queries, near, strict=True):
        if group.k.shape[-2]:
            tokens += [q, *(x.expand(*q.shape[:-2], *x.shape[-2:]) for x in group[:2])]
            masks.append(group.visible)
    out: Tensor = _Combined.apply(*far, masks, *tokens)
    return out


class _Combined(torch.autograd.Function):
    """Autograd function for :func:`combine` with torch's flash attention for CPUs.

    The arguments are the two tensors of :class:`FarTokens`, a list with the mask of each group of near tokens, and then the
    queries, keys and values of each group.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, log_factor: Tensor, masks: list[Tensor], *tokens: Tensor) -> Tensor:
        no_far = sums[..., -1:] <= 0
        # Logarithm of the sum of all weights of a query, [B, H, ..., C, 1]; each group of near tokens adds its own.
        log_total = (log_factor + sums[..., -1:].log()).masked_fill(no_far, -torch.inf)
        groups = []
        for q, k, v, visible in zip(tokens[::3], tokens[1::3], tokens[2::3], masks, strict=True):
            near, log_near = cpu_flash_attention(*map(_rows, (q, k, v)), attn_mask=_added(visible, q), scale=1.0)
            # torch returns 0, not minus infinity, for a query without near tokens
            log_near = _unrows(log_near[..., None], q).masked_fill(~visible.any(-1, keepdim=True), -torch.inf)
            log_total = torch.logaddexp(log_total, log_near)
            groups.append((_unrows(near, q), log_near))
        unseen = log_total == -torch.inf
        log_total = log_total.masked_fill(unseen, 0)
        # in two steps: if the sums are near the smallest positive number, their factor alone would overflow
        half = _far_factor(log_factor / 2, log_total / 2, no_far)
        out = half * (half * sums[..., :-1])
        for near, log_near in groups:
            out.addcmul_(near, (log_near - log_total).exp())
        out = out.masked_fill_(unseen, 0)
        ctx.groups = len(masks)
        ctx.save_for_backward(sums, log_factor, *masks, *tokens, out, log_total, unseen)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sums, log_factor, *others = ctx.saved_tensors
        masks, tokens, (out, log_total, unseen) = others[: ctx.groups], others[ctx.groups : -3], others[-3:]
        if torch.is_grad_enabled():  # second derivatives are wanted, which torch has no formula for
            return _gradients_of_scores(ctx.needs_input_grad, gradient, FarTokens(sums, log_factor), masks, tokens)
        with without_autocast(sums.device.type):
            gradient = gradient.masked_fill(unseen, 0)
            of_tokens = []
            # With the combined output and logarithm, torch's formula gives the gradients of the combined attention.
            rows = [_rows(x) for x in (gradient, out, log_total)]
            for q, k, v, visible in zip(tokens[::3], tokens[1::3], tokens[2::3], masks, strict=True):
                parts = cpu_flash_attention_backward(
                    rows[0], _rows(q), _rows(k), _rows(v), rows[1], rows[2][..., 0], 0.0, False,
                    attn_mask=_added(visible, q), scale=1.0,
                )  # fmt: skip
                of_tokens += [_unrows(x, q) for x in parts]
            factor = _far_factor(log_factor, log_total, sums[..., -1:] <= 0).masked_fill(unseen, 0)
            # the last column is the sum of the weights, which divides all others
            of_sums = factor * torch.cat([gradient, -(gradient * out).sum(-1, keepdim=True)], -1)
            of_factor = (of_sums * sums).sum(-1, keepdim=True)
        return (of_sums, of_factor, None, *of_tokens)


def _gradients_of_scores(
    needed: Sequence[bool],
    gradient: Tensor,
    far: FarTokens,
    masks: Sequence[Tensor],
    tokens: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of combined near and far attention from explicit scores, so that they can be differentiated again.

    Args:
        needed: for each argument of :class:`_Combined`, whether its gradient is wanted.
        gradient: gradient of the outputs, ``[B, H, ..., C, V]``.
        far: sums over the far tokens.
        masks: mask of each group of near tokens.
        tokens: queries, keys and values of each group of near tokens, one group after the other.

    Returns:
        A gradient for each argument of :class:`_Combined`; None if it is not wanted.
    """
    tokens = [x.view_as(x) for x in tokens]  # the same queries may read several groups, with a gradient for each
    near = list(map(NearTokens, tokens[1::3], tokens[2::3], masks, tokens[::3]))
    out = combine_scores(tokens[0], near, far)
    tensors = (*far, None, *tokens)
    chosen = [x for x, is_needed in zip(tensors, needed, strict=True) if is_needed and x is not None]
    gradients = iter(torch.autograd.grad(out, chosen, gradient, create_graph=True, materialize_grads=True))
    return tuple(next(gradients) if is_needed else None for is_needed in needed)


def _rows(x: Tensor) -> Tensor:
    """Move all axes but the heads and the last two into the batch: ``[B, H, ..., C, D]`` to ``[B * ..., H, C, D]``."""
    x = x.movedim(1, -3).flatten(0, -4)
    return x if x.stride(-1) == 1 else x.contiguous()  # flash attention reads features as if their stride were 1


def _unrows(x: Tensor, like: Tensor) -> Tensor:
    """Reverse :func:`_rows`: split the first axis of ``[B * ..., H, C, D]`` to get ``[B, H, ..., C, D]``, as in ``like``."""
    return x.unflatten(0, (like.shape[0], *like.shape[2:-2])).movedim(-3, 1)


def _added(visible: Tensor, q: Tensor) -> Tensor:
    """Convert a bool mask to numbers that flash attention adds to scores: 0 for True, minus infinity for False.

    Args:
        visible: mask of near tokens, as in :class:`NearTokens`.
        q: queries, ``[B, H, ..., C, Dk]``, which give the dtype.

    Returns:
        ``[B * ..., 1, C or 1, S]``.
    """
    visible = visible.expand(q.shape[0], 1, *q.shape[2:-2], *visible.shape[-2:])
    return _rows(q.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf))
