"""Causal attention with softmax weights in the query's block and the previous one, and MHLA weights in all earlier blocks.

MHLA is multi-head linear attention with mixing coefficients m between blocks. For token t in block i = b(t), and tokens j <= t,

    w[t, j] = exp(scale q_t . k_j)                                   b(j) >= i - 1   (near)
    w[t, j] = exp(far_t) m[i - 1, b(j)] f_t . g_j                    b(j) <= i - 2   (far)
    o_t = sum_j w[t, j] v_j / sum_j w[t, j]

f and g are nonnegative features of queries and keys. Both kinds of weights share one normalizer. Softmax attention to near
tokens is most of what linearized language models need (LoLCATs, arXiv 2410.10254, section 3.3, describes the combination with
plain linear attention). Far tokens cost one summary per block. The two sums are combined by their logarithms, so that neither
overflows.

Shape letters: B batch, N tokens, H heads, M blocks, C slots of a block, K width of a key's features, V width of a value,
``W = K V + K`` numbers of a summary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mhla_kernels.attention import without_autocast
from mhla_kernels.checks import check_block_size, check_devices, check_features, check_problem
from mhla_kernels.finite import finite_
from mhla_kernels.forms.chunked import make_mixer
from mhla_kernels.mixing import Mixing, MixingLike, as_mixing
from mhla_kernels.problem import Problem, nothing, repeat_heads

LEAST_WEIGHT = 0.8
"""Exponent e: a sum of far weights below ``tiny ** e`` (4e-31 in float32) counts as this bound when the divisor is chosen."""
MOST_GRADIENT = 0.5
"""Exponent e: ``max ** e`` bounds the gradient of coefficients that are zero, which ``far`` can increase."""


def mhla_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    mixing: MixingLike,
    *,
    block_size: int,
    far: Tensor | None = None,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Compute causal attention with softmax weights for near tokens and MHLA weights for far tokens, in time linear in N.

    Near tokens are in the query's block and in the block before it. All earlier tokens are far tokens. The weight of a near
    token j for query t is ``exp(scale q_t . k_j)``. The weight of a far token is ``exp(far_t) m[i - 1, b(j)] f_t . g_j``, with
    block i of the query, block b(j) of token j, mixing coefficients m between blocks, and features f and g of queries and keys.
    Each output is the mean of the values with these weights.

    Args:
        q: queries, ``[B, N, H, Dk]``, for B batch rows, N tokens and H heads of width Dk.
        k: keys, ``[B, N, Hkv, Dk]``; Hkv divides H.
        v: values, ``[B, N, Hkv, V]``.
        q_features: nonnegative features of the queries, ``[B, N, H, K]``.
        k_features: nonnegative features of the keys, ``[B, N, H, K]``.
        mixing: nonnegative coefficients, as for causal :func:`mhla_kernels.mhla_attention`.
        block_size: tokens in a block.
        far: logarithm of a factor on the weights of far tokens, ``[B, N, H]`` or broadcastable to it; None means zeros.
        scale: factor on the scores of near tokens; None means ``Dk ** -0.5``.
        key_mask: ``[B, N]`` bool, False for masked tokens. No token attends to them, and their outputs are zero. None masks no
            token.
        cu_seqlens: ``[S + 1]`` integers for S packed sequences, with B = 1: the index of the first token of each sequence,
            followed by N. None if each row is one sequence.

    Returns:
        Outputs ``[B, N, H, V]`` in the dtype of v. Sums are computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if the shapes do not fit together, or if features are negative.
        TypeError: if a dtype is not float32, bfloat16 or float64.
    """
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    problem = check_window(q, k, v, q_features, k_features, mixing, block_size, key_mask, cu_seqlens)
    if v.numel() == 0 or q.numel() == 0:
        return nothing_far(problem, q_features, k_features, far)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = repeat_heads(q, k, v)
    with without_autocast(q.device.type):
        q, k, v, f, g = (x.to(problem.accumulate) for x in (q, k, v, q_features, k_features))
        real = q.new_ones(q.shape[:2]) if key_mask is None else key_mask.to(q.dtype)
        if key_mask is not None:
            k, v, g = (x.masked_fill(~key_mask[..., None, None], 0) for x in (k, v, g))
        blocks = problem.layout.partition(q.device)
        weight = blocks.split(heads_last(far, q))
        q, k, v, f, g = (blocks.split(x) for x in (q, k, v, f, g))
        visible = blocks.split(real[..., None, None])[:, 0, ..., 0] > 0
        # first blocks of sequences: the block before them belongs to another sequence, or does not exist
        starts = torch.arange(blocks.blocks, device=q.device) == 0 if blocks.local is None else blocks.local == 0
        mixer = make_mixer(mixing.to(problem.accumulate), blocks)
        sums = torch.cat([g.transpose(-1, -2) @ v, g.sum(-2)[..., None]], -1)
        mixed = _later(mixer(finite_(sums), causal=True)).masked_fill(starts[:, None, None], 0)
        previous_blocks = [_later(x) for x in (k, v, visible[:, None, ..., None])]
        visible_before = previous_blocks[2][:, 0, ..., 0] & ~starts[:, None]
        out = joined(q, k, v, f, weight, previous_blocks[0], previous_blocks[1], mixed, visible, visible_before, scale)
        out = blocks.merge(out)
        return (out if key_mask is None else out.masked_fill(~key_mask[..., None, None], 0)).to(problem.v.dtype)


