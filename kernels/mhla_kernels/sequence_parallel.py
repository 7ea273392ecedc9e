"""MHLA over a sequence whose tokens are spread over processes: they exchange block summaries, not tokens.

Process p holds whole blocks, a range [f_p, l_p) of them. It computes its own summaries, and of the others' it needs

    dense m          every summary S_b, or, where those are fewer bytes, every k and v instead;
    exponential m    for each of the R terms one sum from every process on its left, and one from its right:
                     L_r = sum_{p' < p} e^{-lambda_r (f_p - l_p')} sum_{b in p'} e^{-lambda_r (l_p' - b)} S_b
                     whose part in block i is sum_r a_r e^{-lambda_r (i - f_p)} L_r; likewise from the right.

Then each process mixes for its own query blocks and computes their outputs alone. With the normaliser, v carries a
column of ones, so that summaries and normalisers travel as one. Backwards the gradients of what was gathered are summed and
scattered. Nothing but these collectives waits for another process.

Shape letters: B batch, N tokens, H heads, M blocks, W numbers of a summary, R exponential terms, P processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from mhla_kernels.attention import without_autocast
from mhla_kernels.blocks import BlockPartition, make_partition
from mhla_kernels.checks import Mixing, Problem, check_block_size, check_problem, repeat_heads
from mhla_kernels.chunked import Mixer, chunked, summarize
from mhla_kernels.exponential import ExponentialMixing
from mhla_kernels.features import FeatureMap, map_features
from mhla_kernels.finite import finite_
from mhla_kernels.normalizer import divide

Exchange = Literal["auto", "summaries", "tokens"]


def share_blocks(blocks: int, processes: int) -> tuple[int, ...]:
    """First block of each process, and the number of blocks at the end: ranges as even as whole blocks allow.

    Args:
        blocks: M.
        processes: P.

    Returns:
        P + 1 integers; with fewer blocks than processes some hold none.
    """
    return tuple(blocks * rank // processes for rank in range(processes + 1))


def share_tokens(
    tokens: int, processes: int, *, block_size: int | None = None, block_offsets: Sequence[int] | None = None
) -> tuple[int, ...]:
    """First token of each process, and N at the end, when :func:`share_blocks` divides the blocks.

    Args:
        tokens: N.
        processes: P.
        block_size: tokens in a block. Exactly one of this and ``block_offsets``.
        block_offsets: M + 1 integers, see :func:`mhla_kernels.mhla_attention`.

    Raises:
        ValueError: if none or both of the two are given.
    """
    bounds = _bounds(tokens, block_size, block_offsets)
    return tuple(bounds[block] for block in share_blocks(len(bounds) - 1, processes))


def _bounds(tokens: int, block_size: int | None, block_offsets: Sequence[int] | None) -> tuple[int, ...]:
    if (block_size is None) == (block_offsets is None):
        raise ValueError("give exactly one of block_size (equal blocks) and block_offsets (uneven blocks)")
    if block_offsets is not None:
        return tuple(block_offsets)
    assert block_size is not None
    return (*range(0, tokens, block_size), tokens)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process receives in a forward pass of one layer.

    The backward pass sums gradients of the same numbers, in float32.

    Attributes:
        summaries: of the other processes, or their boundary sums.
        tokens: of the other processes' k and v; None where it is no choice.
    """

    summaries: int
    tokens: int | None

    @property
    def least(self) -> Literal["summaries", "tokens"]:
        """What moves fewer bytes."""
        return "tokens" if self.tokens is not None and self.tokens < self.summaries else "summaries"


