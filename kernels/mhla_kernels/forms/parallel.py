"""Parallel form of attention in PyTorch: products of all token pairs, multiplied by the coefficients of their blocks.

The number of operations grows with N squared. Two large matrix products take most of the time, which makes this form the
fastest one for up to a few hundred tokens. Tokens stay where they are: the coefficients are expanded to pairs of tokens, once
for all batch rows, instead of moving the tokens of each row into blocks.

On a CPU, attention is computed in parts, so that the weights of a part fit into the cache of a core. A part is one or more
batch rows with all heads, or some of the heads of one batch row. The backward pass computes the weights again, which is faster
than reading them from memory.

Shape letters: B batch, H heads, P heads of a part (the sum over its batch rows), N queries, J keys (N in self-attention),
M blocks, K key width, V value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mhla_kernels.blocks import TokenBlocks
from mhla_kernels.forms.parts import rows_in_part
from mhla_kernels.forms.weights import expand_pairs, hide_pairs, weigh
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting
from mhla_kernels.torch_private import has_values, is_batched_gradient, is_wrapped


class Pairs(NamedTuple):
    """Options that turn the products of token pairs into attention weights.

    Attributes:
        weighting: causality and normalization of the attention weights.
        queries: index of the block and of the packed sequence that contain each query.
        keys: index of the block and of the packed sequence that contain each key.
    """

    weighting: Weighting
    queries: TokenBlocks
    keys: TokenBlocks

    def hide(self, x: Tensor) -> Tensor:
        """Set the entries ``[..., N, J]`` of pairs whose query must not attend to the key to zero, in place."""
        return hide_pairs(x, self.weighting.causal, self.queries, self.keys, inplace=True)


def parallel(
    q_BNHK: Tensor,
    k_BJHK: Tensor,
    v_BJHV: Tensor,
    mixing: Tensor,
    weighting: Weighting,
    queries: TokenBlocks,
    keys: TokenBlocks,
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

    Returns:
        Outputs, ``[B, N, H, V]``.
    """
    pairs, coefficients = Pairs(weighting, queries, keys), expand_pairs(mixing, queries, keys)
    tensors = (q_BNHK, k_BJHK, v_BJHV, coefficients)
    if not _suits_parts(*tensors):
        return _at_once(*tensors, pairs)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        out: Tensor = _InParts.apply(*tensors, pairs)
        return out
    return _in_parts(*tensors, pairs)[0].transpose(1, 2)


def _at_once(q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, pairs: Pairs) -> Tensor:
    """Compute attention with differentiable functions of torch, for all batch rows together.

    Args:
        q: queries, ``[B, N, H, K]``.
        k: keys, ``[B, J, H, K]``.
        v: values, ``[B, J, H, V]``.
        coefficients: mixing coefficient of each pair of tokens, ``[N, J]`` or ``[H, N, J]``.
        pairs: options of the weights.

    Returns:
        Outputs, ``[B, N, H, V]``.
    """
    weighting = pairs.weighting
    products_BHNJ = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    weights_BHNJ = weigh(products_BHNJ, coefficients, weighting.causal, pairs.queries, pairs.keys)
    out_BHNV = weights_BHNJ @ v.transpose(1, 2)
    if weighting.scale is not None:
        out_BHNV = out_BHNV * weighting.scale
    else:
        out_BHNV = divide(out_BHNV, weights_BHNJ.sum(-1, keepdim=True), weighting.eps)
    return out_BHNV.transpose(1, 2)


