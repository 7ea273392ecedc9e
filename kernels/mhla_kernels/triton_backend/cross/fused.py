"""Entry point of cross-attention on Triton: it decides whether the kernels may be used, and prepares their arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenLayout, on_device
from mhla_kernels.cross.layout import CrossLayout
from mhla_kernels.cross.problem import CrossProblem
from mhla_kernels.mixing import BlockPairs
from mhla_kernels.problem import repeat_heads
from mhla_kernels.triton_backend.config import MANY
from mhla_kernels.triton_backend.cross import ops  # noqa: F401  registers the operator
from mhla_kernels.triton_backend.cross.tables import cross_tables
from mhla_kernels.triton_backend.cross.trial import CrossKind, try_cross_kernels
from mhla_kernels.triton_backend.fused import layout_name
from mhla_kernels.triton_backend.trial import size_class
from mhla_kernels.verdicts import may_use


def attend_cross_fused(problem: CrossProblem, form: str, only_if_sound: bool) -> Tensor | None:
    """Compute cross-attention with the fused Triton kernels.

    Queries, keys and values are converted to one dtype: float32 if any of them is float32, else bfloat16. Mixing coefficients
    become a float32 matrix, and the scale of the outputs is multiplied into it.

    Args:
        problem: checked arguments of the call. The feature map and the masks are not applied yet; the kernels do this.
        form: algorithm: ``"parallel"`` (weights of all token pairs) or ``"chunked"`` (a summary of each block of keys).
        only_if_sound: whether to compare the kernels with PyTorch before their first use, and to compute the outputs with
            PyTorch if the kernels fail later.

    Returns:
        Outputs ``[B, Nq, H, V]`` in the dtype of ``v``. None if ``only_if_sound`` is set and the kernels have not been shown to
        agree with PyTorch; the caller must then use PyTorch.
    """
    q, k, v, weighting = problem.q, problem.k, problem.v, problem.weighting
    dtype = torch.float32 if torch.float32 in (q.dtype, k.dtype, v.dtype) else torch.bfloat16
    guard = ""
    if only_if_sound:
        # plain values, not the kind: sound_cross_kernels runs while torch.compile traces
        guard = sound_cross_kernels(q.device.type, q.device.index, *_kind(problem, form, dtype))
        if not guard:
            return None
    # the kernels read the bounds on the device
    layout = CrossLayout(*(
        side if side.cu_seqlens is None else side._replace(cu_seqlens=on_device(side.cu_seqlens, q.device))
        for side in problem.layout
    ))  # fmt: skip
    mixing = problem.mixing.to(torch.float32)
    sizes = mixing.cross_blocks if layout.is_packed else None
    # a matrix of fixed size holds for every packed sequence; other coefficients depend on the length of the sequence
    matrix = (
        layout.partition(q.device).matrix(mixing) if sizes is None else mixing.cross_matrix(BlockPairs(*sizes, 1.0))
    )
    one_matrix = not layout.is_packed or sizes is not None
    matrix = matrix * (1.0 if weighting.scale is None else weighting.scale)
    k, v = repeat_heads(q, k, v)
    out: Tensor = torch.ops.mhla.cross_attention(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        [(matrix if matrix.dim() == 3 else matrix[None]).contiguous()],
        *cross_tables(layout, form, one_matrix, q.device),
        problem.query_mask,
        problem.key_mask,
        layout.queries.cu_seqlens,
        layout.keys.cu_seqlens,
        layout.queries.block_size,
        layout.keys.block_size,
        *(None if side.block_offsets is None else list(side.block_offsets) for side in layout),
        problem.feature_map == "relu",
        weighting.eps if weighting.normalize else None,
        form,
        guard,
    )
    return out.to(problem.v.dtype)


def _kind(problem: CrossProblem, form: str, dtype: torch.dtype) -> CrossKind:
    """Describe the Triton kernels that a cross-attention call needs, by dtype, sizes and options.

    The block sizes are not rounded here. :func:`sound_cross_kernels` rounds them, so that similar sizes share one trial.

    Args:
        problem: checked arguments of the call.
        form: algorithm: ``"parallel"`` (weights of all token pairs) or ``"chunked"`` (a summary of each block of keys).
        dtype: dtype of the operands, float32 or bfloat16.
    """
    sides: list[TokenLayout] = list(problem.layout)
    names = [layout_name(side) for side in sides]
    sizes = [side.block_size if side.block_offsets is None else side.largest for side in sides]
    return CrossKind(
        form=form,
        dtype="float32" if dtype is torch.float32 else "bfloat16",
        key_width=problem.q.shape[-1],
        value_width=problem.v.shape[-1],
        normalize=problem.weighting.normalize,
        relu=problem.feature_map == "relu",
        queries_masked=problem.query_mask is not None,
        keys_masked=problem.key_mask is not None,
        layout=names[0],
        key_layout=names[1],
        block_size=sizes[0],
        key_block_size=sizes[1],
        many=form == "chunked" and (problem.layout.is_open or any(side.blocks > MANY for side in sides)),
    )


@torch.compiler.assume_constant_result
def sound_cross_kernels(device_type: str, device_index: int | None, *fields: Any) -> str:
    """Return the name of the set of Triton kernels for a cross-attention call; an empty string if they may not be used.

    The first call for a set of kernels and a device compares the kernels with PyTorch, on small inputs. Later calls use the
    stored result. Kernels that disagree with PyTorch, or that cannot be compared during the capture of a CUDA graph, may
    not be used.

    Args:
        device_type: type of the device, such as ``"cuda"``.
        device_index: index of the device; None for the current one.
        fields: fields of the :class:`CrossKind` that describes the call, in order. This function rounds the block sizes.
    """
    kind = CrossKind(*fields)
    kind = kind._replace(
        block_size=size_class(kind.block_size, kind.form), key_block_size=size_class(kind.key_block_size, kind.form)
    )
    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    return str(kind) if may_use(str(kind), str(device), partial(try_cross_kernels, kind, device)) else ""
