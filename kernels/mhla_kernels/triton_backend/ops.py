"""Registration of attention as ``torch.ops.mhla.attention``, with a fake kernel, an autograd formula and a FLOP count.

The operator takes plain tensors and numbers only, so that ``torch.compile``, ``torch.export`` and activation checkpointing see
one opaque call. Its schema is made from :class:`Arguments`. :func:`mhla_kernels.mhla_attention` checks the arguments first, and
handles empty inputs without this operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.triton_backend import fallback, launch
from mhla_kernels.triton_backend.call import Arguments, Call
from mhla_kernels.verdicts import guarded

SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    int: "SymInt",
    list[int] | None: "SymInt[]?",
    bool: "bool",
    float | None: "float?",
    str: "str",
}


def make_schema(arguments: Any) -> str:
    """Return the parameters of an operator, one for each field of a named tuple of its arguments."""
    defaults = arguments._field_defaults
    return ", ".join(
        f"{SCHEMA_TYPES[kind]} {name}" + (f"={defaults[name]}" if name in defaults else "")
        for name, kind in get_type_hints(arguments).items()
    )


SCHEMA = make_schema(Arguments)
TENSORS = Arguments._fields.index("block_size")
"""Number of leading arguments that are tensors or lists of tensors."""


@torch.library.custom_op("mhla::attention", mutates_args=(), schema=f"({SCHEMA}) -> Tensor")
def attention(*arguments: Any) -> Tensor:
    """Compute attention with the Triton kernels; registered as the operator ``torch.ops.mhla.attention``.

    If the kernels fail, PyTorch computes the result. If the field ``guard`` of the arguments is empty, the error is raised
    instead.

    Args:
        arguments: values of the fields of :class:`Arguments`, in order.

    Returns:
        Outputs, ``[B, N, H, V]``, contiguous.
    """
    named = Arguments(*arguments)

    def run() -> Tensor:
        with torch.cuda.device_of(named.q):
            call = Call(named)
            return launch.forward(call, call)

    out: Tensor = guarded(named.guard, named.q.device, run, lambda: fallback.outputs(named))
    return out


@attention.register_fake
def _(*arguments: Any) -> Tensor:
    v = Arguments(*arguments).v
    return v.new_empty(v.shape)


@torch.library.custom_op(
    "mhla::attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, bool[] needs_gradient, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor[])",
)
def attention_backward(
    gradient: Tensor, needs_gradient: list[bool], *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute the gradients of attention with the Triton kernels; registered as ``torch.ops.mhla.attention_backward``.

    If the kernels fail, PyTorch computes the result. If the field ``guard`` of the arguments is empty, the error is raised
    instead.

    Args:
        gradient: gradient of the outputs, ``[B, N, H, V]``.
        needs_gradient: four flags: whether to compute the gradient of q, of k, of v, and of all coefficients.
        arguments: values of the fields of :class:`Arguments`, in order.

    Returns:
        Gradients of q, of k and of v, and a list with the gradient of each coefficient tensor. A gradient that is not wanted is
        a tensor without elements.
    """
    named = Arguments(*arguments)

    def run() -> list[Tensor | None]:
        with torch.cuda.device_of(named.q):
            call = Call(named)
            return launch.backward(call, call, gradient, needs_gradient)

    gradients = guarded(named.guard, named.q.device, run, lambda: fallback.gradients(gradient, needs_gradient, named))
    dq, dk, dv, *of_coefficients = no_missing(gradients, (named.q, named.k, named.v, *named.coefficients))
    return dq, dk, dv, of_coefficients


def no_missing(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return one gradient for each input: an empty tensor for one that was not computed, or is missing at the end of the list.

    A registered operator cannot return None for a tensor.
    """
    every = [*gradients, *[None] * (len(inputs) - len(gradients))]
    return [like.new_empty(0) if x is None else x.contiguous() for x, like in zip(every, inputs, strict=True)]


@attention_backward.register_fake
def _(gradient: Tensor, needs_gradient: list[bool], *arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    q, k, v, coefficients = arguments[:4]
    dq, dk, dv = (
        x.new_empty(x.shape if needed else 0) for x, needed in zip((q, k, v), needs_gradient[:3], strict=True)
    )
    return dq, dk, dv, [x.new_empty(x.shape if needs_gradient[3] else 0) for x in coefficients]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    arguments = Arguments(*inputs)
    ctx.options, ctx.coefficients = arguments[TENSORS:], len(arguments.coefficients)
    q, k, v, coefficients, tables, *optional = inputs[:TENSORS]
    # flat, since save_for_backward takes no lists
    ctx.save_for_backward(q, k, v, *optional, *coefficients, *tables)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    q, k, v, key_mask, cu_seqlens, *lists = ctx.saved_tensors
    coefficients, tables = lists[: ctx.coefficients], lists[ctx.coefficients :]
    needs_coefficients = ctx.needs_input_grad[3]
    needs_gradient = [*ctx.needs_input_grad[:3], any(needs_coefficients)]
    *of_tokens, of_coefficients = torch.ops.mhla.attention_backward(
        gradient, needs_gradient, q, k, v, coefficients, tables, key_mask, cu_seqlens, *ctx.options
    )
    coefficient_gradients = [
        x if needed else None for x, needed in zip(of_coefficients, needs_coefficients, strict=True)
    ]
    return (
        *(x if needed else None for x, needed in zip(of_tokens, needs_gradient[:3], strict=True)),
        coefficient_gradients,
        [None] * len(tables),  # torch wants a list for a list
        *(None,) * (len(Arguments._fields) - 5),  # numbers and options have no gradient
    )


def _operations(shapes: Any) -> int:
    """Count the additions and multiplications in the matrix products of a forward pass of attention.

    Args:
        shapes: an :class:`Arguments` object with shapes in place of tensors.
    """
    batch, tokens, heads, key_width = shapes.q
    width, token_causal = shapes.v[-1], shapes.causal and not shapes.block_causal
    halved = token_causal or (shapes.causal and shapes.form == "parallel")
    chunked = shapes.form != "parallel"
    layout, blocks = TokenLayout(tokens, shapes.block_size, shapes.block_offsets), shapes.tables[0][1]
    if shapes.form == "spanning":
        layout = layout.in_chunks(shapes.coefficients[0][-1])
    pairs = tokens * (layout.largest if chunked else tokens) / (2 if halved else 1) * (key_width + width)
    if not chunked:
        return int(2 * batch * heads * pairs)
    terms = shapes.coefficients[1][1] if shapes.form == "spanning" else 1
    mixed = (
        0 if shapes.form == "spanning" else blocks * (blocks if shapes.mixer == "dense" else shapes.coefficients[0][1])
    )
    products = (2 * tokens * terms + mixed) * key_width * width
    return int(2 * batch * heads * (products + (pairs if token_causal or shapes.form == "spanning" else 0)))


@register_flop_formula(torch.ops.mhla.attention)
def _forward_operations(*arguments: Any, out_shape: Any = None, **_: Any) -> int:
    """Count the operations of a forward pass of attention, for ``torch.utils.flop_counter.FlopCounterMode``."""
    return _operations(Arguments(*arguments))


@register_flop_formula(torch.ops.mhla.attention_backward)
def _backward_operations(gradient: Any, needs_gradient: Any, *arguments: Any, out_shape: Any = None, **_: Any) -> int:
    """Count the operations of a backward pass of attention, as twice those of its forward pass."""
    return 2 * _operations(Arguments(*arguments))


attention.register_autograd(_backward, setup_context=_setup_context)
