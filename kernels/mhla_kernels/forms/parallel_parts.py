"""Parallel form of attention on a CPU, computed in parts, so that the weights of a part fit into the cache of a core.

A part is one or more batch rows with all heads, or some of the heads of one batch row. Large intermediate results of a part are
written to workspaces, which all parts share, because on a CPU the first access to newly allocated memory can take longer than
the computation that fills it. For the same reason, the feature map is applied to one part at a time, and outputs and gradients
of a part are copied to their place in the order ``[B, N, H, D]`` in which the caller uses them. The backward pass computes the
weights again, which is faster than reading them from memory.

Shape letters: B batch, H heads, P heads of a part (the sum over its batch rows), N queries, J keys (N in self-attention),
K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenBlocks
from mhla_kernels.features import FEATURE_MAP_FLOOR, rectify
from mhla_kernels.forms.parts import rows_in_part
from mhla_kernels.forms.weights import hide_pairs, weigh
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Weighting
from mhla_kernels.torch_private import relu_gradient


class _RowsAndHeads(NamedTuple):
    """Part of the attention that is computed at once: batch rows with all heads, or some of the heads of one row.

    Attributes:
        rows: slice of the batch.
        heads: slice of the heads.
    """

    rows: slice
    heads: slice

    def of(self, x: Tensor) -> Tensor:
        """Return this part of a tensor ``[B, tokens, H, D]`` as a view ``[heads, rows, tokens, D]``."""
        return x[self.rows, :, self.heads].permute(2, 0, 1, 3)

    def of_heads(self, x: Tensor) -> Tensor:
        """Select the heads of this part from coefficients ``[H, N, J]``. Return shared coefficients ``[N, J]`` unchanged."""
        return x if x.dim() == 2 else x[self.heads]


def _divide(q: Tensor, k: Tensor) -> list[_RowsAndHeads]:
    """Divide the batch rows and heads of an attention call into parts. The first part is the largest.

    Args:
        q: queries, ``[B, N, H, K]``.
        k: keys, ``[B, J, H, K]``.
    """
    batch, _, heads, _ = q.shape
    most = rows_in_part(q, q.shape[1] * k.shape[1])  # heads in a part, summed over its batch rows
    in_part, rows = max(1, min(heads, most)), max(1, min(batch, most // max(1, heads)))
    return [
        _RowsAndHeads(slice(row, row + rows), slice(head, head + in_part))
        for head in range(0, heads, in_part)
        for row in range(0, batch, rows)
    ]


class _Workspace:
    """Named memory for intermediate results, which the parts of a computation use one after the other.

    Args:
        like: tensor with the dtype and the device of the memory.
    """

    def __init__(self, like: Tensor) -> None:
        self._like, self._memory = like, dict[str, Tensor]()

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return an uninitialized tensor in the memory with the given name.

        The next tensor that is taken with this name uses the same memory, so earlier ones must no longer be needed.

        Args:
            name: name of the memory, which is allocated or enlarged if necessary.
            shape: shape of the tensor.
        """
        size, memory = prod(shape), self._memory.get(name)
        if memory is None or len(memory) < size:
            memory = self._memory[name] = self._like.new_empty(size)
        return memory[:size].view(*shape)

    def features(self, name: str, x: Tensor, relu: bool) -> Tensor:
        """Copy queries or keys to the memory with the given name, apply the feature map, and return the copy.

        Args:
            name: name of the memory for the copy.
            x: queries or keys, in any shape.
            relu: whether to apply the feature map ``relu(x) + 1e-6``; False if ``x`` is already mapped.
        """
        space = self.take(name, x.shape)
        return torch.clamp_min(x, 0, out=space).add_(FEATURE_MAP_FLOOR) if relu else space.copy_(x)


def _write_gradient(target: Tensor, result: Tensor, source: Tensor | None) -> None:
    """Write the gradient of queries, keys or values to a view, after the backward pass of the feature map, if there is one.

    The feature map is ``relu(x) + 1e-6``. As for torch's relu, the gradient is zero where x is at most zero, and ``result``
    elsewhere, also where x is NaN.

    Args:
        target: view that is overwritten.
        result: gradient of the mapped features, or of the values, in the shape of ``target``.
        source: queries or keys x before the feature map, in the shape of ``target``; None if there is no feature map.
    """
    if source is None:
        target.copy_(result)
    else:
        relu_gradient(result, source, 0, grad_input=target)