def traffic(
    batch: int,
    tokens: int,
    heads: int,
    key_width: int,
    value_width: int,
    blocks: int,
    processes: int,
    *,
    terms: int | None = None,
    causal: bool = False,
    normalize: bool = True,
    token_bytes: int = 2,
) -> Traffic:
    """What :func:`mhla_sequence_parallel` exchanges; summaries are float32.

    Args:
        batch: B.
        tokens: N.
        heads: H.
        key_width: Dk.
        value_width: Dv.
        blocks: M.
        processes: P, with equal shares.
        terms: R of exponential mixing over a sequence; None for dense coefficients.
        causal: whether blocks see earlier ones only.
        normalize: whether normalisers travel too.
        token_bytes: of one number of k and v.
    """
    width = key_width * (value_width + normalize)
    others = processes - 1
    if terms is not None:
        return Traffic(batch * heads * others * terms * (1 if causal else 2) * width * 4, None)
    summaries = batch * heads * others * -(-blocks // processes) * width * 4
    shares = batch * heads * others * -(-tokens // processes) * (key_width + value_width) * token_bytes
    return Traffic(summaries, shares)


def mhla_sequence_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Mixing,
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
        normalize: likewise.
        scale: likewise.
        eps: likewise.
        feature_map: likewise.
        key_mask: ``[B, n]`` bool, of this process's tokens.
        exchange: ``"summaries"``, ``"tokens"`` (dense mixing only), or ``"auto"``: the fewer bytes, see :func:`traffic`.

    Returns:
        ``[B, n, H, Dv]`` in the dtype of ``v``.

    Raises:
        ValueError: for arguments that do not fit, and for tokens that are not this process's share.
        TypeError: as :func:`mhla_kernels.mhla_attention`.
    """
    block_size = None if block_size is None else check_block_size(block_size)
    processes = group.get_group() if isinstance(group, DeviceMesh) else group
    rank, world = dist.get_rank(processes), dist.get_world_size(processes)
    bounds = _bounds(tokens, block_size, block_offsets)
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
    bands = isinstance(mixing, ExponentialMixing) and mixing.grid is None
    if bands and exchange == "tokens":
        raise ValueError("exchange='tokens' is for dense mixing; exponential mixing exchanges boundary sums")
    if exchange == "auto":
        sizes = (q.shape[0], tokens, q.shape[2], q.shape[3], v.shape[3], len(bounds) - 1, world)
        terms = mixing.terms if bands and isinstance(mixing, ExponentialMixing) else None
        found = traffic(*sizes, terms=terms, causal=causal, normalize=normalize, token_bytes=k.element_size())
        exchange = found.least
    place = _Place(processes, bounds, shares, rank)
    with without_autocast(q.device.type):
        every = None
        if exchange == "tokens":
            every = _gathered_summaries(k, v, key_mask, place, feature_map, problem.accumulate, normalize)
            every = every.repeat_interleave(q.shape[2] // k.shape[2], 1)
        k, v = repeat_heads(q, k, v)
        q, k, v = (x.to(problem.accumulate) for x in (q, k, v))
        q, k, v = map_features(q, k, v, feature_map, key_mask)
        if normalize:
            v = _with_ones(v, key_mask)
        mixer = _make_mixer(mixing.to(problem.accumulate), place, every)
        blocks = _partition(bounds, first, last, q.device)
        factor = 1.0 if problem.scale is None else problem.scale
        out = chunked(blocks.split(q), blocks.split(k), blocks.split(v), mixer, causal=causal, scale=factor, eps=eps)
        out = blocks.merge(out)
        if normalize:
            out = divide(out[..., :-1], out[..., -1:], eps)
        return out.to(problem.dtype)


@dataclass(frozen=True)
class _Place:
    """Where a process stands: first token of each block, first block of each process, and its own number."""

    group: dist.ProcessGroup
    bounds: tuple[int, ...]
    shares: tuple[int, ...]
    rank: int

    @property
    def own(self) -> tuple[int, int]:
        """First block of this process, and the first after them."""
        return self.shares[self.rank], self.shares[self.rank + 1]

    @property
    def blocks(self) -> list[int]:
        """Number of blocks of each process."""
        return [b - a for a, b in pairwise(self.shares)]

    @property
    def tokens(self) -> list[int]:
        """Number of tokens of each process."""
        return [self.bounds[b] - self.bounds[a] for a, b in pairwise(self.shares)]


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
    place: _Place,
    feature_map: FeatureMap,
    accumulate: torch.dtype,
    normalize: bool,
) -> Tensor:
    """Summaries of all blocks ``[B, H, M, K, V]``, from the k and v of all processes; these travel as they come."""
    if k.dtype != v.dtype:
        k, v = k.to(accumulate), v.to(accumulate)
    every = gather_shares(torch.cat([k, v], -1), 1, place.tokens, place.group, accumulate)
    mask = key_mask
    if mask is not None:
        mask = gather_shares(mask.to(torch.uint8), 1, place.tokens, place.group) > 0
    every_k, every_v = every.split([k.shape[-1], v.shape[-1]], -1)
    _, every_k, every_v = map_features(every_k, every_k, every_v, feature_map, mask)
    if normalize:
        every_v = _with_ones(every_v, mask)
    blocks = _partition(place.bounds, 0, place.shares[-1], k.device)
    return summarize(blocks.split(every_k), blocks.split(every_v))


def _make_mixer(mixing: Mixing, place: _Place, every: Tensor | None) -> Mixer:
    """What mixes summaries for the blocks of this process; ``every`` are those of all blocks where they are known."""
    if isinstance(mixing, ExponentialMixing) and mixing.grid is None:
        return _BandMixer(mixing, mixing.amplitude.sum(-1, keepdim=True), place=place)
    size = place.shares[-1]
    dense = mixing.dense() if isinstance(mixing, ExponentialMixing) else mixing[..., :size, :size]
    rows = slice(*place.own)
    return _RowMixer(dense[..., rows, :], dense.diagonal(dim1=-2, dim2=-1)[..., rows], place=place, every=every)


def _partition(bounds: tuple[int, ...], first: int, last: int, device: torch.device) -> BlockPartition:
    """The blocks from ``first`` to ``last`` of a sequence."""
    own = tuple(bound - bounds[first] for bound in bounds[first : last + 1])
    size = max((b - a for a, b in pairwise(bounds)), default=1)
    equal = all(b - a == size for a, b in pairwise(own[:-1])) and (len(own) < 2 or own[-1] - own[-2] <= size)
    if equal:  # slots of the whole sequence's size, so that a process with the short last block alone has them too
        tokens = own[-1]
        return BlockPartition(tokens, last - first, size)
    return make_partition(own[-1], device, None, own, None)


@dataclass
class _RowMixer(Mixer):
    """Rows ``[..., m, M]`` of dense coefficients, for the blocks of this process, applied to the summaries of all.

    Attributes:
        place: of this process.
        every: summaries of all blocks ``[B, H, M, ...]`` where they are known; else they are gathered.
    """

    place: Any = None
    every: Tensor | None = None

    def __call__(self, summary: Tensor, causal: bool) -> Tensor:
        assert isinstance(self.mixing, Tensor)
        every = self.every
        if every is None:
            every = gather_shares(summary, 2, self.place.blocks, self.place.group)
        batch, heads, blocks = every.shape[:3]
        rows = self.mixing.tril(self.place.own[0] - 1) if causal else self.mixing
        rows = rows.expand(batch, heads, *rows.shape[-2:]).reshape(batch * heads, *rows.shape[-2:])
        mixed = torch.bmm(rows, every.reshape(batch * heads, blocks, -1))
        return mixed.view(summary.shape)


@dataclass
class _BandMixer(Mixer):
    """Exponential coefficients: own blocks by running sums, those of other processes by one sum for each term and side.

    Attributes:
        place: of this process.
    """

    place: Any = None

    def __call__(self, summary: Tensor, causal: bool) -> Tensor:
        assert isinstance(self.mixing, ExponentialMixing)
        flat = summary.flatten(3)
        amplitude, decay = (x if self.mixing.heads else x[None] for x in (self.mixing.amplitude, self.mixing.decay))
        shares, rank = self.place.shares, self.place.rank
        blocks, world, terms = flat.shape[2], len(shares) - 1, decay.shape[-1]
        place = torch.arange(blocks, device=flat.device, dtype=flat.dtype)
        mixed = self.mixing.mix(flat, causal) if blocks else flat
        sums = (-decay[..., None] * (blocks - place)).exp() @ flat  # [B, H, R, W], as seen from the next process
        if not causal:
            sums = torch.cat([sums, (-decay[..., None] * (place + 1)).exp() @ flat], 2)
        every = gather_shares(finite_(sums), 2, [sums.shape[2]] * world, self.place.group).unflatten(2, (world, -1))
        first, last = self.place.own
        from_left = [first - shares[p + 1] if p < rank else None for p in range(world)]
        reading = amplitude[:, None] * (-decay[:, None] * place[:, None]).exp()  # [H, m, R]
        mixed = mixed + reading @ _faded(every[..., :terms, :], decay, from_left)
        if not causal:
            from_right = [shares[p] - last if p > rank else None for p in range(world)]
            reading = amplitude[:, None] * (-decay[:, None] * (blocks - 1 - place)[:, None]).exp()
            mixed = mixed + reading @ _faded(every[..., terms:, :], decay, from_right)
        return mixed.view(summary.shape)


def _faded(every_BHPRW: Tensor, decay: Tensor, gaps: Sequence[int | None]) -> Tensor:
    """Boundary sums of all processes, each faded over the blocks in between; None for a process that does not count.

    Such a one gets the weight zero, not left out: every process takes part in the collective of the backward pass.
    """
    gap = torch.tensor([0 if each is None else each for each in gaps], device=decay.device, dtype=decay.dtype)
    counts = torch.tensor([each is not None for each in gaps], device=decay.device, dtype=decay.dtype)
    weights = (-decay[:, None] * gap[:, None]).exp() * counts[:, None]  # [H, P, R]
    return (weights[..., None] * every_BHPRW).sum(2)


def gather_shares(
    share: Tensor, dim: int, lengths: Sequence[int], group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> Tensor:
    """The shares of all processes one after the other along ``dim``; gradients are summed and scattered back.

    Args:
        share: this process's; it travels in its own dtype.
        dim: along which shares differ in length.
        lengths: of every process's share.
        group: the processes.
        dtype: of what is given back, and in which gradients are summed; None for the share's own.
    """
    longest = max(lengths)
    share = share.movedim(dim, 0)
    padded = F.pad(share, (0, 0) * (share.dim() - 1) + (0, longest - len(share)))
    parts = _Gather.apply(padded, group, dtype or share.dtype)
    if min(lengths) != longest:
        parts = torch.cat([part[:length] for part, length in zip(parts.split(longest), lengths, strict=True)])
    return parts.movedim(0, dim)


class _Gather(torch.autograd.Function):
    """Equal shares of all processes along the first axis."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dtype = group, share.dtype
        every = share.new_empty(dist.get_world_size(group) * share.shape[0], *share.shape[1:])
        dist.all_gather_into_tensor(every, share.contiguous(), group=group)
        return every.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (every,) = gradients
        share = every.new_empty(every.shape[0] // dist.get_world_size(ctx.group), *every.shape[1:])
        dist.reduce_scatter_tensor(share, every.contiguous(), group=ctx.group)
        return share.to(ctx.dtype), None, None
