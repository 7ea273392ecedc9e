"""Registration of ``torch.ops.mhla.cross_attention`` with a fake kernel, an autograd formula and a FLOP count.

:func:`mhla_kernels.mhla_attention` checks the arguments first, and handles empty inputs without this operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mhla_kernels.triton_backend import launch
from mhla_kernels.triton_backend.cross import fallback
from mhla_kernels.triton_backend.cross.call import CrossArguments, sides
from mhla_kernels.triton_backend.ops import make_schema, no_missing
from mhla_kernels.verdicts import guarded

SCHEMA = make_schema(CrossArguments)
TENSORS = CrossArguments._fields.index("block_size")
"""Number of leading arguments that are tensors or lists of tensors."""


@torch.library.custom_op("mhla::cross_attention", mutates_args=(), schema=f"({SCHEMA}) -> Tensor")
def cross_attention(*arguments: Any) -> Tensor:
    """Compute cross-attention with the Triton kernels; registered as ``torch.ops.mhla.cross_attention``.

    If the kernels fail, PyTorch computes the result. If the field ``guard`` of the arguments is empty, the error is raised
    instead.

    Args:
        arguments: values of the fields of :class:`CrossArguments`, in order.

    Returns:
        Outputs, ``[B, Nq, H, V]``, contiguous.
    """
    named = CrossArguments(*arguments)

    def run() -> Tensor:
        with torch.cuda.device_of(named.q):
            return launch.forward(*sides(named))

    out: Tensor = guarded(named.guard, named.q.device, run, lambda: fallback.outputs(named))
    return out


@cross_attention.register_fake
def _(*arguments: Any) -> Tensor:
    named = CrossArguments(*arguments)
    return named.v.new_empty(*named.q.shape[:3], named.v.shape[-1])


@torch.library.custom_op(
    "mhla::cross_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, bool[] needs_gradient, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def cross_attention_backward(
    gradient: Tensor, needs_gradient: list[bool], *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of cross-attention; registered as ``torch.ops.mhla.cross_attention_backward``.

    If the kernels fail, PyTorch computes the result. If the field ``guard`` of the arguments is empty, the error is raised
    instead.

    Args:
        gradient: gradient of the outputs, ``[B, Nq, H, V]``.
        needs_gradient: four flags: whether to compute the gradient of q, of k, of v, and of the matrix.
        arguments: values of the fields of :class:`CrossArguments`, in order.

    Returns:
        Gradients of q, k, v and of the matrix. A gradient that is not wanted is a tensor without elements.
    """
    named = CrossArguments(*arguments)

    def run() -> list[Tensor | None]:
        with torch.cuda.device_of(named.q):
            return launch.backward(*sides(named), gradient, needs_gradient)

    gradients = guarded(named.guard, named.q.device, run, lambda: fallback.gradients(gradient, needs_gradient, named))
    dq, dk, dv, d_matrix = no_missing(gradients, named[:4])
    return dq, dk, dv, d_matrix


@cross_attention_backward.register_fake
def _(gradient: Tensor, needs_gradient: list[bool], *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, d_matrix = (
        x.new_empty(x.shape if needed else 0) for x, needed in zip(arguments[:4], needs_gradient, strict=True)
    )
    return dq, dk, dv, d_matrix


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    named = CrossArguments(*inputs)
    ctx.options, ctx.tables = named[TENSORS:], len(named.query_tables)
    # flat, since save_for_backward takes no lists
    masks_and_bounds = named.query_mask, named.key_mask, named.cu_seqlens, named.key_cu_seqlens
    ctx.save_for_backward(*named[:4], *masks_and_bounds, *named.query_tables, *named.key_tables)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    saved, count = ctx.saved_tensors, ctx.tables
    tables = list(saved[8 : 8 + count]), list(saved[8 + count :])
    needs_gradient = ctx.needs_input_grad[:4]
    gradients = torch.ops.mhla.cross_attention_backward(
        gradient, list(needs_gradient), *saved[:4], *tables, *saved[4:8], *ctx.options
    )
    return (
        *(x if needed else None for x, needed in zip(gradients, needs_gradient, strict=True)),
        [None] * count,  # torch wants a list for a list
        [None] * count,
        *(None,) * (len(CrossArguments._fields) - 6),  # masks, bounds, numbers and options have no gradient
    )


def _operations(shapes: Any) -> int:
    """Count the additions and multiplications in the matrix products of a forward pass.

    Args:
        shapes: a :class:`CrossArguments` with shapes in place of tensors.
    """
    (batch, queries, heads, key_width), keys, width = shapes.q, shapes.k[1], shapes.v[-1]
    if shapes.form == "parallel":
        return int(2 * batch * heads * queries * keys * (key_width + width))
    mixed = shapes.query_tables[0][1] * shapes.key_tables[0][1]
    return int(2 * batch * heads * (queries + keys + mixed) * key_width * width)


@register_flop_formula(torch.ops.mhla.cross_attention)
def _forward_operations(*arguments: Any, out_shape: Any = None, **_: Any) -> int:
    """Count the operations of a forward pass, for ``torch.utils.flop_counter.FlopCounterMode``."""
    return _operations(CrossArguments(*arguments))


@register_flop_formula(torch.ops.mhla.cross_attention_backward)
def _backward_operations(gradient: Any, needs_gradient: Any, *arguments: Any, out_shape: Any = None, **_: Any) -> int:
    """Count the operations of a backward pass, as twice those of its forward pass."""
    return 2 * _operations(CrossArguments(*arguments))


cross_attention.register_autograd(_backward, setup_context=_setup_context)
