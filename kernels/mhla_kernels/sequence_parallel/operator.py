"""MHLA over a sequence whose tokens are spread over processes: they exchange block summaries, not tokens.

Process p holds whole blocks, a range [f_p, l_p) of them. It computes its own summaries, and of the others' it needs

    dense m          every summary S_b, or, where those are fewer bytes, every k and v instead;
    exponential m    for each of the R terms one sum from every process on its left, and one from its right:
                     L_r = sum_{p' < p} e^{-lambda_r (f_p - l_p')} sum_{b in p'} e^{-lambda_r (l_p' - b)} S_b
                     whose part in block i is sum_r a_r e^{-lambda_r (i - f_p)} L_r; the same from the right.

Then each process mixes for its own query blocks and computes their outputs alone. With the normaliser, v carries a
column of ones, so that summaries and normalisers travel as one. Backwards the gradients of what was gathered are summed and
scattered. Nothing but these collectives waits for another process.

Shape letters: B batch, N tokens, H heads, M blocks, W numbers of a summary, R exponential terms, P processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from mhla_kernels.attention import without_autocast
from mhla_kernels.blocks import BlockPartition, make_partition
from mhla_kernels.checks import Problem, check_block_size, check_problem, repeat_heads
from mhla_kernels.features import FeatureMap, map_features
from mhla_kernels.forms.chunked import Mixer, chunked, summarize
from mhla_kernels.mixing import Mixing, MixingLike, as_mixing
from mhla_kernels.normalizer import divide
from mhla_kernels.sequence_parallel.collectives import gather_shares
from mhla_kernels.sequence_parallel.plan import SequencePlan, block_bounds, share_blocks, traffic

Exchange = Literal["auto", "summaries", "tokens"]


def mhla_sequence_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: MixingLike,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    tokens: int,
    block_size: int | None = None,
    block_offsets: Sequence[int] | None = None,
    causal: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_map: FeatureMap = "identity",
    key_mask: Tensor | None = None,
    exchange: Exchange = "auto",
) -> Tensor:
    """:func:`mhla_kernels.mhla_attention` of a sequence that is spread over the processes of a group.

    Every process of the group calls it with its own tokens, from ``share_tokens(...)[rank]`` on, and gets their outputs.
    Gradients of q, k and v are complete; those of ``mixing`` are this process's part of the sum over the group, as for
    any weight that works on these tokens alone.

    Args:
        q: ``[B, n, H, Dk]``, this process's n tokens of N.
        k: ``[B, n, Hkv, Dk]``; see :func:`mhla_kernels.mhla_attention` on fewer heads than q.
        v: ``[B, n, Hkv, Dv]``.
        mixing: whole, and the same on every process.
        group: the processes, in the order of their tokens: a process group, or a mesh of one dimension (``mesh["sequence"]``).
        tokens: N of the whole sequence.
        block_size: tokens in a block; the last block of the sequence may be short. Exactly one of this and ``block_offsets``.
        block_offsets: M + 1 integers of the whole sequence; bidirectional only.
        causal: see :func:`mhla_kernels.mhla_attention`, as for the arguments up to ``key_mask``.
        normalize: as there.
        scale: as there.
        eps: as there.
        feature_map: as there.
        key_mask: ``[B, n]`` bool, of this process's tokens.
        exchange: ``"summaries"``, ``"tokens"`` (dense mixing only), or ``"auto"``: the fewer bytes, see :func:`traffic`.

    Returns:
        ``[B, n, H, Dv]`` in the dtype of ``v``.

    Raises:
        ValueError: for arguments that do not fit, and for tokens that are not this process's share.
        TypeError: as :func:`mhla_kernels.mhla_attention`.
    """
    mixing = as_mixing(mixing)
    block_size = None if block_size is None else check_block_size(block_size)
    processes = group.get_group() if isinstance(group, DeviceMesh) else group
    rank, world = dist.get_rank(processes), dist.get_world_size(processes)
    bounds = block_bounds(tokens, block_size, block_offsets)
    shares = share_blocks(len(bounds) - 1, world)
    first, last = shares[rank], shares[rank + 1]
    problem = _check_whole(
        q, k, v, mixing, tokens, block_size, block_offsets, causal, normalize, scale, eps, feature_map, key_mask
    )
    if q.shape[1] != bounds[last] - bounds[first]:
        raise ValueError(
            f"process {rank} of {world} has {q.shape[1]} tokens; of N={tokens} its share is {bounds[last] - bounds[first]}, "
            f"from {bounds[first]} on: see share_tokens"
        )
    if exchange not in ("auto", "summaries", "tokens"):
        raise ValueError(f"exchange={exchange!r} is not one of 'auto', 'summaries', 'tokens'")
    if exchange == "tokens" and mixing.boundary_sums is not None:
        raise ValueError(f"exchange='tokens' is for dense mixing; {mixing} exchanges boundary sums")
    if exchange == "auto":
        sizes = (q.shape[0], tokens, q.shape[2], q.shape[3], v.shape[3], len(bounds) - 1, world)
        terms, token_bytes = mixing.boundary_sums, k.element_size()
        exchange = traffic(*sizes, terms=terms, causal=causal, normalize=normalize, token_bytes=token_bytes).least
    plan = SequencePlan(processes, bounds, shares, rank)
    with without_autocast(q.device.type):
        every = None
        if exchange == "tokens":
            every = _gathered_summaries(k, v, key_mask, plan, feature_map, problem.accumulate, normalize)
            every = every.repeat_interleave(q.shape[2] // k.shape[2], 1)
        k, v = repeat_heads(q, k, v)
        q, k, v = (x.to(problem.accumulate) for x in (q, k, v))
        q, k, v = map_features(q, k, v, feature_map, key_mask)
        if normalize:
            v = _with_ones(v, key_mask)
        mixing = mixing.to(problem.accumulate)
        mixer = _SharedMixer(mixing, mixing.own(slice(first, last), len(bounds) - 1), plan=plan, every=every)
        blocks = _partition(bounds, first, last, q.device)
        factor = 1.0 if problem.scale is None else problem.scale
        out = chunked(blocks.split(q), blocks.split(k), blocks.split(v), mixer, causal=causal, scale=factor, eps=eps)
        out = blocks.merge(out)
        if normalize:
            out = divide(out[..., :-1], out[..., -1:], eps)
        return out.to(problem.dtype)


def _check_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Mixing,
    tokens: int,
    block_size: int | None,
    block_offsets: Sequence[int] | None,
    causal: bool,
    normalize: bool,
    scale: float | None,
    eps: float,
    feature_map: FeatureMap,
    key_mask: Tensor | None,
) -> Problem:
    """The checks of one process that had the whole sequence, on tensors without memory."""
    if len({x.shape[1:2] for x in (q, k, v)}) != 1:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must hold equally many tokens")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != q.shape[:2]):
        raise ValueError(f"key_mask is {key_mask.dtype} {list(key_mask.shape)}; it must be bool {list(q.shape[:2])}")
    meta = torch.device("meta")
    q, k, v = (
        torch.empty(x.shape[0], tokens, *x.shape[2:], dtype=x.dtype, device=meta) if x.dim() == 4 else x
        for x in (q, k, v)
    )
    return check_problem(
        q, k, v, mixing, block_size, block_offsets, causal, normalize, scale, eps, feature_map, None, None
    )


def _with_ones(v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Values with a column that counts tokens, so that the normaliser is one more value."""
    v = F.pad(v, (0, 1), value=1.0)
    return v if key_mask is None else v * key_mask[..., None, None]