def _suits_parts(q: Tensor, k: Tensor, *others: Tensor) -> bool:
    """Return whether an attention call can be computed in parts, and would have more than one part.

    Only plain tensors on a CPU can be divided. The transformations of ``torch.func`` and tracing rule it out.

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
        and all(forward_ad.unpack_dual(x).tangent is None for x in tensors)
        # last, because sizes may be symbols while a graph is recorded
        and rows_in_part(q, q.shape[1] * k.shape[1]) < len(q) * q.shape[2]
    )


class _RowsAndHeads(NamedTuple):
    """Part of the attention that is computed at once: batch rows with all heads, or some of the heads of one row.

    Attributes:
        rows: slice of the batch.
        heads: slice of the heads.
    """

    rows: slice
    heads: slice

    def of(self, x: Tensor) -> Tensor:
        """Select the batch rows and heads of this part from a tensor ``[B, N, H, D]``; all N tokens are kept.

        The result is ``[P, N, D]``. It may be a copy if the part has several batch rows; otherwise, it is a view.
        """
        return x[self.rows, :, self.heads].transpose(1, 2).flatten(0, 1)

    def of_heads(self, x: Tensor) -> Tensor:
        """Return a view ``[P, N, D]`` of a contiguous tensor ``[B, H, N, D]``, with the batch rows and heads of this part."""
        return x[self.rows, self.heads].flatten(0, 1)

    def of_pairs(self, x: Tensor) -> Tensor:
        """Select the heads of this part from values of token pairs ``[H, N, J]``; return ``[N, J]`` unchanged."""
        return x if x.dim() == 2 else x[self.heads]


def _parts(q: Tensor, k: Tensor, count: int) -> tuple[list[_RowsAndHeads], list[Tensor]]:
    """Divide the batch rows and heads into parts, and allocate workspaces for the token pairs of one part.

    All parts use the same workspaces, because allocating memory for each part would take longer than filling it.

    Args:
        q: queries, ``[B, N, H, K]``.
        k: keys, ``[B, J, H, K]``.
        count: number of workspaces.

    Returns:
        The parts, and ``count`` uninitialized tensors ``[P, N, J]``.
    """
    batch, tokens, heads = q.shape[:3]
    numbers = tokens * k.shape[1]
    in_part = max(1, min(heads, rows_in_part(q, numbers)))
    rows = max(1, min(batch, rows_in_part(q, numbers * heads)))
    parts = [
        _RowsAndHeads(slice(row, row + rows), slice(head, head + in_part))
        for head in range(0, heads, in_part)
        for row in range(0, batch, rows)
    ]
    return parts, list(q.new_empty(count, rows * in_part, tokens, k.shape[1]))


def _in_parts(q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Compute attention for a few batch rows or heads at a time, without support for autograd.

    Args:
        q: queries, ``[B, N, H, K]``.
        k: keys, ``[B, J, H, K]``.
        v: values, ``[B, J, H, V]``.
        coefficients: mixing coefficient of each pair of tokens, ``[N, J]`` or ``[H, N, J]``.
        pairs: options of the weights.

    Returns:
        Outputs, ``[B, H, N, V]``, and the sum of each query's weights plus eps, ``[B, H, N, 1]``. Without normalization, the
        second tensor is empty.
    """
    weighting, heads = pairs.weighting, q.shape[2]
    out_BHNV = q.new_empty(len(q), heads, q.shape[1], v.shape[3])
    totals_BHN1 = q.new_empty((*out_BHNV.shape[:3], 1) if weighting.normalize else 0)
    parts, (space,) = _parts(q, k, 1)
    for part in parts:
        products, out = _products(part.of(q), part.of(k), pairs, space), part.of_heads(out_BHNV)
        weights = _weigh(products, part.of_pairs(coefficients), pairs, products)
        torch.bmm(weights, part.of(v), out=out)
        if weighting.scale is not None:
            out *= weighting.scale
        else:
            totals = part.of_heads(totals_BHN1)
            torch.sum(weights, -1, keepdim=True, out=totals)
            out /= totals.add_(weighting.eps)
    return out_BHNV, totals_BHN1


def _products(q: Tensor, k: Tensor, pairs: Pairs, space: Tensor) -> Tensor:
    """Compute the products of queries ``[P, N, K]`` and keys ``[P, J, K]`` in a workspace.

    Products of pairs whose query must not attend to the key are zero.

    Args:
        q: queries of one part.
        k: keys of one part.
        pairs: options of the weights.
        space: workspace for at least ``P`` matrices ``[N, J]``, which is overwritten.

    Returns:
        A view of the workspace, ``[P, N, J]``.
    """
    return pairs.hide(torch.bmm(q, k.transpose(1, 2), out=space[: len(q)]))


def _weigh(products: Tensor, coefficients: Tensor, pairs: Pairs, space: Tensor) -> Tensor:
    """Multiply values of all token pairs by the mixing coefficients of their blocks, in a workspace.

    Results of pairs whose query must not attend to the key are zero.

    Args:
        products: values of the pairs, ``[P, N, J]``.
        coefficients: mixing coefficient of each pair, ``[N, J]``, or ``[heads, N, J]`` for the heads of the part.
        pairs: options of the weights.
        space: workspace, which is overwritten; may be ``products`` itself.

    Returns:
        A view of the workspace, ``[P, N, J]``.
    """
    # [batch rows of the part, N, J], or [batch rows, heads, N, J] with coefficients for each head
    rows = (-1, *coefficients.shape)
    weights = space[: len(products)]
    torch.mul(products.view(rows), coefficients, out=weights.view(rows))
    return pairs.hide(weights)


