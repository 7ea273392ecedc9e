"""Computation of attention in PyTorch with the algorithm that the caller names.

Tokens are arranged in blocks, attention is computed, and its outputs are put back into the order of the tokens.

Shape letters: B batch, N tokens, H heads, V width of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mhla_kernels.backend import ChosenForm, Form
from mhla_kernels.blocks import TokenLayout, divide_up
from mhla_kernels.forms import reference
from mhla_kernels.forms.chunked import chunked, make_mixer
from mhla_kernels.forms.cost import numbers_held
from mhla_kernels.forms.parallel import parallel
from mhla_kernels.forms.spanning import chunk_tokens, spanning
from mhla_kernels.mixing import Mixing
from mhla_kernels.mixing.span import Span
from mhla_kernels.problem import Problem, Weighting, prepare

PART = 16 * 2**20
"""Bytes of summaries that are held at once on a CPU.

This size fits into the CPU's cache. Memory of this size is also reused instead of being requested from the system page by page;
see ``benchmarks.short_blocks``."""


def attend(problem: Problem, form: Form) -> Tensor:
    """Compute attention outputs ``[B, N, H, V]`` in PyTorch, with the algorithm that ``form`` names.

    Args:
        problem: checked arguments.
        form: ``"parallel"``, ``"chunked"``, ``"spanning"`` or ``"reference"``. ``"auto"`` is not supported here. For a symbolic
            number of tokens, ``"parallel"`` is replaced by ``"reference"``.
    """
    if form == "parallel" and not problem.layout.is_open:
        return _parallel(prepare(problem, features=False))
    problem = prepare(problem)
    layout = problem.layout
    # Computing a few rows at a time keeps the summaries in the CPU's cache. With packed sequences, tokens are copied for every
    # part, which pays off only if a backward pass follows.
    if (
        (form == "chunked" or form == "spanning")
        and problem.q.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and (layout.cu_seqlens is None or torch.is_grad_enabled())
    ):
        out = _in_parts(problem, form)
        if out is not None:
            return out
    if form == "spanning":
        return _spanning(problem)
    if form == "chunked":
        return _chunked(problem)
    return reference.attend(attention_weights(problem), problem.v)


def attention_weights(problem: Problem) -> Tensor:
    """Compute the attention weights ``[B, H, N, N]`` directly from their definition.

    Args:
        problem: checked arguments, with mapped features and one key head per query head, as
            :func:`mhla_kernels.problem.prepare` returns them.
    """
    layout = problem.layout
    matrix, where = problem.mixing.matrix(layout.most_blocks), layout.token_blocks(problem.q.device)
    return reference.weights(problem.q, problem.k, matrix, problem.weighting, where, where)


def _parallel(problem: Problem) -> Tensor:
    layout = problem.layout
    matrix, where = problem.mixing.matrix(layout.most_blocks), layout.token_blocks(problem.q.device)
    relu = problem.feature_map == "relu"
    return parallel(problem.q, problem.k, problem.v, matrix, problem.weighting, where, where, relu)


def _chunked(problem: Problem) -> Tensor:
    blocks = problem.layout.partition(problem.q.device)
    q, k, v = blocks.split(problem.q), blocks.split(problem.k), blocks.split(problem.v)
    return blocks.merge(chunked(q, k, v, make_mixer(problem.mixing, blocks), problem.weighting))


def _spanning(problem: Problem) -> Tensor:
    layout, weighting = problem.layout, problem.weighting
    in_chunk = divide_up(chunk_tokens(layout.tokens, layout.block_size), layout.block_size)
    span = problem.mixing.span(in_chunk, bool(weighting.causal))
    return attend_span(problem.q, problem.k, problem.v, span, layout, weighting)


def attend_span(q: Tensor, k: Tensor, v: Tensor, span: Span, layout: TokenLayout, weighting: Weighting) -> Tensor:
    """Compute attention in the spanning form: directly within chunks of several blocks, and by running sums between chunks.

    Args:
        q: queries, ``[B, N, H, K]``.
        k: keys, ``[B, N, H, K]``.
        v: values, ``[B, N, H, V]``.
        span: mixing coefficients within and between chunks. Their shape gives the number of blocks in a chunk.
        layout: partition of the tokens into equal blocks.
        weighting: causality and normalization of the attention weights.

    Returns:
        Outputs, ``[B, N, H, V]``.
    """
    chunks = layout.in_chunks(span.matrix.shape[-1]).partition(q.device)
    q, k, v = chunks.split(q), chunks.split(k), chunks.split(v)
    return chunks.merge(spanning(q, k, v, span, layout.block_size, chunks, weighting))


def _in_parts(problem: Problem, form: ChosenForm) -> Tensor | None:
    """Compute attention for a few batch rows at a time, or for a few heads at a time if the batch has one row.

    The block summaries (sums over the keys and values of a block) of each part need at most 16 MiB, if possible.

    Args:
        problem: checked arguments, as :func:`mhla_kernels.problem.prepare` returns them.
        form: ``"chunked"`` or ``"spanning"``.

    Returns:
        Outputs ``[B, N, H, V]``. None if all block summaries fit into 16 MiB, so that the computation need not be split,
        or if the batch has one row and the mixing coefficients cannot be split by head.
    """
    q, k, v, mixing, layout, weighting = problem[:6]
    terms = mixing.span_terms(bool(weighting.causal)) or 0
    numbers = numbers_held(form, q.shape[1], layout.most_blocks, q.shape[-1], v.shape[-1], terms)

    def run(q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
        # attend cuts a part again if the heads of one row of the batch still hold more than PART
        return attend(Problem(q, k, v, mixing, layout, weighting), form)

    return attend_parts((q, k, v), mixing, numbers, run)


def attend_parts(
    tensors: tuple[Tensor, Tensor, Tensor],
    mixing: Mixing,
    numbers: int,
    run: Callable[[Tensor, Tensor, Tensor, Mixing], Tensor],
) -> Tensor | None:
    """Compute attention for a few batch rows or heads at a time, so that the values held at once fit into 16 MiB, if possible.

    Args:
        tensors: q, k and v, ``[B, N, H, ...]``.
        mixing: mixing coefficients.
        numbers: number of values, such as the entries of block summaries, that are held for one batch row and head.
        run: function that computes the outputs of a part, from its q, k, v and mixing.

    Returns:
        Outputs ``[B, N, H, V]``. None if nothing needs to be split, or if the batch has one row and the mixing coefficients
        cannot be split by head.
    """
    q, _, v = tensors
    batch, _, heads, _ = q.shape
    rows = max(1, PART // max(1, numbers * v.element_size()))
    if rows >= batch * heads:
        return None
    # Parts of the heads need coefficients that can be split by head, so they are used only for a single row.
    axis, count = (0, max(1, rows // heads)) if batch > 1 else (2, rows)
    parts = []
    q_parts, k_parts, v_parts = (x.split(count, axis) for x in tensors)
    for index, part in enumerate(zip(q_parts, k_parts, v_parts, strict=True)):
        part_mixing = mixing.of_heads(slice(index * count, (index + 1) * count)) if axis == 2 else mixing
        if part_mixing is None:
            return None
        parts.append(run(*part, part_mixing))
    return torch.cat(parts, axis)