def _gathered_summaries(
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    plan: SequencePlan,
    feature_map: FeatureMap,
    accumulate: torch.dtype,
    normalize: bool,
) -> Tensor:
    """Summaries of all blocks ``[B, H, M, K, V]``, from the k and v of all processes; these travel as they come."""
    if k.dtype != v.dtype:
        k, v = k.to(accumulate), v.to(accumulate)
    every = gather_shares(torch.cat([k, v], -1), 1, plan.tokens, plan.group, accumulate)
    mask = key_mask
    if mask is not None:
        mask = gather_shares(mask.to(torch.uint8), 1, plan.tokens, plan.group) > 0
    every_k, every_v = every.split([k.shape[-1], v.shape[-1]], -1)
    _, every_k, every_v = map_features(every_k, every_k, every_v, feature_map, mask)
    if normalize:
        every_v = _with_ones(every_v, mask)
    blocks = _partition(plan.bounds, 0, plan.shares[-1], k.device)
    return summarize(blocks.split(every_k), blocks.split(every_v))


@dataclass
class _SharedMixer(Mixer):
    """The mixer of this process's blocks.

    Attributes:
        plan: assignment of blocks to processes.
        every: summaries of all blocks ``[B, H, M, ...]`` where they are known; else processes exchange what they need.
    """

    plan: SequencePlan | None = None
    every: Tensor | None = None

    def __call__(self, summary: Tensor, causal: bool) -> Tensor:
        """Mixed summaries ``[B, H, m, ...]`` of this process's blocks."""
        assert self.plan is not None
        return self.mixing.mix_share(summary, causal, self.plan, self.every)


def _partition(bounds: tuple[int, ...], first: int, last: int, device: torch.device) -> BlockPartition:
    """The blocks from ``first`` to ``last`` of a sequence."""
    own = tuple(bound - bounds[first] for bound in bounds[first : last + 1])
    size = max((b - a for a, b in pairwise(bounds)), default=1)
    equal = all(b - a == size for a, b in pairwise(own[:-1])) and (len(own) < 2 or own[-1] - own[-2] <= size)
    if equal:  # slots of the whole sequence's size, so that a process with the short last block alone has them too
        tokens = own[-1]
        return BlockPartition(tokens, last - first, size)
    return make_partition(own[-1], device, None, own, None)
