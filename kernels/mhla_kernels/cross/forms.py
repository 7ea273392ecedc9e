"""Cross-attention in PyTorch with the algorithm that the caller names.

The chunked form summarizes the blocks of keys, mixes the summaries for each block of queries, and applies the mixtures to the
queries:

    S_b = k_b^T v_b                         Nk tokens
    S~ = m S                                [Mq, Mk] times Mk summaries
    o = q S~ / (q . z~ + eps)               Nq tokens

Shape letters: B batch, Nq queries, Nk keys, H heads, Mq and Mk blocks, V width of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mhla_kernels.backend import Form
from mhla_kernels.cross.layout import CrossLayout, CrossPartition
from mhla_kernels.cross.problem import CrossProblem
from mhla_kernels.features import hide
from mhla_kernels.forms import reference
from mhla_kernels.forms.attend import attend_parts
from mhla_kernels.forms.chunked import bidirectional
from mhla_kernels.forms.parallel import parallel
from mhla_kernels.mixing import BlockPairs, Mixing
from mhla_kernels.mixing.base import apply_matrix
from mhla_kernels.problem import zero_outputs


def attend_cross(problem: CrossProblem, form: Form) -> Tensor:
    """Compute cross-attention outputs ``[B, Nq, H, V]`` in PyTorch, with the algorithm that ``form`` names.

    Args:
        problem: checked arguments, as :func:`mhla_kernels.cross.problem.prepare_cross` returns them.
        form: ``"parallel"``, ``"chunked"`` or ``"reference"``. ``"parallel"`` is replaced by ``"chunked"`` for packed sequences
            whose bounds cannot be read, and otherwise by ``"reference"`` for a symbolic number of tokens.
    """
    sequences = problem.layout.sequences
    if sequences is not None and all(a == b or c == d for (a, b), (c, d) in sequences):  # no query has a key
        return zero_outputs(problem.q, problem.k, problem.v, *problem.mixing.tensors.values())
    # a masked query is zero, but zero times an infinite sum over the keys is NaN
    return hide(_attend(problem, form), problem.query_mask)


def cross_weights(problem: CrossProblem) -> Tensor:
    """Compute the weights ``[B, H, Nq, Nk]`` of cross-attention directly from their definition.

    Args:
        problem: checked arguments, as :func:`mhla_kernels.cross.problem.prepare_cross` returns them.
    """
    partition = problem.layout.partition(problem.q.device)
    queries, keys = partition.token_blocks(problem.q.device)
    matrix = partition.matrix(problem.mixing)
    return reference.weights(problem.q, problem.k, matrix, problem.weighting, queries, keys)


def _attend(problem: CrossProblem, form: Form) -> Tensor:
    sequences = problem.layout.sequences
    # if the bounds cannot be read, only the chunked form keeps infinite and NaN values in their own packed sequence
    if form == "chunked" or (form == "parallel" and problem.layout.is_packed and sequences is None):
        return _chunked_in_parts(problem)
    if sequences is not None:
        # one by one, so that infinite and NaN values of one sequence are never multiplied with tokens of another
        outs = [_of_sequence(problem, queries, keys, form) for queries, keys in sequences]
        return torch.cat(outs, 1)
    if form == "parallel" and not problem.layout.is_open:
        return _parallel(problem)
    return reference.attend(cross_weights(problem), problem.v)


def _of_sequence(problem: CrossProblem, queries: tuple[int, int], keys: tuple[int, int], form: Form) -> Tensor:
    """Compute the cross-attention outputs of one packed sequence of queries, which attends to one sequence of keys.

    Args:
        problem: checked arguments for all sequences.
        queries: index of the sequence's first query, and the index after its last query.
        keys: index of the sequence's first key, and the index after its last key.
        form: ``"parallel"`` or ``"reference"``.

    Returns:
        ``[B, n, H, V]`` for n queries; zeros if the sequence has no keys.
    """
    q = problem.q[:, slice(*queries)]
    k, v = problem.k[:, slice(*keys)], problem.v[:, slice(*keys)]
    if not q.shape[1] or not k.shape[1]:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    layout = CrossLayout(*(
        side._replace(tokens=x.shape[1], cu_seqlens=None)
        for side, x in zip(problem.layout, (q, k), strict=True)
    ))  # fmt: skip
    return _attend(problem._replace(q=q, k=k, v=v, layout=layout), form)


def _parallel(problem: CrossProblem) -> Tensor:
    partition = problem.layout.partition(problem.q.device)
    queries, keys = partition.token_blocks(problem.q.device)
    matrix = partition.matrix(problem.mixing)
    return parallel(problem.q, problem.k, problem.v, matrix, problem.weighting, queries, keys)


def _chunked_in_parts(problem: CrossProblem) -> Tensor:
    """Compute cross-attention outputs ``[B, Nq, H, V]`` in the chunked form, from one summary per block of keys.

    On a CPU, a few batch rows or heads are processed at a time, so that their summaries fit into the cache.
    """
    layout, (q, k, v) = problem.layout, problem[:3]
    if q.device.type != "cpu" or torch.compiler.is_compiling() or (layout.is_packed and not torch.is_grad_enabled()):
        return _chunked(problem)
    numbers = (layout.queries.blocks + layout.keys.blocks) * q.shape[-1] * (v.shape[-1] + 1)

    def run(q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
        return _chunked_in_parts(problem._replace(q=q, k=k, v=v, mixing=mixing))

    out = attend_parts((q, k, v), problem.mixing, numbers, run)
    return _chunked(problem) if out is None else out


def _chunked(problem: CrossProblem) -> Tensor:
    blocks = problem.layout.partition(problem.q.device)
    return chunked_by(problem, blocks, make_cross_mix(problem.mixing, blocks))


def chunked_by(problem: CrossProblem, blocks: CrossPartition, mix: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute cross-attention from block summaries (the chunked form), which are mixed by a function that the caller passes.

    Args:
        problem: checked arguments, as :func:`mhla_kernels.cross.problem.prepare_cross` returns them.
        blocks: partition of queries and keys into blocks.
        mix: function from summaries of key blocks ``[B, H, Mk, ...]`` to mixtures for query blocks, ``[B, H, Mq, ...]``.

    Returns:
        Outputs, ``[B, Nq, H, V]``.
    """
    q = blocks.queries.split(problem.q)
    k, v = blocks.keys.split(problem.k), blocks.keys.split(problem.v)
    return blocks.queries.merge(bidirectional(q, k, v, mix, problem.weighting))


