"""Registration with torch: the operator as ``torch.ops.mhla.attention``, with a fake kernel and an autograd formula.

Plain tensors and numbers only, so that ``torch.compile``, ``torch.export`` and activation checkpointing see one opaque
call. Arguments were checked by :func:`mhla_kernels.mhla_attention`, which also answers for empty ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhla_kernels.triton_backend import launch
from mhla_kernels.triton_backend.tables import Layout

TENSORS = 10
"""Leading arguments of the operator that are tensors."""


@torch.library.custom_op("mhla::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    decay: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    table: Tensor,
    sequences: Tensor,
    token_row: Tensor | None,
    largest: int,
    block_offsets: list[int] | None,
    causal: bool,
    normalize: bool,
    relu: bool,
    eps: float,
    form: str,
) -> Tensor:
    """``[B, N, H, V]``, contiguous. See :class:`mhla_kernels.triton_backend.launch.Call` and its layout for the arguments."""
    call = _call(
        q,
        k,
        v,
        mixing,
        decay,
        key_mask,
        cu_seqlens,
        table,
        sequences,
        token_row,
        largest,
        block_offsets,
        causal,
        normalize,
        relu,
        eps,
        form,
    )
    with torch.cuda.device_of(q):
        return launch.forward(call)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.custom_op("mhla::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    decay: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    table: Tensor,
    sequences: Tensor,
    token_row: Tensor | None,
    largest: int,
    block_offsets: list[int] | None,
    causal: bool,
    normalize: bool,
    relu: bool,
    eps: float,
    form: str,
    with_mixing: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, mixing and decay; the last two are empty where they were not asked for, or do not exist."""
    call = _call(
        q,
        k,
        v,
        mixing,
        decay,
        key_mask,
        cu_seqlens,
        table,
        sequences,
        token_row,
        largest,
        block_offsets,
        causal,
        normalize,
        relu,
        eps,
        form,
    )
    with torch.cuda.device_of(q):
        dq, dk, dv, of_mixing, of_decay = launch.backward(call, gradient, with_mixing)
    d_mixing = mixing.new_empty(0) if of_mixing is None else of_mixing.contiguous()
    d_decay = mixing.new_empty(0) if of_decay is None else of_decay.contiguous()
    return dq, dk, dv, d_mixing, d_decay


@attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, decay: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with_mixing = rest[-1]
    d_mixing = mixing.new_empty(mixing.shape if with_mixing else 0)
    d_decay = mixing.new_empty(0) if decay is None or not with_mixing else decay.new_empty(decay.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_mixing, d_decay


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    decay: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    table: Tensor,
    sequences: Tensor,
    token_row: Tensor | None,
    largest: int,
    block_offsets: list[int] | None,
    causal: bool,
    normalize: bool,
    relu: bool,
    eps: float,
    form: str,
) -> launch.Call:
    offsets = None if block_offsets is None else tuple(block_offsets)
    layout = Layout(q.shape[1], table.shape[1], largest, offsets, cu_seqlens is not None, table, sequences)
    return launch.Call(
        q, k, v, mixing, decay, layout, token_row, cu_seqlens, key_mask, causal, normalize, relu, eps, form
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.options = inputs[:TENSORS], inputs[TENSORS:]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    with_mixing = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    dq, dk, dv, d_mixing, d_decay = torch.ops.mhla.attention_backward(
        gradient, *ctx.saved_tensors, *ctx.options, with_mixing
    )
    nothing = (None,) * (TENSORS - 5 + len(ctx.options))
    return (
        dq,
        dk,
        dv,
        d_mixing if ctx.needs_input_grad[3] else None,
        d_decay if ctx.needs_input_grad[4] else None,
        *nothing,
    )


attention.register_autograd(_backward, setup_context=_setup_context)