class _InParts(torch.autograd.Function):
    """Autograd function for :func:`_in_parts`, which saves its arguments and outputs but nothing per pair of tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, pairs: Pairs) -> Tensor:
        out, totals = _in_parts(q, k, v, coefficients, pairs)
        ctx.save_for_backward(q, k, v, coefficients, out, totals)
        ctx.pairs = pairs
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, totals = ctx.saved_tensors
        if torch.is_grad_enabled() or is_wrapped(gradient) or is_batched_gradient(gradient):
            return (*_gradients_at_once(ctx.needs_input_grad[:4], gradient, tensors, ctx.pairs), None)
        return (*_gradients(ctx.needs_input_grad[3], gradient, tensors, out, totals, ctx.pairs), None)


def _gradients(
    with_coefficients: bool, gradient: Tensor, tensors: list[Tensor], out: Tensor, totals: Tensor, pairs: Pairs
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the tensors of :func:`_in_parts` from the gradient of its outputs.

    With weights ``W = m * (q k^T)`` and ``o = W v / t``, where t is the sum of a row of W plus eps::

        dv = W^T (do / t)        dW = (do / t) v^T - (do / t) . o        dm = dW * (q k^T)        d(q k^T) = dW * m

    Args:
        with_coefficients: whether the gradient of the coefficients is needed.
        gradient: gradient of the outputs, ``[B, N, H, V]``.
        tensors: queries, keys, values and coefficients.
        out: outputs of :func:`_in_parts`.
        totals: sums of the weights of each query plus eps.
        pairs: options of the weights.
    """
    q, k, v, coefficients = tensors
    heads, scale = q.shape[2], pairs.weighting.scale
    of_q, of_k, of_v = (x.new_empty(len(x), heads, x.shape[1], x.shape[3]) for x in (q, k, v))
    of_coefficients = torch.zeros_like(coefficients) if with_coefficients else None
    parts, spaces = _parts(q, k, 2)
    for part in parts:
        queries, keys, values, share = (part.of(x) for x in (q, k, v, gradient))
        # do / t of the formula, [P, N, V]
        share = share * scale if scale is not None else share / part.of_heads(totals)
        products, in_part = _products(queries, keys, pairs, spaces[0]), part.of_pairs(coefficients)
        weights = _weigh(products, in_part, pairs, spaces[1])
        torch.bmm(weights.transpose(1, 2), share, out=part.of_heads(of_v))
        of_weights = weights  # in their place: they are not needed any more
        if scale is not None:
            torch.bmm(share, values.transpose(1, 2), out=of_weights)
        else:
            # (do / t) . o, [P, N, 1]; baddbmm subtracts it in the same pass over the pairs.
            of_totals = _sum_of_products(share, part.of_heads(out))
            torch.baddbmm(of_totals, share, values.transpose(1, 2), beta=-1, out=of_weights)
        pairs.hide(of_weights)
        if of_coefficients is not None:
            rows = [x.view(-1, *in_part.shape) for x in (products, of_weights)]
            # One batch row needs no sum, and thus no temporary tensor.
            if len(rows[0]) == 1:
                part.of_pairs(of_coefficients).addcmul_(rows[0][0], rows[1][0])
            else:
                part.of_pairs(of_coefficients).add_(rows[0].mul_(rows[1]).sum(0))
        of_products = _weigh(of_weights, in_part, pairs, of_weights)
        torch.bmm(of_products, keys, out=part.of_heads(of_q))
        torch.bmm(of_products.transpose(1, 2), queries, out=part.of_heads(of_k))
    return of_q.transpose(1, 2), of_k.transpose(1, 2), of_v.transpose(1, 2), of_coefficients


def _sum_of_products(share: Tensor, out: Tensor) -> Tensor:
    """Return the sums of ``share * out`` over the last axis, ``[..., 1]``, where zero times infinity or NaN counts as zero.

    ``share`` is a gradient. Where it is zero, an overflowed output must not make other gradients NaN.
    """
    sums = (share * out).sum(-1, keepdim=True)
    return sums if sums.isfinite().all() else torch.where(share == 0, 0, share * out).sum(-1, keepdim=True)


def _gradients_at_once(
    needed: tuple[bool, ...], gradient: Tensor, tensors: list[Tensor], pairs: Pairs
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of :func:`_in_parts` from :func:`_at_once`, so that they can be differentiated again.

    Args:
        needed: for each tensor, whether its gradient is wanted.
        gradient: gradient of the outputs, ``[B, N, H, V]``.
        tensors: queries, keys, values and coefficients.
        pairs: options of the weights.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, because the same tensor may be queries and keys, with a gradient for each
        q, k, v, coefficients = copies = [x.view_as(x) for x in tensors]
        chosen = [x for x, is_needed in zip(copies, needed, strict=True) if is_needed]
        out = _at_once(q, k, v, coefficients, pairs)
        gradients = iter(torch.autograd.grad(out, chosen, gradient, create_graph=again))
    return tuple(next(gradients) if is_needed else None for is_needed in needed)
