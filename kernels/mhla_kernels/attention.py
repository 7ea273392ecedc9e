"""Public functions that compute multi-head linear attention (MHLA) for complete sequences, instead of token by token.

Queries read the keys and values of their own sequence or, in cross-attention, of a second sequence. The arguments are checked
once, here. The algorithms that these functions call assume valid arguments.

Shape letters: B batch, N tokens (in cross-attention Nq queries and Nk keys), H heads, Dk and Dv widths of a key and of a value,
M blocks (Mq of queries and Mk of keys), S packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from mhla_kernels.backend import Backend, ChosenForm, Form, check_form_and_backend, choose_backend
from mhla_kernels.blocks import divide_up
from mhla_kernels.checks import check_devices, check_problem, check_span
from mhla_kernels.cross.checks import check_cross, is_cross
from mhla_kernels.cross_attention import cross_attention, cross_attention_matrix
from mhla_kernels.features import FeatureMap
from mhla_kernels.forms.attend import attend, attention_weights
from mhla_kernels.forms.cost import cheapest_form
from mhla_kernels.mixing import MixingLike
from mhla_kernels.problem import Causal, Problem, nothing, prepare


def mhla_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: MixingLike,
    *,
    block_size: int | None = None,
    block_offsets: Tensor | Sequence[int] | None = None,
    key_block_size: int | None = None,
    key_block_offsets: Tensor | Sequence[int] | None = None,
    causal: Causal = False,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_map: FeatureMap = "identity",
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    key_cu_seqlens: Tensor | Sequence[int] | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
) -> Tensor:
    """Compute linear attention whose query blocks mix the key-value summaries of all blocks (arXiv 2601.07832).

    **Features must be nonnegative while** ``normalize`` **is on. By default, no feature map is applied to q and k.** Pass
    ``feature_map="relu"``, map q and k yourself (with ``elu(x) + 1``, for example), or pass ``normalize=False``. On a CPU,
    every call raises a ValueError for negative features that are too large in magnitude to be rounding errors. On each
    accelerator, only the first call of the process checks for them. Calls in compiled graphs, under transformations of
    ``torch.func`` and in CUDA graph capture do not check.

    The tokens are divided into blocks, and the keys and values of each block are summarized as sums of ``k_j v_j^T``. With b(t)
    for the block of token t, the weight of a token pair is ``A[t, j] = m[b(t), b(j)] * (q_t . k_j)``, zero where masked. If
    ``normalize`` is on, each row of weights is divided by its sum + ``eps``. Otherwise it is multiplied by ``scale``. Sums are
    accumulated in float32 (float64 for float64 inputs), also under autocast.

    In cross-attention, Nq queries attend to the Nk keys of another sequence, which has its own blocks, and the weight is
    ``m[b(t), b'(j)] * (q_t . k_j)`` with b'(j) for the key block of token j. A call is cross-attention if q and k differ in
    length, or if one of ``key_block_size``, ``key_block_offsets``, ``query_mask`` and ``key_cu_seqlens`` is given.
    Pass ``key_block_size`` wherever the two lengths could be equal: with equal lengths and without any of these arguments, the
    call is self-attention, where ``key_mask`` also masks queries.

    Args:
        q: queries, ``[B, N, H, Dk]``, for B batch rows, N tokens and H heads of width Dk. With ``normalize``, nonnegative after
            the feature map. In cross-attention, ``[B, Nq, H, Dk]``.
        k: keys, ``[B, N, Hkv, Dk]``, or ``[B, Nk, Hkv, Dk]`` in cross-attention. With ``normalize``, nonnegative after the
            feature map. Hkv divides H: every key and value head serves ``H / Hkv`` neighboring query heads.
        v: values, ``[B, N, Hkv, Dv]``, or ``[B, Nk, Hkv, Dv]`` in cross-attention.
        mixing: coefficients m of M blocks, ``[M, M]`` for all heads or ``[H, M, M]``. Row i holds the weights that query block
            i gives to the key blocks. Causal attention accepts a matrix for more blocks, and uses its top left corner.
            Bidirectional attention does not. An :class:`ExponentialMixing` covers any number of blocks (unless it is made for a
            grid of blocks), at a cost that is linear in this number. (Bidirectional attention on Triton is an exception: it
            computes the matrix.) Other subclasses of :class:`mhla_kernels.mixing.Mixing` are accepted too. In cross-attention,
            the coefficients are ``[Mq, Mk]`` or ``[H, Mq, Mk]`` for exactly Mq query blocks and Mk key blocks. An
            :class:`ExponentialMixing` is then applied as a matrix, for two sequences that cover the same axis: the distance
            between query block i and key block j is ``|(i + 1/2) Mk / Mq - (j + 1/2)|``, in key blocks. With a grid, both sides
            have this grid.
        block_size: tokens in a block; the last block may be shorter. Give exactly one of this and ``block_offsets``. In
            cross-attention, they describe the blocks of queries and, by default, also those of keys.
        block_offsets: M + 1 integers for blocks of uneven size: the index of the first token of each block, followed by N. Not
            for ``causal=True`` or packed sequences. Prefer a tuple: reading a tensor on an accelerator waits for the device.
        key_block_size: tokens in a block of keys, in cross-attention. If neither this nor ``key_block_offsets`` is given,
            ``block_size`` or ``block_offsets`` applies to the keys too.
        key_block_offsets: ``Mk + 1`` integers for key blocks of uneven size, in cross-attention.
        causal: whether token t attends to tokens ``j <= t`` only. With ``"block"``, it attends to all tokens of its own block
            and of all blocks before it: ``b(j) <= b(t)``. Cross-attention is bidirectional.
        normalize: whether each row of weights is divided by its sum.
        scale: factor on the output, only without ``normalize``; None means ``Dk ** -0.5``.
        eps: positive number that is added to the sum of a row of weights before the division.
        feature_map: ``"identity"`` (q and k are already mapped) or ``"relu"``: ``relu(x) + 1e-6``.
        key_mask: ``[B, N]`` bool, False for masked tokens. No token attends to a masked token. Masked tokens keep their
            position and block. Their outputs are zero, and no gradient passes through them. The output of a token that attends
            to no key is also zero. None masks no token. In cross-attention, ``[B, Nk]``, only keys and values are masked, and
            one of the four arguments that exist only for cross-attention must be given.
        query_mask: ``[B, Nq]`` bool, False for masked queries, in cross-attention. Their outputs are zero, and no gradient
            passes through them. They may hold any value. None masks no query.
        cu_seqlens: ``[S + 1]`` integers for S packed sequences, with B = 1: the index of the first token of each sequence,
            followed by N. Blocks are counted from the first token of each sequence. Packing requires one of: causal attention,
            exactly M blocks in every non-empty sequence, or an :class:`ExponentialMixing` without a grid. Values on a CPU are
            checked at once; values on an accelerator are checked by the device itself, without waiting for it. None if each row
            is one sequence. In cross-attention, the bounds of the queries.
        key_cu_seqlens: ``[S + 1]`` integers, the bounds of the keys in packed cross-attention, which requires ``cu_seqlens``
            too: the queries of sequence s attend to the keys of sequence s. A sequence may have no queries or no keys; queries
            without keys have zero outputs. Unless ``mixing`` is an :class:`ExponentialMixing` without a grid, every non-empty
            sequence must have exactly Mq blocks of queries or Mk blocks of keys.
        form: algorithm: ``"parallel"`` (all token pairs), ``"chunked"`` (one summary per block), ``"spanning"`` (chunks of
            several blocks, for an :class:`ExponentialMixing` without a grid and blocks of equal size), ``"reference"`` (the
            ``N x N`` matrix of weights, by definition), or ``"auto"``: the cheapest of the first three. Cross-attention has no
            spanning form. If N is symbolic under ``torch.export``, ``"auto"`` means ``"chunked"``, and exponential mixing is
            applied as a matrix.
        backend: ``"torch"``, ``"triton"`` (fused kernels, for float32 and bfloat16 on a GPU, widths up to 256; on a CPU in
            Triton's interpreter, with ``TRITON_INTERPRET=1``), or ``"auto"``: Triton wherever it can run on a GPU.

    Returns:
        Outputs, ``[B, N, H, Dv]`` in the dtype of ``v``, contiguous (``[B, Nq, H, Dv]`` in cross-attention). Zeros if q and k
        have no features (Dk = 0), or if there are no keys.

        With ``causal=True``, earlier outputs do not depend on later tokens: no finite query, key or value at a later token
        changes a single bit of them, with any algorithm. Their gradients are also bit-identical if the later outputs are
        finite. An infinite or NaN key or value makes the rows of its block non-finite, from its own row on. Rows of later
        blocks are then meaningless (with ``"parallel"`` they are non-finite).

        With ``causal="block"``, the same holds for tokens of later blocks, with two differences. An infinite or NaN key or
        value makes all rows of its block non-finite. The gradients of earlier outputs with respect to the tokens of their and
        earlier blocks, and to ``mixing``, are bit-identical even if outputs of a later block overflow: with ``"chunked"``
        always, with the other algorithms as long as the weights ``A[t, j]`` of later tokens, and their queries and keys times a
        coefficient, are finite.

        In cross-attention, a masked key, or a finite key of a different packed sequence, does not change a single bit of an
        output or of a gradient. Where the bounds of the sequences are on a CPU, this also holds for infinite and NaN keys.

    Raises:
        ValueError: for shapes, sizes, devices and options that do not fit together, for negative features with ``normalize``,
            and for decays of an :class:`ExponentialMixing` that are negative or not finite. The message names the value and the
            remedy.
        TypeError: if q, k or v has a dtype other than float32, bfloat16 and float64 (float16 sums overflow), if one of them or
            a mask is not a tensor, or if ``mixing`` is neither a floating-point tensor nor a
            :class:`mhla_kernels.mixing.Mixing`.
    """
    check_form_and_backend(form, backend)
    if is_cross(q, k, key_block_size, key_block_offsets, query_mask, key_cu_seqlens):
        cross_problem = check_cross(
            q, k, v, mixing, block_size=block_size, block_offsets=block_offsets, key_block_size=key_block_size,
            key_block_offsets=key_block_offsets, causal=causal, normalize=normalize, scale=scale, eps=eps,
            feature_map=feature_map, query_mask=query_mask, key_mask=key_mask, cu_seqlens=cu_seqlens,
            key_cu_seqlens=key_cu_seqlens,
        )  # fmt: skip
        with without_autocast(q.device.type):
            return cross_attention(cross_problem, form, backend)
    problem = check_problem(
        q, k, v, mixing, block_size=block_size, block_offsets=block_offsets, causal=causal, normalize=normalize, scale=scale,
        eps=eps, feature_map=feature_map, key_mask=key_mask, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    check_devices(problem)
    if form == "spanning":
        check_span(problem)
    fused = choose_backend(backend, q, k, v, form) == "triton"
    if q.numel() == 0 or v.numel() == 0:
        return nothing(problem)
    with without_autocast(q.device.type):
        if fused:
            from mhla_kernels.triton_backend.fused import attend_fused  # needs triton

            fused_form = _choose_form(problem, fused=True) if form == "auto" else form
            out = attend_fused(problem, fused_form, only_if_sound=backend == "auto")
            if out is not None:  # None: "auto", and these kernels may not be used here
                return out.contiguous()
        if form == "auto":
            form = _choose_form(problem, fused=False)
        return attend(problem, form).to(v.dtype).contiguous()


def attention_matrix(
    q: Tensor,
    k: Tensor,
    mixing: MixingLike,
    *,
    block_size: int | None = None,
    block_offsets: Tensor | Sequence[int] | None = None,
    key_block_size: int | None = None,
    key_block_offsets: Tensor | Sequence[int] | None = None,
    causal: Causal = False,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_map: FeatureMap = "identity",
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    key_cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Compute the matrix of weights with which :func:`mhla_attention` sums the values.

    Entry ``[b, h, t, j]`` is the weight that query token t gives to key token j, after normalization or scaling. Memory grows
    with N squared, so this function is for analysis and tests.

    Args:
        q: queries, ``[B, N, H, Dk]``, or ``[B, Nq, H, Dk]`` in cross-attention.
        k: keys, ``[B, N, Hkv, Dk]``, or ``[B, Nk, Hkv, Dk]`` in cross-attention; Hkv divides H.
        mixing: coefficients between M blocks, ``[M, M]`` or ``[H, M, M]``, or an :class:`ExponentialMixing`, as for
            :func:`mhla_attention`. In cross-attention, ``[Mq, Mk]`` or ``[H, Mq, Mk]``.
        block_size: tokens in a block; the last block may be shorter. Give exactly one of this and ``block_offsets``. In
            cross-attention, they describe the blocks of queries and, by default, also those of keys.
        block_offsets: for M uneven blocks, M + 1 integers: the index of the first token of each block, followed by N.
        key_block_size: tokens in a block of keys, in cross-attention. If neither this nor ``key_block_offsets`` is given,
            ``block_size`` or ``block_offsets`` applies to the keys too.
        key_block_offsets: ``Mk + 1`` integers for key blocks of uneven size, in cross-attention.
        causal: whether token t attends to tokens ``j <= t`` only; ``"block"`` if it attends to all tokens of its own block and
            of the blocks before it.
        normalize: whether each row of weights is divided by its sum.
        scale: factor on the weights, only without ``normalize``; None means ``Dk ** -0.5``.
        eps: positive number that is added to the sum of a row of weights before the division.
        feature_map: ``"identity"`` (q and k are already mapped) or ``"relu"``: ``relu(x) + 1e-6``.
        key_mask: ``[B, N]`` bool, False for masked tokens, whose rows and columns are zero; None masks no token. In
            cross-attention, ``[B, Nk]``: only columns are zero.
        query_mask: ``[B, Nq]`` bool, False for masked queries, whose rows are zero, in cross-attention; None masks no query.
        cu_seqlens: for S packed sequences, ``[S + 1]`` integers: the index of the first token of each sequence, followed by N.
            None if each row is one sequence. In cross-attention, the bounds of the queries.
        key_cu_seqlens: ``[S + 1]`` integers, the bounds of the keys of packed sequences, in cross-attention; None without
            packing.

    Returns:
        Weights, ``[B, H, N, N]``, or ``[B, H, Nq, Nk]`` in cross-attention, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: for arguments that :func:`mhla_attention` rejects.
        TypeError: for types and dtypes that :func:`mhla_attention` rejects.
    """
    if is_cross(q, k, key_block_size, key_block_offsets, query_mask, key_cu_seqlens):
        cross_problem = check_cross(
            q, k, k, mixing, block_size=block_size, block_offsets=block_offsets, key_block_size=key_block_size,
            key_block_offsets=key_block_offsets, causal=causal, normalize=normalize, scale=scale, eps=eps,
            feature_map=feature_map, query_mask=query_mask, key_mask=key_mask, cu_seqlens=cu_seqlens,
            key_cu_seqlens=key_cu_seqlens,
        )  # fmt: skip
        with without_autocast(q.device.type):
            return cross_attention_matrix(cross_problem)
    problem = check_problem(
        q, k, k, mixing, block_size=block_size, block_offsets=block_offsets, causal=causal, normalize=normalize, scale=scale,
        eps=eps, feature_map=feature_map, key_mask=key_mask, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    check_devices(problem)
    with without_autocast(q.device.type):
        return attention_weights(prepare(problem))


def _choose_form(problem: Problem, fused: bool) -> ChosenForm:
    """Choose the algorithm with the lowest estimated cost for an attention call.

    If the number of tokens is symbolic, as under ``torch.export``, the choice is always ``"chunked"``. The Triton kernels
    compute no token pairs across packed sequences, so their cost is estimated for sequences of average length.

    Args:
        problem: checked arguments of the call.
        fused: whether Triton kernels, instead of PyTorch, are to compute the call.

    Returns:
        ``"parallel"``, ``"chunked"`` or ``"spanning"``.
    """
    q, layout, mixing, causal = problem.q, problem.layout, problem.mixing, problem.weighting.causal
    if layout.is_open:
        return "chunked"
    tokens, blocks, rows = layout.tokens, layout.blocks, q.shape[0] * q.shape[2]
    if fused and layout.cu_seqlens is not None:
        sequences = max(1, len(layout.cu_seqlens) - 1)
        tokens, blocks, rows = divide_up(tokens, sequences), divide_up(blocks, sequences), rows * sequences
    work = mixing.work(blocks, bool(causal), fused)
    terms = mixing.span_terms(bool(causal)) if layout.block_offsets is None else None
    backend: Literal["torch", "triton"] = "triton" if fused else "torch"
    return cheapest_form(
        tokens, blocks, q.shape[-1], problem.v.shape[-1], causal, work=work, terms=terms, rows=rows, backend=backend
    )


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context manager that turns autocast off for a type of device, such as ``"cuda"``.

    Sums that are computed inside the context keep the dtype of their inputs.
    """
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
