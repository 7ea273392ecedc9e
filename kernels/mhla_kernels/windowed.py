"""Softmax over the own and the previous block, joined with MHLA over all blocks before: one normaliser over both.

For token t in block i = b(t), and tokens j <= t,

    w[t, j] = exp(scale q_t . k_j)                                   b(j) >= i - 1   (near)
    w[t, j] = exp(far_t) m[i - 1, b(j)] f_t . g_j                    b(j) <= i - 2   (far)
    o_t = sum_j w[t, j] v_j / sum_j w[t, j]

f and g are nonnegative features of queries and keys. Near tokens are attended to as a softmax model does, which is most of
what linearised language models need (LoLCATs, arXiv 2410.10254, section 3.3, has the join for plain linear attention); far
ones cost a summary of each block. The sums are joined by their logarithms, so that neither overflows.

Shape letters: B batch, N tokens, H heads, M blocks, C slots of a block, K width of a key's features, V width of a value,
W = K V + K numbers of a summary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mhla_kernels.attention import nothing, without_autocast
from mhla_kernels.blocks import make_partition
from mhla_kernels.checks import Problem, check_block_size, check_devices, check_features, check_problem, repeat_heads
from mhla_kernels.finite import finite_
from mhla_kernels.forms.chunked import make_mixer
from mhla_kernels.mixing import Mixing, MixingLike, as_mixing

LEAST_WEIGHT = 0.8
"""Power of the smallest number (4e-31 in float32) below which sums of far weights are not scaled up further."""
MOST_GRADIENT = 0.5
"""Power of the largest number that bounds the gradient of coefficients that are zero, where ``far`` makes it larger."""


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
    """Causal attention, softmax near by and MHLA far away, by the definition above; cost linear in N.

    Args:
        q: ``[B, N, H, Dk]``.
        k: ``[B, N, Hkv, Dk]``; Hkv divides H.
        v: ``[B, N, Hkv, V]``.
        q_features: ``[B, N, H, K]``, nonnegative.
        k_features: ``[B, N, H, K]``, nonnegative.
        mixing: as for causal :func:`mhla_kernels.mhla_attention`, nonnegative.
        block_size: tokens in a block.
        far: logarithm of the weight of far tokens, ``[B, N, H]`` or broadcast to it; None for zeros.
        scale: factor on the scores of near tokens; None for ``Dk ** -0.5``.
        key_mask: ``[B, N]`` bool; False tokens are not attended to and give zeros.
        cu_seqlens: ``[S + 1]``, first token of each packed sequence and N at the end, with B = 1.

    Returns:
        ``[B, N, H, V]`` in the dtype of v; sums are held in float32 (float64 for float64 inputs).

    Raises:
        ValueError: for shapes that do not fit together.
        TypeError: for a dtype that is not float32, bfloat16 or float64.
    """
    mixing, block_size = as_mixing(mixing), check_block_size(block_size)
    problem = check_window(q, k, v, q_features, k_features, mixing, block_size, key_mask, cu_seqlens)
    if v.numel() == 0 or q.numel() == 0:
        return nothing_far((*q.shape[:3], v.shape[-1]), problem, q, k, v, q_features, k_features, far, mixing)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = repeat_heads(q, k, v)
    with without_autocast(q.device.type):
        q, k, v, f, g = (x.to(problem.accumulate) for x in (q, k, v, q_features, k_features))
        real = q.new_ones(q.shape[:2]) if key_mask is None else key_mask.to(q.dtype)
        if key_mask is not None:
            k, v, g = (x.masked_fill(~key_mask[..., None, None], 0) for x in (k, v, g))
        blocks = make_partition(problem.tokens, q.device, block_size, None, problem.cu_seqlens)
        weight = blocks.split(heads_last(far, q))
        q, k, v, f, g = (blocks.split(x) for x in (q, k, v, f, g))
        seen = blocks.split(real[..., None, None])[:, 0, ..., 0] > 0
        starts = torch.arange(blocks.blocks, device=q.device) == 0 if blocks.local is None else blocks.local == 0
        mixer = make_mixer(mixing.to(problem.accumulate), blocks)
        sums = torch.cat([g.transpose(-1, -2) @ v, g.sum(-2)[..., None]], -1)
        mixed = _later(mixer(finite_(sums), causal=True)).masked_fill(starts[:, None, None], 0)
        before = [_later(x) for x in (k, v, seen[:, None, ..., None])]
        seen_before = before[2][:, 0, ..., 0] & ~starts[:, None]
        out = joined(q, k, v, f, weight, before[0], before[1], mixed, seen, seen_before, scale)
        out = blocks.merge(out)
        return (out if key_mask is None else out.masked_fill(~key_mask[..., None, None], 0)).to(problem.dtype)


def nothing_far(
    shape: Sequence[int],
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    g: Tensor,
    far: Tensor | None,
    mixing: Mixing,
) -> Tensor:
    """Zeros of ``shape`` that give all arguments zeros as gradients: there is nothing to attend with."""
    others = [] if far is None else [far]
    return nothing(shape, problem.dtype, q, k, v, f, g, *others, *mixing.tensors.values())


def heads_last(far: Tensor | None, q: Tensor) -> Tensor:
    """``[B, N, H, 1]``."""
    if far is None:
        return q.new_zeros(*q.shape[:3], 1)
    return far.to(q.dtype).expand(q.shape[:3])[..., None]


def _later(x: Tensor) -> Tensor:
    """Blocks ``[B, H, M, ...]``, each in the place of the next; zeros come first."""
    # cut after it was put together: torch.export makes a constant of a number of blocks less one, which may be 1
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
    seen: Tensor,
    seen_before: Tensor,
    scale: float,
) -> Tensor:
    """Outputs ``[B, H, M, C, V]``.

    Args:
        q: ``[B, H, M, C, Dk]``.
        k: ``[B, H, M, C, Dk]``.
        v: ``[B, H, M, C, V]``.
        f: ``[B, H, M, C, K]``.
        far: ``[B, H, M, C, 1]``.
        k_before: of the block before each.
        v_before: the same.
        mixed: ``[B, H, M, K, V + 1]``.
        seen: ``[B, M, C]`` bool, slots whose tokens count.
        seen_before: the same of the block before.
        scale: of scores.
    """
    slots = q.shape[-2]
    own = seen[:, None, :, None] & torch.ones(slots, slots, dtype=torch.bool, device=q.device).tril()
    visible = torch.cat([seen_before[:, None, :, None].expand(-1, -1, -1, slots, -1), own], -1)
    scores = (q * scale) @ torch.cat([k_before, k], -2).transpose(-1, -2)
    return combine(scores, visible, torch.cat([v_before, v], -2), f, mixed, far)


def combine(scores: Tensor, visible: Tensor, v: Tensor, f: Tensor, mixed: Tensor, far: Tensor) -> Tensor:
    """The two parts of the output joined, ``[..., C, V]``; zeros where nothing is seen.

    Every weight is divided by about the largest of its row, a number that is not differentiated: the output does not depend
    on it. Sums of far weights are not divided by themselves, so coefficients of zero have their gradient.

    Args:
        scores: ``[..., C, S]`` of near tokens.
        visible: which of them count.
        v: ``[..., S, V]``.
        f: ``[..., C, K]``, features of the queries.
        mixed: ``[..., K, V + 1]`` of far tokens: their values by weight, and the weights.
        far: ``[..., C, 1]``, logarithm of a factor on the weights of far tokens.
    """
    numbers = torch.finfo(f.dtype)
    # the inverse of a sum of features of 1e-11 each would have a square that overflows, on the way to second derivatives
    size = f.detach().amax(-1, keepdim=True) if f.shape[-1] else torch.ones_like(far)
    size = size.masked_fill(size < numbers.tiny, 1)
    sums = (f / size) @ mixed
    far = far + size.log()
    scores = scores.masked_fill(~visible, -torch.inf)
    weight = sums.detach()[..., -1:]
    none = weight <= 0
    largest = (far.detach() + weight.clamp(min=numbers.tiny**LEAST_WEIGHT).log()).masked_fill(none, numbers.min)
    top = torch.maximum(scores.detach().amax(-1, keepdim=True), largest)
    near = (scores - top).exp()
    # reached by weights of zero alone: their factor has to stay finite, so that zero times it is zero
    bound = torch.where(none, MOST_GRADIENT * math.log(numbers.max), torch.inf)
    factor = torch.minimum(far - top, bound).exp()
    total = near.sum(-1, keepdim=True) + factor * sums[..., -1:]
    unseen = total <= 0
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
    """Check a call; see :func:`mhla_window_attention` for the arguments and errors."""
    for name, x in (("q_features", q_features), ("k_features", k_features)):
        if x.dim() != 4 or x.shape[:3] != q.shape[:3] or x.shape[-1] != q_features.shape[-1]:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [B, N, H, K] for q of {list(q.shape)}")
    check_devices(q, k, v, mixing, key_mask)
    problem = check_problem(
        q, k, v, mixing, block_size, None, True, False, None, 1e-6, "identity", key_mask, cu_seqlens
    )
    features = {"q_features": q_features, "k_features": k_features}
    check_features(features, key_mask, "rows of weights cannot be divided by their sums; give nonnegative ones")
    return problem
