"""Entry point of the fused operator: prepares the arguments of a call and decides whether its kernels may be used."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mhla_kernels.blocks import is_dynamic, most_blocks, on_device
from mhla_kernels.checks import Problem
from mhla_kernels.forms.spanning import chunk_tokens
from mhla_kernels.mixing import Mixing
from mhla_kernels.triton_backend import ops  # noqa: F401  registers the operator
from mhla_kernels.triton_backend.tables import make_tables, rows_in_chunks, token_rows
from mhla_kernels.triton_backend.trial import MANY, Kind, size_class, try_kernels
from mhla_kernels.verdicts import may_use


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Mixing,
    problem: Problem,
    block_size: int | None,
    causal: bool,
    eps: float,
    relu: bool,
    key_mask: Tensor | None,
    form: str,
    only_if_sound: bool,
) -> Tensor | None:
    """Run attention with the fused kernels.

    Operands are brought to one dtype: float32 if any of them has it, else bfloat16. Coefficients become float32, and the
    scale is multiplied into them.

    Args:
        q: queries, ``[B, N, H, K]``.
        k: keys, ``[B, N, H, K]``.
        v: values, ``[B, N, H, V]``.
        mixing: coefficients, shared by the heads or one set for each.
        problem: checked sizes of the call.
        block_size: tokens in a block; None for uneven blocks.
        causal: whether token t attends to tokens ``j <= t`` only.
        eps: added to the normaliser.
        relu: whether the feature map is ``"relu"``.
        key_mask: ``[B, N]`` bool, False for hidden tokens; None if all are visible.
        form: ``"parallel"``, ``"chunked"`` or ``"spanning"``.
        only_if_sound: whether to try the kernels before their first use, and to compute the PyTorch form if they fail later.

    Returns:
        Outputs ``[B, N, H, V]``, or None if ``only_if_sound`` and the kernels may not be used.
    """
    dtype = torch.float32 if torch.float32 in (q.dtype, k.dtype, v.dtype) else torch.bfloat16
    mixing, factor = mixing.to(torch.float32), 1.0 if problem.scale is None else problem.scale
    max_blocks = most_blocks(problem.tokens, block_size, problem.block_offsets)
    chunk = None
    if form == "spanning":
        assert block_size is not None
        chunk = chunk_tokens(problem.tokens, block_size, "triton")
        kind, span = "exponential", mixing.span(-(-chunk // block_size), causal)
        coefficients = [span.matrix * factor, span.reading * factor, span.writing, span.decay]
        terms = span.decay.shape[-1]
    else:
        kind, (first, *others) = mixing.fused(max_blocks, causal, form)
        coefficients, terms = [first * factor, *others], first.shape[-1] if others else 0
    guard = ""
    if only_if_sound:
        offsets = problem.block_offsets
        size = block_size if offsets is None else max(b - a for a, b in pairwise(offsets))
        # sound_kernels runs while torch.compile traces, so it takes plain values; an open number of blocks counts as many
        layout = "uneven" if offsets is not None else "equal" if problem.cu_seqlens is None else "packed"
        guard = sound_kernels(
            q.device.type, q.device.index, form, kind, "float32" if dtype is torch.float32 else "bfloat16", q.shape[-1],
            v.shape[-1], causal, problem.scale is None, relu, key_mask is not None, layout, size,
            form == "chunked" and (is_dynamic(problem.tokens) or problem.blocks > MANY),
            terms,
        )  # fmt: skip
        if not guard:
            return None
    bounds = None if problem.cu_seqlens is None else on_device(problem.cu_seqlens, q.device)
    tables = make_tables(problem.tokens, q.device, chunk or block_size, problem.block_offsets, bounds)
    token_row = None
    if chunk is not None:
        assert block_size is not None
        token_row = rows_in_chunks(problem.tokens, q.device, block_size, chunk, bounds)
    elif form == "parallel":
        token_row = token_rows(tables)
    out: Tensor = torch.ops.mhla.attention(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        [x.contiguous() for x in coefficients],
        key_mask,
        bounds,
        tables.table,
        tables.sequences,
        token_row,
        tables.largest,
        block_size or 0,
        None if problem.block_offsets is None else list(problem.block_offsets),
        causal,
        problem.scale is None,
        relu,
        eps,
        form,
        kind,
        guard,
    )
    return out.to(problem.dtype)


@torch.compiler.assume_constant_result
def sound_kernels(device_type: str, device_index: int | None, *fields: Any) -> str:
    """Name of a kind of kernels, or an empty string if they may not be used on a device.

    Args:
        device_type: type of the device, such as ``"cuda"``.
        device_index: index of the device; None for the current one.
        fields: fields of :class:`Kind`, with the exact block size.
    """
    kind = Kind(*fields)
    kind = kind._replace(block_size=size_class(kind.block_size, kind.form))
    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    return str(kind) if may_use(str(kind), str(device), partial(try_kernels, kind, device)) else ""
