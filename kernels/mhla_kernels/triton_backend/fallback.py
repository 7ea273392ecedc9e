"""PyTorch replacements that compute a call of the attention operator if its Triton kernels have failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mhla_kernels.features import map_features
from mhla_kernels.forms.attend import attend, attend_span
from mhla_kernels.mixing.span import Span
from mhla_kernels.problem import Causal, Problem, Weighting
from mhla_kernels.triton_backend.call import Arguments
from mhla_kernels.triton_backend.mixers import MIXERS
from mhla_kernels.verdicts import in_own_thread


def outputs(arguments: Arguments, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the outputs of the attention operator in PyTorch, with support for autograd, in place of the Triton kernels.

    Args:
        arguments: arguments of the operator ``torch.ops.mhla.attention``.
        dtype: dtype of the operands and sums.

    Returns:
        Outputs, ``[B, N, H, V]`` in the dtype of v, contiguous.
    """
    q, k, v = (x.to(dtype) for x in arguments[:3])
    q, k, v = map_features(q, k, v, "relu" if arguments.relu else "identity", arguments.key_mask, arguments.key_mask)
    causal: Causal = "block" if arguments.causal and arguments.block_causal else arguments.causal
    weighting = Weighting(causal, None if arguments.eps is not None else 1.0, arguments.eps or 0.0)
    if arguments.form == "spanning":
        matrix, reading, writing, decay = (x.to(dtype) for x in arguments.coefficients)
        span = Span(matrix, reading, writing, decay, 0 if arguments.causal else decay.shape[-1] // 2)
        out = attend_span(q, k, v, span, arguments.layout, weighting)
    else:
        mixing = MIXERS[arguments.mixer].mixing(arguments.coefficients)
        out = attend(Problem(q, k, v, mixing, arguments.layout, weighting), "chunked")
    return out.to(arguments.v.dtype).contiguous()


def gradients(
    outputs: Callable[[Any], Tensor], gradient: Tensor, needs_gradient: Sequence[bool], arguments: Any
) -> list[Tensor | None]:
    """Compute the gradients of an attention operator by autograd in PyTorch, in place of the Triton kernels.

    Args:
        outputs: function that computes the outputs in PyTorch from the arguments of the operator, such as :func:`outputs`.
        gradient: gradient of the outputs, ``[B, N, H, V]``.
        needs_gradient: four flags: whether to compute the gradient of q, of k, of v, and of all coefficients.
        arguments: arguments of the operator, such as :class:`Arguments`.

    Returns:
        Gradients of q, k, v and of each coefficient tensor, in this order; None for each one that is not wanted.
    """
    requires_grad = [*needs_gradient[:3], *(needs_gradient[3],) * len(arguments.coefficients)]

    def run(q: Tensor, k: Tensor, v: Tensor, *coefficients: Tensor) -> Tensor:
        return outputs(arguments._replace(q=q, k=k, v=v, coefficients=list(coefficients)))

    return differentiate(run, (*arguments[:3], *arguments.coefficients), requires_grad, gradient)


def differentiate(
    run: Callable[..., Tensor], tensors: Sequence[Tensor], requires_grad: Sequence[bool], gradient: Tensor
) -> list[Tensor | None]:
    """Compute the gradients of a function of tensors by autograd, inside the backward pass of a registered operator.

    Args:
        run: function that computes one tensor from ``tensors``.
        tensors: arguments of ``run``.
        requires_grad: for each tensor, whether its gradient is wanted.
        gradient: gradient of the result of ``run``.

    Returns:
        Gradients of the tensors; None for each one that is not wanted.
    """

    def run_and_differentiate() -> list[Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(required) for x, required in zip(tensors, requires_grad, strict=True)]
            out = run(*leaves)
            inputs = [x for x in leaves if x.requires_grad]
            # a single chunk does not use the coefficients between chunks: their gradients are zeros, not None
            return list(torch.autograd.grad(out, inputs, gradient.to(out.dtype), materialize_grads=True))

    # autograd records nothing in the thread that runs the backward pass of a registered operator
    computed = iter(in_own_thread(run_and_differentiate, gradient.device))
    return [next(computed) if required else None for required in requires_grad]
