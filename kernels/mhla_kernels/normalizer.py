"""Division of attention outputs by the sums of their weights, with finite gradients for rows that overflowed."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor


class _Divide(torch.autograd.Function):
    """Autograd function for ``out / (normalizer + eps)`` that returns zero gradients for rows with a zero output gradient.

    A plain division would multiply zero by infinity in the backward pass of a row that overflowed. All tokens that this row
    attends to would then get NaN gradients.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, normalizer: Tensor, eps: float) -> Tensor:
        return out / (normalizer + eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, normalizer, ctx.eps = inputs
        ctx.save_for_backward(output, normalizer)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        output, normalizer = ctx.saved_tensors
        # A row whose sum is NaN has an output of NaN, and passes no gradient on to the sum of its values.
        share = gradient / (normalizer + ctx.eps).nan_to_num(torch.inf, torch.inf)
        # An overflowed output is infinite or NaN, and zero times it must stay zero. The output is replaced, not the product,
        # because the derivative of the product with respect to a gradient that happens to be zero is the output.
        product = share * torch.where(gradient == 0, output.nan_to_num(0, 0, 0), output)
        return share, -product.sum(-1, keepdim=True), None


class _DivideForward(_Divide):
    """Variant of :class:`_Divide` that also supports forward-mode differentiation, but not ``torch.compile``."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _Divide.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def jvp(ctx: Any, out: Tensor, normalizer: Tensor, eps: None) -> Tensor:
        output, total = ctx.saved_tensors
        return (out - output * normalizer) / (total + ctx.eps)


_Divide.forward.__signature__ = inspect.signature(_Divide.forward)  # type: ignore[attr-defined]  # torch reads it at each call


def divide(out: Tensor, normalizer: Tensor, eps: float) -> Tensor:
    """Divide sums of weighted values by sums of weights: ``out / (normalizer + eps)``.

    A row of the quotient whose incoming gradient is zero, such as one that the loss does not use, passes zero gradients to
    ``out`` and ``normalizer``, even if the row overflowed to infinity or NaN.

    Args:
        out: sums of weighted values, ``[..., V]``.
        normalizer: sums of weights, ``[..., 1]``.
        eps: number added to the normalizer.
    """
    if not torch.is_grad_enabled() or not (out.requires_grad or normalizer.requires_grad):
        return out / (normalizer + eps)
    function = _Divide if torch.compiler.is_compiling() else _DivideForward
    divided: Tensor = function.apply(out, normalizer, eps)
    return divided
