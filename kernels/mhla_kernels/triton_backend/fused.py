"""Entry point of the Triton backend: it decides whether the kernels may be used, and prepares their arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenLayout, divide_up, on_device
from mhla_kernels.forms.spanning import chunk_tokens
from mhla_kernels.problem import Problem, repeat_heads
from mhla_kernels.triton_backend import ops  # noqa: F401  registers the operator
from mhla_kernels.triton_backend.config import MANY
from mhla_kernels.triton_backend.tables import kernel_tables
from mhla_kernels.triton_backend.trial import Kind, size_class, try_kernels
from mhla_kernels.verdicts import may_use


def attend_fused(problem: Problem, form: str, only_if_sound: bool) -> Tensor | None:
    """Compute attention with the fused Triton kernels.

    Queries, keys and values are converted to one dtype: float32 if any of them is float32, else bfloat16. Mixing coefficients
    become float32, and the scale of the outputs is multiplied into them.

    Args:
        problem: checked arguments of the call. The feature map and the key mask are not applied yet; the kernels do this.
        form: algorithm of attention: ``"parallel"`` (weights of token pairs), ``"chunked"`` (a summary of each block) or
            ``"spanning"`` (running sums across groups of several consecutive blocks).
        only_if_sound: whether to compare the kernels with PyTorch before their first use, and to compute the outputs with
            PyTorch if the kernels fail later.

    Returns:
        Outputs ``[B, N, H, V]`` in the dtype of ``v``. None if ``only_if_sound`` is set and the kernels have not been
        shown to agree with PyTorch; the caller must then use PyTorch.
    """
    q, k, v, weighting, relu = problem.q, problem.k, problem.v, problem.weighting, problem.feature_map == "relu"
    dtype = torch.float32 if torch.float32 in (q.dtype, k.dtype, v.dtype) else torch.bfloat16
    mixer, coefficients = _coefficients(problem, form)
    guard = ""
    if only_if_sound:
        kind = _kind(problem, form, mixer, coefficients, dtype)
        # plain values, not the kind: sound_kernels runs while torch.compile traces
        guard = sound_kernels(q.device.type, q.device.index, *kind)
        if not guard:
            return None
    layout = problem.layout
    if layout.cu_seqlens is not None:  # the kernels read the bounds on the device
        layout = layout._replace(cu_seqlens=on_device(layout.cu_seqlens, q.device))
    k, v = repeat_heads(q, k, v)  # only now: had the call been left to PyTorch, prepare would have repeated them
    out: Tensor = torch.ops.mhla.attention(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        [x.contiguous() for x in coefficients],
        kernel_tables(layout, form, coefficients[0].shape[-1], q.device),
        problem.key_mask,
        layout.cu_seqlens,
        layout.block_size,
        None if layout.block_offsets is None else list(layout.block_offsets),
        bool(weighting.causal),
        relu,
        weighting.eps if weighting.normalize else None,
        form,
        mixer,
        guard,
        weighting.causal == "block",
    )
    return out.to(problem.v.dtype)


def _coefficients(problem: Problem, form: str) -> tuple[str, list[Tensor]]:
    """Convert the mixing coefficients of an attention call to tensors that the Triton kernels read.

    Args:
        problem: arguments of the call.
        form: algorithm of attention: ``"parallel"``, ``"chunked"`` or ``"spanning"``.

    Returns:
        Kind of kernels, ``"dense"`` or ``"exponential"``, and the float32 tensors, which include the scale of the outputs. They
        are one matrix for dense kernels, and amplitudes and decays for exponential ones. In the spanning form, they are the
        four tensors of a :class:`mhla_kernels.mixing.span.Span`.
    """
    layout, causal, scale = problem.layout, bool(problem.weighting.causal), problem.weighting.scale
    mixing, factor = problem.mixing.to(torch.float32), 1.0 if scale is None else scale
    if form == "spanning":
        in_chunk = divide_up(chunk_tokens(layout.tokens, layout.block_size, "triton"), layout.block_size)
        span = mixing.span(in_chunk, causal)
        # Outputs are linear in the matrix and in the reading weights. A factor on the writing weights too would count twice.
        return "exponential", [span.matrix * factor, span.reading * factor, span.writing, span.decay]
    mixer, (first, *others) = mixing.fused(layout.most_blocks, causal, form)
    return mixer, [first * factor, *others]


def _kind(problem: Problem, form: str, mixer: str, coefficients: list[Tensor], dtype: torch.dtype) -> Kind:
    """Describe the Triton kernels that an attention call needs, by dtype, sizes and options.

    The block size is not rounded here. :func:`sound_kernels` rounds it, so that similar sizes share one trial.

    Args:
        problem: checked arguments of the call.
        form: algorithm: ``"parallel"``, ``"chunked"`` or ``"spanning"``.
        mixer: kind of the coefficients, ``"dense"`` or ``"exponential"``.
        coefficients: tensors of the coefficients, as :func:`_coefficients` returns them.
        dtype: dtype of the operands, float32 or bfloat16.
    """
    layout = problem.layout
    return Kind(
        form=form,
        mixer=mixer,
        dtype="float32" if dtype is torch.float32 else "bfloat16",
        key_width=problem.q.shape[-1],
        value_width=problem.v.shape[-1],
        causal=bool(problem.weighting.causal),
        normalize=problem.weighting.normalize,
        relu=problem.feature_map == "relu",
        masked=problem.key_mask is not None,
        layout=layout_name(layout),
        block_size=layout.block_size if layout.block_offsets is None else layout.largest,
        many=form == "chunked" and (layout.is_open or layout.blocks > MANY),  # a symbolic number counts as many
        terms=coefficients[-1].shape[-1] if len(coefficients) > 1 else 0,
        block_causal=problem.weighting.causal == "block",
    )


def layout_name(layout: TokenLayout) -> str:
    """Return the name of a partition of tokens: ``"equal"`` or ``"uneven"`` blocks, or ``"packed"`` sequences."""
    if layout.block_offsets is not None:
        return "uneven"
    return "equal" if layout.cu_seqlens is None else "packed"


@torch.compiler.assume_constant_result
def sound_kernels(device_type: str, device_index: int | None, *fields: Any) -> str:
    """Return the name of the set of Triton kernels for an attention call; an empty string if they may not be used.

    The first call for a set of kernels and a device compares the kernels with PyTorch, on small inputs. Later calls use the
    stored result. Kernels that disagree with PyTorch, or that cannot be compared during the capture of a CUDA graph, may
    not be used.

    Args:
        device_type: type of the device, such as ``"cuda"``.
        device_index: index of the device; None for the current one.
        fields: fields of the :class:`Kind` that describes the call, in order. This function rounds the block size.
    """
    kind = Kind(*fields)
    kind = kind._replace(block_size=size_class(kind.block_size, kind.form))
    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    return str(kind) if may_use(str(kind), str(device), partial(try_kernels, kind, device)) else ""
