"""Division of outputs by their normaliser."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor


class _Divide(torch.autograd.Function):
    """``out / (normalizer + eps)``, whose gradient is zero for a row that gets none, even where the row overflowed.

    Otherwise zero times infinity would make NaN of the gradients of all that the row has seen.
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
        share = gradient / (normalizer + ctx.eps)
        product = torch.where(share == 0, 0, share * output)
        return share, -product.sum(-1, keepdim=True), None


class _DivideForward(_Divide):
    """The same with forward-mode derivatives, which ``torch.compile`` does not take."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _Divide.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def jvp(ctx: Any, out: Tensor, normalizer: Tensor, eps: None) -> Tensor:
        output, total = ctx.saved_tensors
        return (out - output * normalizer) / (total + ctx.eps)


_Divide.forward.__signature__ = inspect.signature(_Divide.forward)  # type: ignore[attr-defined]  # torch asks at each call


def divide(out: Tensor, normalizer: Tensor, eps: float) -> Tensor:
    """``out / (normalizer + eps)``; ``out`` is ``[..., V]`` and ``normalizer`` ``[..., 1]``."""
    if not torch.is_grad_enabled() or not (out.requires_grad or normalizer.requires_grad):
        return out / (normalizer + eps)
    function = _Divide if torch.compiler.is_compiling() else _DivideForward
    divided: Tensor = function.apply(out, normalizer, eps)
    return divided
