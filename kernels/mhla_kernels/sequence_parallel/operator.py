"""Multi-head linear attention (MHLA) over a sequence whose tokens are distributed over processes.

Process p holds the complete blocks with indices from f_p up to, but not including, l_p. It computes the summaries S_b of its
own blocks. The mixing coefficients m determine which data it gets from the other processes:

    dense m          every summary S_b, or every k and v where those are fewer bytes;
    exponential m    for each of the R terms one sum from each process on its left and on its right:
                     L_r = sum_{p' < p} e^{-lambda_r (f_p - l_p')} sum_{b in p'} e^{-lambda_r (l_p' - b)} S_b
                     whose part in block i is sum_r a_r e^{-lambda_r (i - f_p)} L_r; the same from the right.

Then each process mixes the summaries for its own query blocks and computes their outputs alone. With the normalizer, v gets a
column of ones, so that summaries and normalizers are exchanged together. The backward pass sums and scatters the gradients of
the gathered tensors. A process waits for other processes in these collective operations only.

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
from mhla_kernels.blocks import BlockPartition, TokenLayout
from mhla_kernels.checks import (
    NEGATIVE_FEATURES,
    check_block_size,
    check_devices,
    check_features,
    check_mask,
    check_problem,
    check_types,
)
from mhla_kernels.features import FeatureMap, hide, map_tokens
from mhla_kernels.forms.chunked import Mixer, chunked, summarize
from mhla_kernels.mixing import MixingLike, as_mixing
from mhla_kernels.normalizer import divide
from mhla_kernels.problem import Causal, Problem, prepare
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
    causal: Causal = False,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_map: FeatureMap = "identity",
    key_mask: Tensor | None = None,
    exchange: Exchange = "auto",
) -> Tensor:
    """Compute :func:`mhla_kernels.mhla_attention` for a sequence whose tokens are distributed over the processes of a group.

    Every process of the group calls this function with its own tokens, and gets their outputs. The tokens of process ``rank``
    begin at index ``share_tokens(...)[rank]`` of the sequence. The gradients of q, k and v are complete. The gradients of
    ``mixing`` must be summed over the group, as for any weight that is applied to a process's own tokens.

    Args:
        q: queries of this process's n tokens, ``[B, n, H, Dk]``. With ``normalize``, nonnegative after the feature map.
        k: keys, ``[B, n, Hkv, Dk]``; Hkv divides H. With ``normalize``, nonnegative after the feature map.
        v: values, ``[B, n, Hkv, Dv]``.
        mixing: coefficients for the complete sequence, as for :func:`mhla_kernels.mhla_attention`, the same on every process.
        group: the processes in the order of their tokens: a process group, or a device mesh with one dimension, such as
            ``mesh["sequence"]``.
        tokens: number of tokens of the complete sequence, N.
        block_size: tokens in a block; the last block of the sequence may be shorter. Give exactly one of this and
            ``block_offsets``.
        block_offsets: for M uneven blocks of the complete sequence, M + 1 integers: the index of the first token of each block,
            followed by N. Not for ``causal=True``.
        causal: whether token t attends to tokens ``j <= t`` only; ``"block"`` if it attends to all tokens of its own block and
            of all blocks before it.
        normalize: whether each row of attention weights is divided by its sum.
        scale: factor on the output, only without ``normalize``; None means ``Dk ** -0.5``.
        eps: positive number that is added to the sum of a row of weights before the division.
        feature_map: ``"identity"`` (q and k are already mapped) or ``"relu"``: ``relu(x) + 1e-6``.
        key_mask: ``[B, n]`` bool, False for masked tokens of this process; None if no token is masked.
        exchange: data that the processes exchange: ``"summaries"`` of blocks, ``"tokens"`` (keys and values; not for
            exponential mixing without a grid), or ``"auto"``: whichever needs fewer bytes.

    Returns:
        Outputs ``[B, n, H, Dv]`` in the dtype of ``v``.

    Raises:
        ValueError: for arguments that do not fit together, for negative features with ``normalize``, or if n is not the number
            of tokens that :func:`share_tokens` assigns to this process.
        TypeError: if q, k, v or the mask is not a tensor, or for a dtype that is not float32, bfloat16 or float64.
    """
    mixing = as_mixing(mixing)
    block_size = None if block_size is None else check_block_size(block_size)
    processes = group.get_group() if isinstance(group, DeviceMesh) else group
    rank, world = dist.get_rank(processes), dist.get_world_size(processes)
    bounds = block_bounds(tokens, block_size, block_offsets)
    plan = SequencePlan(processes, bounds, share_blocks(len(bounds) - 1, world), rank)
    first, last = plan.own
    _check_shares(q, k, v, key_mask)
    # one check covers the complete sequence; then the tensors of this process take the place of those without memory
    complete_q, complete_k, complete_v = (_of_complete_sequence(x, tokens) for x in (q, k, v))
    problem = check_problem(
        complete_q, complete_k, complete_v, mixing, block_size=block_size, block_offsets=block_offsets, causal=causal,
        normalize=normalize, scale=scale, eps=eps, feature_map=feature_map,
    )._replace(q=q, k=k, v=v, key_mask=key_mask)  # fmt: skip
    check_devices(problem)
    if normalize and feature_map == "identity":
        check_features({"q": (q, key_mask), "k": (k, key_mask)}, NEGATIVE_FEATURES)
    if q.shape[1] != bounds[last] - bounds[first]:
        raise ValueError(
            f"process {rank} of {world} has {q.shape[1]} tokens; of N={tokens} its share is {bounds[last] - bounds[first]}, "
            f"from {bounds[first]} on (see share_tokens)"
        )
    if exchange not in ("auto", "summaries", "tokens"):
        raise ValueError(f"exchange={exchange!r} is not one of 'auto', 'summaries', 'tokens'")
    if exchange == "tokens" and mixing.boundary_sums is not None:
        raise ValueError(
            f"exchange='tokens' is for dense mixing and for exponential mixing over a grid; {mixing} exchanges boundary sums: "
            "use exchange='auto'"
        )
    if exchange == "auto":
        # k and v are sent in one tensor, in the wider dtype if they differ.
        sent = k.dtype if k.dtype == v.dtype else problem.accumulate
        exchange = traffic(
            q.shape[0], tokens, q.shape[2], q.shape[3], v.shape[3], len(bounds) - 1, world, key_value_heads=k.shape[2],
            terms=mixing.boundary_sums, causal=bool(causal), normalize=normalize, token_bytes=sent.itemsize,
        ).least  # fmt: skip
    with without_autocast(q.device.type):
        all_summaries = None
        if exchange == "tokens":
            all_summaries = _gathered_summaries(problem, plan)
            # Repeated only after the exchange, since query heads share the keys and values that were sent.
            all_summaries = all_summaries.repeat_interleave(q.shape[2] // k.shape[2], 1)
        q, k, v, mixing = prepare(problem)[:4]
        if normalize:  # the normalizer becomes one more value, so that both are exchanged together
            v = _with_ones(v, key_mask)
        mixer = _SharedMixer(mixing, mixing.own(slice(first, last), len(bounds) - 1), plan=plan, every=all_summaries)
        blocks = _partition(bounds, first, last, q.device)
        # with the normalizer as a column of v, the division comes after merging the blocks
        weighting = problem.weighting._replace(scale=1.0) if normalize else problem.weighting
        out = blocks.merge(chunked(blocks.split(q), blocks.split(k), blocks.split(v), mixer, weighting))
        if normalize:
            out = divide(out[..., :-1], out[..., -1:], eps)
        return out.to(problem.v.dtype)


def _check_shares(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Check that q, k and v are ``[B, n, heads, width]`` with the same n, and that the key mask is None or ``[B, n]`` bool."""
    check_types(q, k, v)
    if len({x.shape[1:2] for x in (q, k, v)}) != 1:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must have the same number of tokens"
        )
    if key_mask is not None:
        check_mask("key_mask", key_mask, q, "n")


