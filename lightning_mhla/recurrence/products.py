"""Decays between the tokens of a chunk, computed without overflow or cancellation for decays of any strength.

A chunk is divided into two halves, each half again into two halves, and so on. The decay between a token in a first half and a
token in the second half of the same pair is the product of two factors. One is the decay from the earlier token to the end of
its half. The other is the decay from the start of the second half to the later token. Both are at most 1, so nothing overflows.
Logarithms of decays are only added, never subtracted. A difference of two running sums would lose a weak decay next to a strong
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def decay_weights(log_decay: Tensor) -> Tensor:
    """Compute the decay between each pair of tokens in a chunk.

    Args:
        log_decay: logarithm of the decay at each of the C tokens of a chunk, at most 0, ``[..., C]``.

    Returns:
        ``[..., C, C]``. Entry (i, j) is ``exp(log_decay[j + 1] + ... + log_decay[i])`` for ``j <= i``, and 0 for ``j > i``.
    """
    return _DecayWeights.apply(log_decay)


def decayed_products(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Compute the products of queries and keys in a chunk, with a separate decay for each feature.

    Args:
        q: queries of the C tokens of a chunk, ``[..., C, D]``.
        k: keys, ``[..., C, D]``.
        log_decay: logarithm of the decay of each feature at each token, at most 0, ``[..., C, D]``.

    Returns:
        ``[..., C, C]``: entry (i, j) is ``sum_d q[i, d] k[j, d] exp(log_decay[j + 1, d] + ... + log_decay[i, d])`` for
        ``j <= i``, and 0 for ``j > i``.
    """
    return _DecayedProducts.apply(q, k, log_decay)


def suffix_sums(x: Tensor) -> Tensor:
    """Compute, for each token of a chunk, the sum over all later tokens.

    Args:
        x: ``[..., C, D]`` for C tokens.

    Returns:
        Sums in the shape of ``x``: entry j along axis -2 is ``x[j + 1] + ... + x[C - 1]``.
    """
    return F.pad(x[..., 1:, :].flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1))


