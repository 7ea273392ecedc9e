"""Dispatch to the forms in PyTorch, for mapped tensors of one dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhla_kernels.backend import ChosenForm, Form
from mhla_kernels.blocks import divide_up, is_dynamic, make_partition, most_blocks, token_blocks
from mhla_kernels.forms import reference
from mhla_kernels.forms.chunked import chunked, make_mixer
from mhla_kernels.forms.cost import numbers_held
from mhla_kernels.forms.parallel import parallel
from mhla_kernels.forms.spanning import chunk_tokens, spanning
from mhla_kernels.mixing import Mixing
from mhla_kernels.mixing.span import Span

PART = 16 * 2**20
"""Bytes of summaries that are held at once on a CPU.

They fit into its cache, and memory of this size is used again instead of being requested from the system, page by page; see
``benchmarks.short_blocks``."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Mixing,
    form: Form,
    *,
    block_size: int | None,
    block_offsets: tuple[int, ...] | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    eps: float,
) -> Tensor:
    """Compute the outputs ``[B, N, H, V]`` in the given form.

    The arguments are those of :func:`mhla_kernels.mhla_attention` after its checks. ``scale`` None means that rows are
    divided by the normalizer.
    """
    options: dict[str, Any] = {"causal": causal, "scale": scale, "eps": eps}
    tokens, device = q.shape[1], q.device
    # A few rows at a time keep the summaries in the cache. Packed rows are copied for every part, which pays off only if a
    # backward pass follows.
    if (
        (form == "chunked" or form == "spanning")
        and device.type == "cpu"
        and not torch.compiler.is_compiling()
        and (cu_seqlens is None or torch.is_grad_enabled())
    ):
        rows = _rows_at_once(q, v, mixing, form, block_size, block_offsets, causal)
        if rows < q.shape[0] * q.shape[2]:
            layout = {"block_size": block_size, "block_offsets": block_offsets, "cu_seqlens": cu_seqlens}
            out = _in_parts((q, k, v), mixing, form, rows, options | layout)
            if out is not None:
                return out
    if form == "reference" or (form == "parallel" and is_dynamic(tokens)):
        where = token_blocks(tokens, device, block_size, block_offsets, cu_seqlens)
        matrix = mixing.matrix(most_blocks(tokens, block_size, block_offsets))
        return reference.attend(reference.weights(q, k, matrix, where, **options), v)
    if form == "spanning":
        assert block_size is not None
        chunk = chunk_tokens(tokens, block_size)
        span = mixing.span(divide_up(chunk, block_size), causal)
        return attend_span(q, k, v, span, block_size, chunk, cu_seqlens, **options)
    blocks = make_partition(tokens, device, block_size, block_offsets, cu_seqlens)
    if form == "parallel":
        matrix = blocks.expand_mixing(mixing.matrix(most_blocks(tokens, block_size, block_offsets)))
        q, k, v = blocks.line_up(q), blocks.line_up(k), blocks.line_up(v)
        return blocks.take_out(parallel(q, k, v, matrix, **options))
    q, k, v = blocks.split(q), blocks.split(k), blocks.split(v)
    return blocks.merge(chunked(q, k, v, make_mixer(mixing, blocks), **options))


def _rows_at_once(
    q: Tensor,
    v: Tensor,
    mixing: Mixing,
    form: ChosenForm,
    block_size: int | None,
    block_offsets: tuple[int, ...] | None,
    causal: bool,
) -> int:
    """Return how many rows (of batch times heads) hold about as much as :data:`PART`, at least 1."""
    blocks, terms = most_blocks(q.shape[1], block_size, block_offsets), mixing.span_terms(causal) or 0
    numbers = numbers_held(form, q.shape[1], blocks, q.shape[-1], v.shape[-1], terms)
    return max(1, PART // max(1, numbers * v.element_size()))


def _in_parts(
    tokens: tuple[Tensor, Tensor, Tensor], mixing: Mixing, form: Form, rows: int, options: dict[str, Any]
) -> Tensor | None:
    """Compute the outputs of a few rows at a time: rows of the batch, or heads of a single row.

    Args:
        tokens: q ``[B, N, H, K]``, k ``[B, N, H, K]`` and v ``[B, N, H, V]``.
        mixing: the coefficients.
        form: form of the call.
        rows: rows (of batch times heads) at a time.
        options: remaining arguments of :func:`attend`.

    Returns:
        Outputs ``[B, N, H, V]``; None for a batch of one row whose coefficients cannot be split by head.
    """
    batch, _, heads, _ = tokens[0].shape
    axis, count = (0, max(1, rows // heads)) if batch > 1 else (2, rows)
    parts = []
    for index, (q, k, v) in enumerate(zip(*(x.split(count, axis) for x in tokens), strict=True)):
        part_mixing = mixing.of_heads(slice(index * count, (index + 1) * count)) if axis == 2 else mixing
        if part_mixing is None:
            return None
        parts.append(attend(q, k, v, part_mixing, form, **options))
    return torch.cat(parts, axis)


def attend_span(
    q: Tensor, k: Tensor, v: Tensor, span: Span, block_size: int, chunk: int, cu_seqlens: Tensor | None, **options: Any
) -> Tensor:
    """Compute the outputs ``[B, N, H, V]`` of the spanning form.

    Args:
        q: ``[B, N, H, K]``.
        k: ``[B, N, H, K]``.
        v: ``[B, N, H, V]``.
        span: coefficients by chunks.
        block_size: tokens in a block.
        chunk: tokens in a chunk.
        cu_seqlens: ``[S + 1]`` bounds of packed sequences, or None.
        options: ``causal``, ``scale`` and ``eps``, as for the other forms.
    """
    chunks = make_partition(q.shape[1], q.device, chunk, None, cu_seqlens)
    q, k, v = chunks.split(q), chunks.split(k), chunks.split(v)
    return chunks.merge(spanning(q, k, v, span, block_size, chunks, **options))