def _of_complete_sequence(x: Tensor, tokens: int) -> Tensor:
    """Return a meta tensor, for argument checks, with the shape that ``x`` would have for the complete sequence.

    Args:
        x: tensor of this process, ``[B, n, heads, width]``.
        tokens: number of tokens of the complete sequence, which takes the place of n.
    """
    return torch.empty(x.shape[0], tokens, *x.shape[2:], dtype=x.dtype, device="meta")


def _with_ones(v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Append a column of ones to the values, so that the last column of the attention outputs is the sum of the weights.

    Args:
        v: values, ``[B, N, H, V]``. Masked values must be finite.
        key_mask: ``[B, N]`` bool, False for masked tokens, whose row becomes zero; None masks no token.

    Returns:
        ``[B, N, H, V + 1]``.
    """
    v = F.pad(v, (0, 1), value=1.0)
    return v if key_mask is None else v * key_mask[..., None, None]


def _gathered_summaries(problem: Problem, plan: SequencePlan) -> Tensor:
    """Gather the keys and values of all processes, and compute the summaries ``k^T v`` of all M blocks.

    Args:
        problem: arguments of the call, with the tokens of this process.
        plan: assignment of blocks to processes.

    Returns:
        Summaries, ``[B, Hkv, M, K, V]``. With normalization, ``[B, Hkv, M, K, V + 1]``, where the last column is the sum of k.
    """
    k, v, mask, accumulate = problem.k, problem.v, problem.key_mask, problem.accumulate
    if k.dtype != v.dtype:  # both are sent in one tensor
        k, v = k.to(accumulate), v.to(accumulate)
    every = gather_shares(torch.cat([k, v], -1), 1, plan.tokens, plan.group, accumulate)
    if mask is not None:
        mask = gather_shares(mask.to(torch.uint8), 1, plan.tokens, plan.group) > 0
    every_k, every_v = every.split([k.shape[-1], v.shape[-1]], -1)
    every_k, every_v = map_tokens(every_k, problem.feature_map, mask), hide(every_v, mask)
    if problem.weighting.normalize:
        every_v = _with_ones(every_v, mask)
    blocks = _partition(plan.bounds, 0, plan.shares[-1], k.device)
    return summarize(blocks.split(every_k), blocks.split(every_v))


@dataclass(kw_only=True)
class _SharedMixer(Mixer):
    """Callable that mixes the block summaries of this process with those of the other processes.

    Attributes:
        plan: assignment of blocks to processes.
        every: summaries of all M blocks, ``[B, H, M, ...]``, if this process already has them; None to exchange them
            whenever the object is called.
    """

    plan: SequencePlan
    every: Tensor | None

    def __call__(self, summary: Tensor, causal: bool) -> Tensor:
        """Compute a mixture of the block summaries of all processes, for each of the m blocks of this process.

        Args:
            summary: summaries of the blocks of this process, ``[B, H, m, ...]``.
            causal: whether the mixture of a block contains only the summaries of earlier blocks, not its own.

        Returns:
            Mixtures, in the shape of ``summary``.
        """
        return self.mixing.mix_share(summary, causal, self.plan, self.every)


def _partition(bounds: tuple[int, ...], first: int, last: int, device: torch.device) -> BlockPartition:
    """Return the assignment of tokens to blocks for a range of consecutive blocks of a sequence.

    Args:
        bounds: index of the first token of each block of the sequence, followed by the number of tokens.
        first: index of the first block of the range.
        last: index after the last block of the range.
        device: device of the index tensors in the result.
    """
    offsets = tuple(bound - bounds[first] for bound in bounds[first : last + 1])
    size = max((b - a for a, b in pairwise(bounds)), default=1)
    equal = all(b - a == size for a, b in pairwise(offsets[:-1])) and (
        len(offsets) < 2 or offsets[-1] - offsets[-2] <= size
    )
    if equal:  # with the slots of a full block, also in a process that holds only the short last block
        return BlockPartition(offsets[-1], last - first, size)
    return TokenLayout(offsets[-1], 0, offsets).partition(device)
