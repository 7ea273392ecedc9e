"""Registration with torch: the operator as ``torch.ops.mhla.attention``, with a fake kernel and an autograd formula.

Plain tensors and numbers only, so that ``torch.compile``, ``torch.export`` and activation checkpointing see one opaque
call. Arguments were checked by :func:`mhla_kernels.mhla_attention`, which also answers for empty ones; they are those of
:class:`Arguments`, from which the schema is made.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

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
    float: "float",
    str: "str",
}
SCHEMA = ", ".join(f"{SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(Arguments).items())
TENSORS = Arguments._fields.index("largest")
"""Leading arguments that are tensors or lists of them."""


@torch.library.custom_op("mhla::attention", mutates_args=(), schema=f"({SCHEMA}) -> Tensor")
def attention(*arguments: Any) -> Tensor:
    """``[B, N, H, V]``, contiguous. See :class:`Arguments`."""
    given = Arguments(*arguments)

    def run() -> Tensor:
        with torch.cuda.device_of(given.q):
            return launch.forward(Call(given))

    out: Tensor = guarded(given.guard, given.q.device, run, lambda: fallback.outputs(given))
    return out


@attention.register_fake
def _(*arguments: Any) -> Tensor:
    v = Arguments(*arguments).v
    return v.new_empty(v.shape)


@torch.library.custom_op(
    "mhla::attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, bool[] wanted, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor[])",
)
def attention_backward(
    gradient: Tensor, wanted: list[bool], *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v and of the coefficients, those that are ``wanted`` of the four; the others are empty."""
    given = Arguments(*arguments)

    def run() -> list[Tensor | None]:
        with torch.cuda.device_of(given.q):
            return launch.backward(Call(given), gradient, wanted)

    found = guarded(given.guard, given.q.device, run, lambda: fallback.gradients(gradient, wanted, given))
    found += [None] * (3 + len(given.coefficients) - len(found))
    kinds = given.q, given.k, given.v, *given.coefficients
    dq, dk, dv, *others = (
        like.new_empty(0) if x is None else x.contiguous() for x, like in zip(found, kinds, strict=True)
    )
    return dq, dk, dv, others


@attention_backward.register_fake
def _(gradient: Tensor, wanted: list[bool], *arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    q, k, v, coefficients = arguments[:4]
    dq, dk, dv = (x.new_empty(x.shape if wants else 0) for x, wants in zip((q, k, v), wanted[:3], strict=True))
    return dq, dk, dv, [x.new_empty(x.shape if wanted[3] else 0) for x in coefficients]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    arguments = Arguments(*inputs)
    q, k, v, coefficients, *tables = inputs[:TENSORS]
    ctx.options, ctx.coefficients = arguments[TENSORS:], len(coefficients)
    ctx.save_for_backward(q, k, v, *tables, *coefficients)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    inputs, coefficients = saved[: len(saved) - ctx.coefficients], list(saved[len(saved) - ctx.coefficients :])
    q, k, v, *tables = inputs
    of_coefficients = ctx.needs_input_grad[3]
    wanted = [*ctx.needs_input_grad[:3], any(of_coefficients)]
    *found, others = torch.ops.mhla.attention_backward(gradient, wanted, q, k, v, coefficients, *tables, *ctx.options)
    kept = [x if wants else None for x, wants in zip(others, of_coefficients, strict=True)]
    return (
        *(x if wants else None for x, wants in zip(found, wanted[:3], strict=True)),
        kept,
        *(None,) * (len(Arguments._fields) - 4),
    )


def _operations(given: Any) -> int:
    """Of the form that runs, without what lies beside its products; an operation is an addition or a multiplication."""
    batch, tokens, heads, key_width = given.q
    width, causal = given.v[-1], given.causal
    chunked = given.form != "parallel"
    blocks, size = given.table[1], given.largest
    pairs = tokens * (min(size, tokens) if chunked else tokens) / (2 if causal else 1) * (key_width + width)
    if not chunked:
        return int(2 * batch * heads * pairs)
    terms = given.coefficients[1][1] if given.form == "spanning" else 1
    mixed = 0 if given.form == "spanning" else blocks * (blocks if given.mixer == "dense" else given.coefficients[0][1])
    products = (2 * tokens * terms + mixed) * key_width * width
    return int(2 * batch * heads * (products + (pairs if causal or given.form == "spanning" else 0)))


@register_flop_formula(torch.ops.mhla.attention)
def _forward_operations(*arguments: Any, out_shape: Any = None, **_: Any) -> int:
    """For :class:`torch.utils.flop_counter.FlopCounterMode`."""
    return _operations(Arguments(*arguments))


@register_flop_formula(torch.ops.mhla.attention_backward)
def _backward_operations(gradient: Any, wanted: Any, *arguments: Any, out_shape: Any = None, **_: Any) -> int:
    """Twice the forward pass."""
    return 2 * _operations(Arguments(*arguments))


attention.register_autograd(_backward, setup_context=_setup_context)