class _DecayWeights(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(log_decay: Tensor) -> Tensor:
        size = log_decay.shape[-1]
        (decay,) = _padded(log_decay[..., None])
        # A token does not decay with respect to itself.
        weights = torch.diag_embed(torch.ones_like(decay[..., 0]))
        for half, from_start, to_end in _halves(decay):
            # [..., sections, half, half], with tokens of the second halves as rows; `_below` has the sections last.
            _below(weights, half).copy_((from_start * to_end.transpose(-1, -2)).movedim(-3, -1))
        return weights[..., :size, :size].contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        size = weights.shape[-1]
        # The derivative of exp(sum) is exp(sum). `_padded` extends the rows to a power of two, F.pad the columns.
        (slope,) = _padded(F.pad(grads[0] * weights, (0, (1 << (size - 1).bit_length()) - size)))
        d_decay = torch.zeros_like(slope[..., :1])
        half = 1
        # The sums stay inside one half, so that nothing is added that would have to be subtracted again.
        while half < slope.shape[-1]:
            # Token t of a second half decays the rows from t on; token t of a first half decays the columns before t.
            part = _below(slope, half).movedim(-1, -3)
            _part(d_decay, half, 1).add_(part.sum(-1)[..., None].flip(-2).cumsum(-2).flip(-2))
            _part(d_decay, half, 0)[..., 1:, :].add_(part.sum(-2)[..., :-1, None].cumsum(-2))
            half *= 2
        return d_decay[..., :size, 0]


class _DecayedProducts(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
        size = q.shape[-2]
        q, k, decay = _padded(q, k, log_decay)
        products = torch.diag_embed((q * k).sum(-1))
        for half, from_start, to_end in _halves(decay):
            queries, keys = _part(q, half, 1) * from_start, _part(k, half, 0) * to_end
            _below(products, half).copy_((queries @ keys.transpose(-1, -2)).movedim(-3, -1))
        return products[..., :size, :size]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, log_decay = ctx.saved_tensors
        size = q.shape[-2]
        q, k, decay = _padded(q, k, log_decay)
        slope = F.pad(grads[0], (0, q.shape[-2] - size) * 2)
        # The factors are computed again, since saving them would keep a tensor of the size of q for each of log2(C) divisions.
        d_q, d_k = torch.zeros_like(q), torch.zeros_like(k)
        for half, from_start, to_end in _halves(decay):
            queries, keys = _part(q, half, 1) * from_start, _part(k, half, 0) * to_end
            part = _below(slope, half).movedim(-1, -3)
            _part(d_q, half, 1).addcmul_(part @ keys, from_start)
            _part(d_k, half, 0).addcmul_(part.transpose(-1, -2) @ queries, to_end)
        # A decay at token t counts positively for queries from t on and negatively for keys from t on. The diagonal has no
        # decay, so it is added to the gradients of q and k after this sum.
        d_decay = (q * d_q - k * d_k).flip(-2).cumsum(-2).flip(-2)
        diagonal = slope.diagonal(dim1=-2, dim2=-1)[..., None]
        # not in place, since second derivatives need both factors of the products above
        d_q, d_k = torch.addcmul(d_q, diagonal, k), torch.addcmul(d_k, diagonal, q)
        return d_q[..., :size, :], d_k[..., :size, :], d_decay[..., :size, :]


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Pad tensors ``[..., C, D]`` with zeros, so that C becomes a power of two."""
    size = tensors[0].shape[-2]
    # `bit_length` is the exponent of the smallest power of two that is at least `size`.
    padding = (1 << (size - 1).bit_length()) - size if size else 0
    return [F.pad(x, (0, 0, 0, padding)) if padding else x for x in tensors]


def _part(x: Tensor, half: int, side: int) -> Tensor:
    """Divide a chunk into sections of ``2 * half`` tokens, and return a view of the first or the second half of each.

    Args:
        x: values at C tokens, ``[..., C, D]``.
        half: number of tokens in half a section.
        side: 0 for the first halves, 1 for the second halves.

    Returns:
        ``[..., C / (2 half), half, D]``.
    """
    return x.unflatten(-2, (-1, 2, half)).select(-3, side)


def _below(products: Tensor, half: int) -> Tensor:
    """Divide a chunk into sections of ``2 * half`` tokens, and return a view of the products between the halves of each.

    Args:
        products: products of all pairs of tokens, ``[..., C, C]``.
        half: number of tokens in half a section.

    Returns:
        ``[..., half, half, C / (2 half)]``. The last three axes are tokens of the second half, tokens of the first half, and
        sections.
    """
    by_halves = products.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))
    # by_halves is [..., row section, 2, half, column section, 2, half]; only pairs within one section are kept.
    return by_halves.select(-5, 1).select(-2, 0).diagonal(dim1=-4, dim2=-2)


def _halves(log_decay: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Iterate over divisions of a chunk into sections of two halves, with 1, 2, 4, ... tokens in a half.

    Args:
        log_decay: logarithm of the decay of each feature at each of C tokens, ``[..., C, D]``, where C is a power of two.

    Yields:
        Three values: the number of tokens in a half; for each second half, the decay from its start to each of its tokens; and
        for each first half, the decay from each of its tokens to its end. Both decays are ``[..., C / (2 half), half, D]``.
    """
    # `prefix` and `suffix` are sums inside halves. They are extended in place to halves of twice the size, by additions alone.
    prefix, suffix = log_decay.clone(), torch.zeros_like(log_decay)
    half = 1
    while half < log_decay.shape[-2]:
        first, second, before_end = _part(prefix, half, 0), _part(prefix, half, 1), _part(suffix, half, 0)
        yield half, second.exp(), before_end.exp()
        # In this order, because `second` includes the first half after the next line, and `before_end` must not.
        before_end += second[..., -1:, :]
        second += first[..., -1:, :]
        half *= 2