def nothing_far(problem: Problem, f: Tensor, g: Tensor, far: Tensor | None) -> Tensor:
    """Return the outputs of windowed attention for empty inputs: zeros of shape ``[B, N, H, V]``.

    Inputs are empty if the number of batch rows, tokens, heads or features is zero. Windowed attention has
    softmax weights for near tokens and MHLA weights for far tokens. Autograd gives all input tensors gradients of zeros.

    Args:
        problem: checked arguments of :func:`mhla_window_attention`, except the features.
        f: features of the queries, ``[B, N, H, K]``.
        g: features of the keys, ``[B, N, H, K]``.
        far: logarithm of a factor on the weights of far tokens; None if it was not given.
    """
    return nothing(problem, f, g, *([] if far is None else [far]))


def heads_last(far: Tensor | None, q: Tensor) -> Tensor:
    """Expand the logarithm of a factor on the weights of far tokens to one number for each query and head.

    Far tokens are those before the window of softmax attention.

    Args:
        far: tensor broadcastable to ``[B, N, H]``; None for zeros.
        q: queries, ``[B, N, H, Dk]``.

    Returns:
        ``[B, N, H, 1]`` in the dtype of ``q``.
    """
    if far is None:
        return q.new_zeros(*q.shape[:3], 1)
    return far.to(q.dtype).expand(q.shape[:3])[..., None]


def _later(x: Tensor) -> Tensor:
    # concatenate first, then cut: torch.export would make a constant of M - 1 blocks, which may be 1
    return torch.cat([torch.zeros_like(x[:, :, :1]), x], 2)[:, :, :-1]


def joined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    far: Tensor,
    k_before: Tensor,
    v_before: Tensor,
    mixed: Tensor,
    visible: Tensor,
    visible_before: Tensor,
    scale: float,
) -> Tensor:
    """Compute the outputs of windowed attention from near tokens and from mixed summaries of far blocks.

    The near tokens are in the query's block and in the block before it. The far tokens are in all earlier blocks. Each of the M
    blocks has C slots, each of which holds one token or padding.

    Args:
        q: queries, ``[B, H, M, C, Dk]``.
        k: keys, ``[B, H, M, C, Dk]``.
        v: values, ``[B, H, M, C, V]``.
        f: features of the queries, ``[B, H, M, C, K]``.
        far: logarithm of a factor on the weights of far tokens, ``[B, H, M, C, 1]``.
        k_before: keys of the block before each block, ``[B, H, M, C, Dk]``.
        v_before: values of the block before each block, ``[B, H, M, C, V]``.
        mixed: mixed summaries of the far blocks, ``[B, H, M, K, V + 1]``. The last column holds sums of weights.
        visible: mask of slots with a token that may be attended to, ``[B, M, C]`` bool.
        visible_before: the same mask for the block before each block, ``[B, M, C]`` bool.
        scale: factor on the scores of near tokens.

    Returns:
        Outputs, ``[B, H, M, C, V]``.
    """
    slots = q.shape[-2]
    visible_own = visible[:, None, :, None] & torch.ones(slots, slots, dtype=torch.bool, device=q.device).tril()
    visible_keys = torch.cat([visible_before[:, None, :, None].expand(-1, -1, -1, slots, -1), visible_own], -1)
    scores = (q * scale) @ torch.cat([k_before, k], -2).transpose(-1, -2)
    return combine(scores, visible_keys, torch.cat([v_before, v], -2), f, mixed, far)