def make_cross_mix(mixing: Mixing, blocks: CrossPartition) -> Callable[[Tensor], Tensor]:
    """Return a function that mixes summaries of key blocks ``[B, H, Mk, ...]`` for each query block, ``[B, H, Mq, ...]``.

    If the bounds of packed sequences are known only on the device, the function applies one matrix to all blocks, with zeros
    between blocks of different sequences.

    Args:
        mixing: mixing coefficients between query blocks and key blocks.
        blocks: partition of queries and keys into blocks.
    """
    sequences = blocks.block_sequences()
    if sequences is None:
        return mix_by_matrix(blocks.matrix(mixing), blocks.together)

    def mix_each(summary: Tensor) -> Tensor:
        flat, parts = summary.flatten(3), []
        for (first, last), (first_key, last_key) in sequences:
            read = flat[:, :, first_key:last_key]
            if last == first or last_key == first_key:
                parts.append(read.new_zeros(*read.shape[:2], last - first, read.shape[3]))
                continue
            counts = last - first, last_key - first_key
            parts.append(apply_matrix(mixing.cross_matrix(BlockPairs(*counts, counts[1] / counts[0])), read))
        return _shaped(torch.cat(parts, 2), summary)

    return mix_each


def mix_by_matrix(matrix: Tensor, together: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function that mixes summaries of key blocks by one matrix ``[Mq, Mk]`` or ``[H, Mq, Mk]``.

    Args:
        matrix: coefficients between all query blocks and all key blocks, zero between different packed sequences.
        together: whether a query block and a key block belong to the same packed sequence, ``[Mq, Mk]`` bool; None without
            packing. With this mask, a sum that overflowed makes only mixtures of its own sequence NaN.
    """

    def mix(summary: Tensor) -> Tensor:
        flat = summary.flatten(3)
        if together is None:
            return _shaped(apply_matrix(matrix, flat), summary)
        # The zero coefficients between sequences times an infinite sum would be NaN everywhere. Such sums are left out of the
        # product, and the mixtures that would read them become NaN afterwards.
        broken = ~flat.isfinite().all(-1)  # [B, H, Mk]
        mixed = apply_matrix(matrix, flat.masked_fill(broken[..., None], 0))
        # The shape is [B, H, Mq].
        spoilt = (together & broken[:, :, None]).any(-1)
        return _shaped(mixed.masked_fill(spoilt[..., None], torch.nan), summary)

    return mix


def _shaped(mixed: Tensor, summary: Tensor) -> Tensor:
    return mixed.view(*mixed.shape[:3], *summary.shape[3:])