class ParallelParts(NamedTuple):
    """Parallel form of attention, from products of all token pairs, as one computation or in parts.

    :meth:`at_once` is differentiable. :meth:`in_parts` computes the same outputs for a few batch rows or heads at a time, and
    :meth:`gradients` computes their gradients.

    Attributes:
        weighting: causality and normalization of the attention weights.
        queries: index of the block and of the packed sequence that contain each query.
        keys: index of the block and of the packed sequence that contain each key.
        relu: whether the feature map ``relu(x) + 1e-6`` is still to be applied to queries and keys.
    """

    weighting: Weighting
    queries: TokenBlocks
    keys: TokenBlocks
    relu: bool

    def at_once(self, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor) -> Tensor:
        """Compute outputs ``[B, N, H, V]`` with differentiable torch functions, from the arguments of :meth:`in_parts`."""
        weighting = self.weighting
        if self.relu:
            q, k = rectify(q), rectify(k)
        products_BHNJ = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
        weights_BHNJ = weigh(products_BHNJ, coefficients, weighting.causal, self.queries, self.keys)
        out_BHNV = weights_BHNJ @ v.transpose(1, 2)
        if weighting.scale is not None:
            out_BHNV = out_BHNV * weighting.scale
        else:
            out_BHNV = divide(out_BHNV, weights_BHNJ.sum(-1, keepdim=True), weighting.eps)
        return out_BHNV.transpose(1, 2)

    def in_parts(self, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Compute attention for a few batch rows or heads at a time, without support for autograd.

        Args:
            q: queries, ``[B, N, H, K]``.
            k: keys, ``[B, J, H, K]``.
            v: values, ``[B, J, H, V]``.
            coefficients: mixing coefficient of each pair of tokens, ``[N, J]`` or ``[H, N, J]``.

        Returns:
            Outputs, ``[B, N, H, V]``, and the sum of each query's weights plus eps, ``[B, N, H, 1]``. Without normalization,
            the second tensor is empty.
        """
        weighting, space = self.weighting, _Workspace(q)
        out_BNHV = q.new_empty(*q.shape[:3], v.shape[3])
        totals_BNH1 = q.new_empty((*q.shape[:3], 1) if weighting.normalize else 0)
        for part in _divide(q, k):
            queries = space.features("queries", part.of(q), self.relu).flatten(0, 1)
            keys = space.features("keys", part.of(k), self.relu).flatten(0, 1)
            products = self._products(queries, keys, space)
            weights = self._weigh(products, part.of_heads(coefficients), products)
            view = part.of(out_BNHV)
            outs = space.take("outs", view.shape)
            torch.bmm(weights, part.of(v).flatten(0, 1), out=outs.flatten(0, 1))
            if weighting.scale is not None:
                torch.mul(outs, weighting.scale, out=view)
            else:
                totals = space.take("totals", (*view.shape[:-1], 1))
                torch.sum(weights, -1, keepdim=True, out=totals.flatten(0, 1)).add_(weighting.eps)
                torch.div(outs, totals, out=view)
                part.of(totals_BNH1).copy_(totals)
        return out_BNHV, totals_BNH1

    def _products(self, q: Tensor, k: Tensor, space: _Workspace) -> Tensor:
        """Compute the products ``[P, N, J]`` of the queries and keys of a part with P heads, counted over its batch rows.

        Products of pairs whose query must not attend to the key are zero.

        Args:
            q: queries of the part, ``[P, N, K]``.
            k: keys of the part, ``[P, J, K]``.
            space: workspace, whose memory named ``"products"`` holds the result.
        """
        products = space.take("products", (*q.shape[:2], k.shape[1]))
        return self._hide(torch.bmm(q, k.transpose(1, 2), out=products))

    def _weigh(self, products: Tensor, coefficients: Tensor, out: Tensor) -> Tensor:
        """Multiply a number for each token pair, such as its query-key product, by the mixing coefficient of the pair's blocks.

        Results of pairs whose query must not attend to the key are zero.

        Args:
            products: a number for each pair, ``[P, N, J]``, where P is the number of batch rows of the part times its heads.
            coefficients: mixing coefficient of each pair, ``[N, J]``, or ``[heads, N, J]`` for the heads of the part.
            out: tensor ``[P, N, J]`` that is overwritten and returned; may be ``products`` itself.
        """
        # [P, N, J]; with coefficients for each head, [heads, rows, N, J]
        shape = products.shape if coefficients.dim() == 2 else (len(coefficients), -1, *products.shape[1:])
        torch.mul(products.view(shape), coefficients.unsqueeze(-3), out=out.view(shape))
        return self._hide(out)

    def _hide(self, x: Tensor) -> Tensor:
        """Zero the entries of ``x``, ``[..., N, J]``, for pairs whose query must not attend to the key, in place."""
        return hide_pairs(x, self.weighting.causal, self.queries, self.keys, inplace=True)

    def gradients(
        self, needed: Sequence[bool], gradient: Tensor, tensors: list[Tensor], out: Tensor, totals: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the tensors of :meth:`in_parts` from the gradient of its outputs.

        With weights ``W = m * (q k^T)`` and ``o = W v / t``, where t is the sum of a row of W plus eps::

            dv = W^T (do / t)        dW = (do / t) v^T - (do / t) . o        dm = dW * (q k^T)        d(q k^T) = dW * m

        Without normalization, the scale takes the place of ``1 / t``, and the term with ``o`` is left out.

        Args:
            needed: for each tensor, whether its gradient is needed.
            gradient: gradient of the outputs, ``[B, N, H, V]``.
            tensors: queries, keys, values and coefficients.
            out: outputs of :meth:`in_parts`; ignored without normalization.
            totals: sum of each query's weights plus eps, ``[B, N, H, 1]``; ignored without normalization.

        Returns:
            Gradient of each tensor; None for each one that is not needed.
        """
        q, k, v, coefficients = tensors
        space, scale = _Workspace(q), self.weighting.scale
        of_q, of_k, of_v = (
            x.new_empty(x.shape) if is_needed else None for x, is_needed in zip(tensors[:3], needed[:3], strict=True)
        )
        of_coefficients = torch.zeros_like(coefficients) if needed[3] else None

        def write(part: _RowsAndHeads, of_x: Tensor | None, left: Tensor, right: Tensor, source: Tensor | None) -> None:
            """Write the matrix product of ``left`` and ``right`` to one part of the gradient ``of_x``.

            Args:
                part: batch rows and heads to write.
                of_x: gradient of queries, keys or values; None if it is not needed.
                left: left factors, ``[P, tokens, n]`` for the P heads of the part, counted over its batch rows.
                right: right factors, ``[P, n, width]``.
                source: queries or keys before the feature map, whose backward pass is applied too; None for values.
            """
            if of_x is not None:
                target = part.of(of_x)
                result = space.take("result", target.shape)
                torch.bmm(left, right, out=result.flatten(0, 1))
                _write_gradient(target, result, part.of(source) if source is not None and self.relu else None)

        for part in _divide(q, k):
            of_part, in_part = part.of(gradient), part.of_heads(coefficients)
            queries = space.features("queries", part.of(q), self.relu).flatten(0, 1)
            keys = space.features("keys", part.of(k), self.relu).flatten(0, 1)
            values = part.of(v).flatten(0, 1)
            # do / t of the formula, [P, N, V]
            share = space.take("share", of_part.shape)
            if scale is not None:
                torch.mul(of_part, scale, out=share)
            else:
                torch.div(of_part, part.of(totals), out=share)
                of_totals = _sum_of_products(share, part.of(out)).flatten(0, 1)
            share = share.flatten(0, 1)
            products = self._products(queries, keys, space)
            weights = self._weigh(products, in_part, space.take("weights", products.shape))
            write(part, of_v, weights.transpose(1, 2), share, None)
            of_weights = weights  # overwrites the weights, which are no longer needed
            if scale is not None:
                torch.bmm(share, values.transpose(1, 2), out=of_weights)
            else:
                # baddbmm subtracts (do / t) . o in the same pass over the pairs.
                torch.baddbmm(of_totals, share, values.transpose(1, 2), beta=-1, out=of_weights)
            self._hide(of_weights)
            if of_coefficients is not None:
                _add_products(part.of_heads(of_coefficients), products, of_weights)
            of_products = self._weigh(of_weights, in_part, of_weights)
            write(part, of_q, of_products, keys, q)
            write(part, of_k, of_products.transpose(1, 2), queries, k)
        return of_q, of_k, of_v, of_coefficients


def _add_products(of_coefficients: Tensor, products: Tensor, of_weights: Tensor) -> None:
    """Add the contribution of one part to the gradient of the mixing coefficients, in place.

    ``products`` is overwritten if several rows or heads of the part share a coefficient.

    Args:
        of_coefficients: gradient of the coefficients, ``[N, J]`` or ``[heads, N, J]``; the contribution is added to it.
        products: products of queries and keys, ``[P, N, J]``.
        of_weights: gradients of the weights, ``[P, N, J]``.
    """
    axis = 0 if of_coefficients.dim() == 2 else 1
    shape = products.shape if axis == 0 else (len(of_coefficients), -1, *products.shape[1:])
    left, right = products.view(shape), of_weights.view(shape)
    if left.shape[axis] == 1:  # no sum, and thus no temporary tensor
        of_coefficients.addcmul_(left.select(axis, 0), right.select(axis, 0))
    else:
        of_coefficients.add_(left.mul_(right).sum(axis))


def _sum_of_products(share: Tensor, out: Tensor) -> Tensor:
    """Return the sums of ``share * out`` over the last axis, ``[..., 1]``, where zero times infinity or NaN counts as zero.

    ``share`` is a gradient. Where it is zero, an overflowed output must not make other gradients NaN.
    """
    sums = (share * out).sum(-1, keepdim=True)
    return sums if sums.isfinite().all() else torch.where(share == 0, 0, share * out).sum(-1, keepdim=True)
