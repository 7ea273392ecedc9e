"""Registration of attention as torch operators, with fake kernels, autograd formulas and FLOP counts.

``torch.ops.mhla.attention`` is registered here, and ``torch.ops.mhla.cross_attention`` in the same way by
:mod:`mhla_kernels.triton_backend.cross.ops`. An operator takes only tensors, numbers, strings and lists of them, so that
``torch.compile``, ``torch.export`` and activation checkpointing see one opaque call. The schema of an operator is made from the
named tuple of its arguments. :func:`mhla_kernels.mhla_attention` checks the arguments first, and handles empty inputs without
these operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.triton_backend import launch
from mhla_kernels.triton_backend.call import Arguments, Call
from mhla_kernels.triton_backend.fallback import gradients, outputs
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
    """Return the parameter list of a torch operator's schema, such as ``"Tensor q, Tensor k, bool causal"``.

    Args:
        arguments: named tuple class whose fields become the parameters, in order, with their types and default values.
    """
    defaults = arguments._field_defaults
    return ", ".join(
        f"{SCHEMA_TYPES[kind]} {name}" + (f"={defaults[name]}" if name in defaults else "")
        for name, kind in get_type_hints(arguments).items()
    )


def register_attention(
    name: str,
    arguments_class: Any,
    sides: Callable[[Any], tuple[Call, Call]],
    fallback: Callable[[Any], Tensor],
    operations: Callable[[Any], int],
) -> None:
    """Register self- or cross-attention as the operators ``torch.ops.mhla.{name}`` and ``torch.ops.mhla.{name}_backward``.

    The parameters of the first operator are the fields of ``arguments_class``. It returns the outputs, ``[B, Nq, H, V]``,
    contiguous. The second one takes the gradient of the outputs and four flags (whether to compute the gradient of q, of k, of
    v, and of all coefficients) before these fields. It returns the gradients of q, of k and of v, and a list with the gradient
    of each coefficient tensor. A gradient that is not wanted is a tensor without elements.

    If the Triton kernels fail, PyTorch computes the result. If the field ``guard`` of the arguments is empty, the error is
    raised instead.

    Args:
        name: name of the operator.
        arguments_class: named tuple class whose first fields are q, k, v and ``coefficients`` (a list). Other tensors and lists
            of tensors follow, then the number ``block_size``, further numbers and options, among them ``guard``.
        sides: function that makes two :class:`Call` objects, one for the queries and one for the keys, from an object of this
            class.
        fallback: function that computes the outputs in PyTorch, with support for autograd, from an object of this class.
        operations: function that counts the additions and multiplications in the matrix products of a forward pass, from an
            object of this class with shapes in place of tensors.
    """
    schema, tensors = make_schema(arguments_class), arguments_class._fields.index("block_size")

    def forward(*arguments: Any) -> Tensor:
        named = arguments_class(*arguments)

        def run() -> Tensor:
            # Triton launches on the current device, which need not be that of the tensors.
            with torch.cuda.device_of(named.q):
                return launch.forward(*sides(named))

        out: Tensor = guarded(named.guard, named.q.device, run, lambda: fallback(named))
        return out

    def fake_forward(*arguments: Any) -> Tensor:
        q, _, v = arguments[:3]
        out: Tensor = v.new_empty(*q.shape[:3], v.shape[-1])
        return out

    def backward(
        gradient: Tensor, needs_gradient: list[bool], *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        named = arguments_class(*arguments)

        def run() -> list[Tensor | None]:
            with torch.cuda.device_of(named.q):
                return launch.backward(*sides(named), gradient, needs_gradient)

        computed = guarded(
            named.guard, named.q.device, run, lambda: gradients(fallback, gradient, needs_gradient, named)
        )
        dq, dk, dv, *of_coefficients = _no_missing(computed, (named.q, named.k, named.v, *named.coefficients))
        return dq, dk, dv, of_coefficients

    def fake_backward(
        gradient: Tensor, needs_gradient: list[bool], *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        def like(x: Tensor, needed: bool) -> Tensor:
            return x.new_empty(x.shape if needed else 0)

        dq, dk, dv = map(like, arguments[:3], needs_gradient[:3])
        return dq, dk, dv, [like(x, needs_gradient[3]) for x in arguments[3]]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.options = inputs[tensors:]
        # flat, since save_for_backward takes no lists
        ctx.lengths = [len(x) if isinstance(x, (list, tuple)) else None for x in inputs[:tensors]]
        ctx.save_for_backward(*(
            x for argument, length in zip(inputs, ctx.lengths, strict=False)
            for x in ([argument] if length is None else argument)
        ))  # fmt: skip

    def differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if length is None else list(islice(saved, length)) for length in ctx.lengths]
        needs_coefficients = ctx.needs_input_grad[3]
        needs_gradient = [*ctx.needs_input_grad[:3], any(needs_coefficients)]
        *of_tokens, of_coefficients = backward_operator(gradient, needs_gradient, *arguments, *ctx.options)
        return (
            *(x if needed else None for x, needed in zip(of_tokens, needs_gradient[:3], strict=True)),
            [x if needed else None for x, needed in zip(of_coefficients, needs_coefficients, strict=True)],
            *(
                None if length is None else [None] * length for length in ctx.lengths[4:]
            ),  # torch wants a list for a list
            # numbers and options have no gradient; torch may leave out trailing ones that equal their defaults
            *(None,) * (len(ctx.needs_input_grad) - tensors),
        )

    operator = torch.library.custom_op(f"mhla::{name}", forward, mutates_args=(), schema=f"({schema}) -> Tensor")
    operator.register_fake(fake_forward)
    of_gradients = torch.library.custom_op(
        f"mhla::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor gradient, bool[] needs_gradient, {schema}) -> (Tensor, Tensor, Tensor, Tensor[])",
    )
    of_gradients.register_fake(fake_backward)
    forward_operator, backward_operator = (getattr(torch.ops.mhla, x) for x in (name, f"{name}_backward"))
    # counts for torch.utils.flop_counter.FlopCounterMode; a backward pass has twice the products of its forward pass
    register_flop_formula(forward_operator)(lambda *shapes, **_: operations(arguments_class(*shapes)))
    register_flop_formula(backward_operator)(lambda _, needed, *shapes, **__: 2 * operations(arguments_class(*shapes)))
    operator.register_autograd(differentiate, setup_context=setup_context)


def _no_missing(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return one contiguous gradient for each input, with an empty tensor in place of every gradient that was not computed.

    A registered operator cannot return None for a tensor.

    Args:
        gradients: gradients of the inputs, None if not computed. The gradients of the last inputs may be left out.
        inputs: inputs of the operator.
    """
    every = [*gradients, *[None] * (len(inputs) - len(gradients))]
    return [like.new_empty(0) if x is None else x.contiguous() for x, like in zip(every, inputs, strict=True)]


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


def _sides(arguments: Arguments) -> tuple[Call, Call]:
    call = Call(arguments)
    return call, call


register_attention("attention", Arguments, _sides, outputs, _operations)