def combine(scores: Tensor, visible: Tensor, v: Tensor, f: Tensor, mixed: Tensor, far: Tensor) -> Tensor:
    """Combine softmax attention to near tokens and linear attention to far tokens into one output for each query.

    For stability, all weights of a query are divided by a number close to the largest of them. This divisor is a constant for
    autograd, since the output does not depend on it. Far weights are not first divided by their own sum, because coefficients
    of zero would then get no gradient.

    Args:
        scores: scores of the S near tokens for each of C queries, ``[..., C, S]``.
        visible: bool mask of the near tokens that a query attends to, broadcastable to ``scores``.
        v: values of the near tokens, ``[..., S, V]``.
        f: features of the queries, ``[..., C, K]``.
        mixed: for each feature of the keys, V sums of weighted values and the sum of weights, ``[..., K, V + 1]``.
        far: logarithm of a factor on the weights of far tokens, ``[..., C, 1]``.

    Returns:
        Outputs, ``[..., C, V]``; zeros for a query that attends to no token.
    """
    numbers = torch.finfo(f.dtype)
    # normalize the features: with features near 1e-11, second derivatives square the inverse of their sum, which overflows
    size = f.detach().amax(-1, keepdim=True) if f.shape[-1] else torch.ones_like(far)
    size = size.masked_fill(size < numbers.tiny, 1)
    sums = (f / size) @ mixed
    far = far + size.log()
    scores = scores.masked_fill(~visible, -torch.inf)
    weight = sums.detach()[..., -1:]  # the divisor is a constant for autograd
    no_far = weight <= 0
    largest = (far.detach() + weight.clamp(min=numbers.tiny**LEAST_WEIGHT).log()).masked_fill(no_far, numbers.min)
    log_divisor = torch.maximum(scores.detach().amax(-1, keepdim=True), largest)
    near = (scores - log_divisor).exp()
    # far weights that are all zero set no divisor; their factor must stay finite, or zero times it would be NaN
    bound = torch.where(no_far, MOST_GRADIENT * math.log(numbers.max), torch.inf)
    factor = torch.minimum(far - log_divisor, bound).exp()
    total = near.sum(-1, keepdim=True) + factor * sums[..., -1:]
    unseen = total <= 0  # adding it keeps 0 / 0 out of the forward and the backward pass
    return ((near @ v + factor * sums[..., :-1]) / (total + unseen)).masked_fill(unseen, 0)


def check_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    mixing: Mixing,
    block_size: int,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Problem:
    """Check the arguments of windowed attention, and return an object that holds all of them except the features.

    :func:`mhla_window_attention` documents the arguments and the errors.
    """
    for name, x in (("q_features", q_features), ("k_features", k_features)):
        if x.dim() != 4 or x.shape[:3] != q.shape[:3] or x.shape[-1] != q_features.shape[-1]:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [B, N, H, K] for q of {list(q.shape)}")
    problem = check_problem(
        q, k, v, mixing, block_size=block_size, causal=True, normalize=False, key_mask=key_mask, cu_seqlens=cu_seqlens
    )
    check_devices(problem)
    features = {"q_features": q_features, "k_features": k_features}
    check_features(features, key_mask, "rows of weights cannot be divided by their sums; give nonnegative ones")
    return problem
