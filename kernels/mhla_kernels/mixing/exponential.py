"""Mixing coefficients as a sum of exponentials of block distance, for any length and at a cost linear in the number of blocks.

    m[i, j] = sum_r a_r prod_axis exp(-lambda_{r, axis} |i_axis - j_axis|)

A sum of R such terms is applied to M block summaries by R running sums, instead of a matrix of M squared numbers. The causal
generation state holds R summaries for any length. Learned dense coefficients of language models were found to be close to a
function of distance alone (the "Toeplitz Block Mixing" report, 2026-03). The distance here is the weighted L1 distance, which
separates over the axes of a grid.
"""

# Longer than other modules because it contains everything about one kind of mixing.

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from mhla_kernels.blocks import at_most, divide_up
from mhla_kernels.finite import finite_
from mhla_kernels.mixing.base import BlockShares, Mixing, Rows
from mhla_kernels.mixing.dense import DenseMixing
from mhla_kernels.mixing.fitting import fit_exponentials
from mhla_kernels.mixing.pairs import BlockPairs
from mhla_kernels.mixing.span import Span, make_span
from mhla_kernels.torch_private import assert_async, has_values, unwrapped

GROUP = 32
"""Number of blocks that one small matrix mixes at once; running sums connect the groups."""


@dataclass(frozen=True)
class ExponentialMixing(Mixing):
    """Mixing coefficients ``m[i, j] = sum_r a_r prod_axis exp(-lambda_{r, axis} |i_axis - j_axis|)``.

    Block i gives weight m[i, j] to the summary of block j. The sum is over R exponential terms, and the product is over the
    axes of the block grid. The tensors a and lambda both get gradients.

    Args:
        amplitude: amplitudes a, nonnegative, ``[R]`` for all heads or ``[H, R]``.
        decay: decays lambda per block, nonnegative. Without ``grid``, it has the shape of ``amplitude``. For a grid of A axes,
            it has one more axis, of length A, at the end.
        grid: number of blocks along each axis of a 2-D or 3-D grid, whose blocks are in row-major order; None for a sequence of
            any length. Causal attention requires None.

    Raises:
        ValueError: if the shapes do not fit together, or if an axis of ``grid`` has fewer than one block.
    """

    learned = ("amplitude", "decay")
    amplitude: Tensor
    decay: Tensor
    grid: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.amplitude, Tensor):  # torch unflattens pytrees with placeholders instead of tensors
            return
        if self.amplitude.dim() not in (1, 2) or self.amplitude.numel() == 0:
            raise ValueError(f"amplitude has shape {list(self.amplitude.shape)}; it must be [R] or [H, R]")
        axes = () if self.grid is None else (len(self.grid),)
        if self.decay.shape != (*self.amplitude.shape, *axes):
            shape = [*self.amplitude.shape, *axes]
            raise ValueError(f"decay has shape {list(self.decay.shape)}; with grid={self.grid} it must be {shape}")
        if self.grid is not None and (not self.grid or min(self.grid) < 1):
            raise ValueError(f"grid={self.grid} must be blocks along each axis, each >= 1")

    @property
    def terms(self) -> int:
        """Number R of exponential terms in the coefficients."""
        return self.amplitude.shape[-1]

    @property
    def heads(self) -> int | None:
        """Number of heads H, or None if all heads share the coefficients."""
        return self.amplitude.shape[0] if self.amplitude.dim() == 2 else None

    def __str__(self) -> str:
        return f"exponential mixing of {self.terms} terms"

    @override
    def of_heads(self, heads: slice) -> Self:
        return self._of_first_axis(heads)

    @property
    @override
    def blocks(self) -> int | None:
        return None if self.grid is None else prod(self.grid)

    @override
    def check(self, heads: int, causal: bool) -> None:
        super().check(heads, causal)
        if causal and self.grid is not None:
            raise ValueError(
                f"causal attention needs a sequence of blocks; give ExponentialMixing without grid={self.grid}"
            )
        _check_decay(self.decay)

    def dense(self, blocks: int | None = None) -> Tensor:
        """Return the coefficients as a matrix, ``[M, M]`` or ``[H, M, M]``.

        Args:
            blocks: number of blocks M; required if ``grid`` is None, otherwise optional.

        Raises:
            ValueError: if ``blocks`` is missing, or is not the number of blocks of ``grid``.
        """
        if self.grid is None:
            if blocks is None:
                raise ValueError("a mixing without a grid has no fixed length; give the number of blocks")
            distance = _distance(blocks, self.amplitude)
            return _kernel(self.amplitude, self.decay, distance)
        size = prod(self.grid)
        if blocks not in (None, size):
            raise ValueError(f"grid={self.grid} has {size} blocks, not {blocks}")
        # The exponent of the product over the axes is a sum, expanded axis by axis to [..., R, M, M].
        exponents = [
            self.decay[..., axis, None, None] * _distance(length, self.amplitude)
            for axis, length in enumerate(self.grid)
        ]
        return (self.amplitude[..., None, None] * (-reduce(_outer_sum, exponents)).exp()).sum(-3)

    @override
    def matrix(self, blocks: int) -> Tensor:
        return self.dense(blocks if self.grid is None else None)

    @override
    def cross_matrix(self, pairs: BlockPairs) -> Tensor:
        """Return the coefficients between the blocks of two sequences that cover the same axis.

        Distances are measured between block centers, in key blocks (:meth:`BlockPairs.distance`). With a grid, both sides have
        the same grid of blocks.

        Args:
            pairs: blocks of both sides.

        Returns:
            ``[Mq, Mk]``, or ``[H, Mq, Mk]`` for H heads.
        """
        if self.grid is not None:
            return DenseMixing(self.dense()).cross_matrix(pairs)  # by the index of each block in its sequence
        return _kernel(self.amplitude, self.decay, pairs.distance(self.amplitude))

    def own(self, index: slice | Tensor | Sequence[int], blocks: int) -> Tensor:
        """Return the coefficient m[i, i] of a block's own summary, the sum of the amplitudes: ``[1]`` or ``[H, 1]``.

        It is the same for every block, so the arguments are ignored.
        """
        return self.amplitude.sum(-1, keepdim=True)

    def _per_head(self) -> tuple[Tensor, Tensor]:
        """Return amplitudes, ``[H or 1, R]``, and decays, ``[H or 1, R]`` or ``[H or 1, R, A]`` for a grid of A axes."""
        return (self.amplitude, self.decay) if self.heads else (self.amplitude[None], self.decay[None])

    @override
    def mix(self, summary: Tensor, causal: bool) -> Tensor:
        """Mix the summaries of all blocks for each of M blocks; if ``causal``, only the summaries of earlier blocks.

        In a sequence, running sums mix them at a cost linear in the number of blocks M. Over a grid, each exponential term
        mixes along one axis after the other, unless one matrix takes fewer operations.

        Args:
            summary: summaries of the M blocks, ``[B, H, M, W]`` with W numbers each.
            causal: whether the mixture of a block contains only the summaries of earlier blocks, not its own.

        Returns:
            Mixed summaries, ``[B, H, M, W]``.
        """
        amplitude, decay = self._per_head()
        if causal:
            return earlier(summary, amplitude, decay)
        if self.grid is None:
            later = earlier(summary.flip(2), amplitude, decay).flip(2)
            own_part = amplitude.sum(-1)[:, None, None] * summary
            return earlier(summary, amplitude, decay) + own_part + later
        if self.terms * sum(self.grid) > prod(self.grid):  # the matrix takes fewer operations than the axes
            return torch.einsum("hib,nhbw->nhiw", self.dense().expand(summary.shape[1], -1, -1), summary)
        return _separable(summary, amplitude, decay, self.grid)

    @override
    def span_terms(self, causal: bool) -> int | None:
        """Return the number of running sums that connect chunks: one per exponential term if causal, otherwise two.

        A chunk is a group of consecutive blocks. The result is None if the blocks form a grid. Consecutive blocks of a grid are
        not always neighbors, so running sums cannot connect chunks.
        """
        if self.grid is not None:
            return None
        return self.terms if causal else 2 * self.terms

    @override
    def span(self, blocks: int, causal: bool) -> Span:
        return make_span(*self._per_head(), blocks, causal)

    @property
    def running_sums(self) -> int:
        """Number of running sums that replace the summaries of finished blocks during generation: one per exponential term."""
        return self.terms

    @override
    def make_room(self, finished: Tensor, blocks: int, owned: bool) -> Tensor:
        """Return the running sums ``finished`` unchanged, because new blocks need no more space."""
        return finished

    @override
    def append(self, finished: Tensor, rows: Rows, first: int, summary: Tensor, in_place: bool) -> Tensor:
        """Decay the running sums once for each new block, and add the summaries of these blocks to them.

        Args:
            finished: R running sums of the finished blocks, each with the W entries of a summary, ``[B, H, R, W]``.
            rows: rows of the batch that ``summary`` belongs to: ``slice(None)`` for all, or a tensor of row indices.
            first: ignored.
            summary: summaries of the new blocks in these rows, ``[rows, H, new blocks, W]``.
            in_place: ignored.

        Returns:
            New running sums ``[B, H, R, W]``, always a copy. Other rows of the batch are unchanged.
        """
        count = summary.shape[2]
        decay = self.decay.reshape(1, -1, self.terms, 1)
        # [n] distance of each new block from the newest one, which enters the sum undecayed
        age = torch.arange(count - 1, -1, -1, device=finished.device, dtype=finished.dtype)
        sums = (-decay * count).exp() * finished[rows] + (-decay * age).exp() @ summary
        return sums if isinstance(rows, slice) else finished.index_copy(0, rows, sums)

    @override
    def read(self, finished: Tensor, block: int) -> Tensor:
        # The sums are as of the last finished block, which is at distance 1 from the open block.
        weights = (self.amplitude * (-self.decay).exp()).reshape(1, -1, 1, self.terms)
        return (weights @ finished).squeeze(2)

    @override
    def mix_after(self, finished: Tensor, summary: Tensor, first: int) -> Tensor:
        # [M] distance of each new block from the last finished block
        age = torch.arange(1, summary.shape[2] + 1, device=summary.device, dtype=summary.dtype)
        decay, amplitude = (x.reshape(1, -1, 1, self.terms) for x in (self.decay, self.amplitude))
        return self.mix(summary, causal=True) + (amplitude * (-decay * age[:, None]).exp()) @ finished

    @property
    @override
    def boundary_sums(self) -> int | None:
        """Number of running sums that processes exchange in each direction if a sequence is distributed over them.

        It is the number of exponential terms. None if the blocks form a grid: the processes then exchange the summaries of
        all blocks.
        """
        return self.terms if self.grid is None else None

    @override
    def mix_share(self, summary: Tensor, causal: bool, shares: BlockShares, every: Tensor | None) -> Tensor:
        """Compute the mixed summaries for the blocks of this process, in a sequence that is distributed over processes.

        The processes exchange one running sum per exponential term and direction. Over a grid, they exchange all block
        summaries.

        Args:
            summary: summaries of the m blocks of this process, ``[B, H, m, ...]``.
            causal: whether the mixture of a block contains only the summaries of earlier blocks, not its own.
            shares: assignment of blocks to processes.
            every: summaries of the M blocks of all processes, ``[B, H, M, ...]``; None to gather them. Used only over a grid.

        Returns:
            Mixed summaries for the blocks of this process, ``[B, H, m, ...]``.
        """
        if self.grid is not None:
            return super().mix_share(summary, causal, shares, every)
        flat = summary.flatten(3)
        amplitude, decay = self._per_head()
        bounds, rank = shares.shares, shares.rank
        blocks, processes, terms = flat.shape[2], len(bounds) - 1, self.terms
        index = torch.arange(blocks, device=flat.device, dtype=flat.dtype)
        # A process without blocks must still take part in the collective operation below.
        mixed = self.mix(flat, causal) if blocks else flat
        sums = (-decay[..., None] * (blocks - index)).exp() @ flat  # [B, H, R, W], as seen from the next process
        if not causal:
            # as seen from the last block of the previous process
            sums = torch.cat([sums, (-decay[..., None] * (index + 1)).exp() @ flat], 2)
        # Finite, because the sums of processes that do not contribute are multiplied by zero. [B, H, P, R or 2 R, W].
        gathered = shares.gather(finite_(sums), [sums.shape[2]] * processes).unflatten(2, (processes, -1))
        first, last = shares.own
        # Number of blocks between the end of process p and the start of this one. The sum of p is already seen from its end.
        from_left = [first - bounds[p + 1] if p < rank else None for p in range(processes)]
        reading = amplitude[:, None] * (-decay[:, None] * index[:, None]).exp()  # [H, m, R]
        mixed = mixed + reading @ _faded(gathered[..., :terms, :], decay, from_left)
        if not causal:
            from_right = [bounds[p] - last if p > rank else None for p in range(processes)]
            reading = amplitude[:, None] * (-decay[:, None] * (blocks - 1 - index)[:, None]).exp()
            mixed = mixed + reading @ _faded(gathered[..., terms:, :], decay, from_right)
        return mixed.view(summary.shape)

    @override
    def fused(self, blocks: int, causal: bool, form: str) -> tuple[str, list[Tensor]]:
        """Return the coefficients as the tensors that the Triton kernels read.

        Args:
            blocks: number of blocks.
            causal: whether the attention is causal.
            form: attention algorithm, such as ``"chunked"``.

        Returns:
            Name of the kernels, and tensors that they read. For the causal chunked form, ``"exponential"`` with the amplitudes
            and the decays, ``[H or 1, R]`` each. Otherwise, ``"dense"`` with one matrix, ``[H or 1, M, M]``.
        """
        if not causal or form != "chunked":
            return super().fused(blocks, causal, form)
        return "exponential", [x.contiguous() for x in self._per_head()]

    @override
    def work(self, blocks: int, causal: bool, fused: bool) -> int:
        """Estimate the cost of mixing for one block, as a number of summaries that are added up.

        In bidirectional attention, the fused kernels apply the coefficients as a matrix, so the result is M. Otherwise, it
        has an upper bound that depends only on the number of exponential terms.

        Args:
            blocks: number of blocks M.
            causal: whether the attention is causal.
            fused: whether the fused Triton kernels do the mixing.
        """
        if fused and not causal:
            return blocks
        both_ways = 1 if causal or self.grid is not None else 3  # two passes, and one to reverse and add
        # A row of the matrix of a group, plus R sums written and R sums read; never more than a plain matrix.
        return both_ways * at_most(blocks, GROUP + 2 * self.terms)

    @classmethod
    def fit(
        cls,
        mixing: Tensor,
        terms: int = 4,
        *,
        grid: tuple[int, ...] | None = None,
        causal: bool = False,
        any_row_scale: bool = False,
        steps: int = 500,
    ) -> tuple[ExponentialMixing, Tensor]:
        """Fit a sum of exponentials to learned dense coefficients, and return it with the explained fraction of variance.

        The fit minimizes the squared error over all coefficients, or over the lower triangle if ``causal``. Adam optimizes the
        logarithms of the decays. Before each of its steps, the nonnegative amplitudes are improved by least squares.

        Args:
            mixing: dense coefficients of M blocks, ``[M, M]`` or ``[H, M, M]``; each head is fitted separately.
            terms: number of exponential terms R.
            grid: number of blocks along each axis of a 2-D or 3-D grid, with ``prod(grid)`` = M; None for a sequence.
            causal: whether only the lower triangle is fitted.
            any_row_scale: whether every row of the fit may be scaled to match. The scale of a row has no effect if attention is
                normalized or an RMSNorm follows it. Use this option for rows that were normalized to a sum of 1, because they
                are not a function of distance alone.
            steps: number of optimizer steps.

        Returns:
            The fitted mixing in float32, and the fraction of the variance of the coefficients that it explains, a scalar or
            ``[H]``: 1 minus the mean squared error divided by the variance. If all coefficients are equal, their mean square
            takes the place of the variance.

        Raises:
            ValueError: if a shape is wrong, a number is not finite, or options do not fit together.
        """
        amplitude, decay, explained = fit_exponentials(mixing, terms, grid, causal, any_row_scale, steps)
        return cls(amplitude, decay, grid), explained


def _check_decay(decay: Tensor) -> None:
    """Check that the decays are finite and not negative.

    The check does not wait for the device. Invalid decays on an accelerator, or while torch traces, raise an error later.

    Raises:
        ValueError: if a decay on a CPU is invalid, except while torch traces.
    """
    message = "the decays of ExponentialMixing must be finite and not negative"
    if decay.is_meta:
        return
    if not torch.compiler.is_compiling():
        decay = unwrapped(decay)  # the decays of all calls that torch.vmap maps over
    valid = ((decay >= 0) & (decay < torch.inf)).all()
    if torch.compiler.is_compiling():
        # torch.vmap inside a graph has no rule for assert_async; failed checks raise later
        with suppress(RuntimeError):
            assert_async(valid, message)
        return
    valid = unwrapped(valid)
    if decay.device.type != "cpu" or not has_values(valid):
        assert_async(valid, message)
    elif not valid:
        raise ValueError(f"{message}, got {decay.flatten()[:8].tolist()}")


def _faded(sums_BHPRW: Tensor, decay: Tensor, gaps: Sequence[int | None]) -> Tensor:
    """Add up the running sums of P processes, each decayed over the blocks between its process and the current process.

    Every process must take part in the collective operation of the backward pass. Therefore a process that does not contribute
    gets weight zero, instead of being left out.

    Args:
        sums_BHPRW: R running sums over the blocks of each process, with W numbers each, ``[B, H, P, R, W]``.
        decay: decay per block, ``[H or 1, R]``.
        gaps: number of blocks between each process and the current one; None for a process that does not contribute.

    Returns:
        Decayed total, ``[B, H, R, W]``.
    """
    gap = torch.tensor([gap or 0 for gap in gaps], device=decay.device, dtype=decay.dtype)
    counts = torch.tensor([gap is not None for gap in gaps], device=decay.device, dtype=decay.dtype)
    weights = (-decay[:, None] * gap[:, None]).exp() * counts[:, None]  # [H, P, R]
    return (weights[..., None] * sums_BHPRW).sum(2)


def _distance(length: int, like: Tensor) -> Tensor:
    index = torch.arange(length, device=like.device, dtype=like.dtype)
    return (index[:, None] - index[None, :]).abs()


def _kernel(amplitude: Tensor, decay: Tensor, distance: Tensor) -> Tensor:
    """Compute ``sum_r a_r exp(-lambda_r d)``, the mixing coefficient for each block distance d.

    Args:
        amplitude: amplitudes a of R exponential terms, ``[..., R]``.
        decay: decays lambda per block, ``[..., R]``.
        distance: distances d, in any shape.

    Returns:
        Coefficients, ``[..., *distance.shape]``.
    """
    rates = decay.reshape(*decay.shape, *(1,) * distance.dim())
    weights = amplitude.reshape(*amplitude.shape, *(1,) * distance.dim())
    return (weights * (-rates * distance).exp()).sum(amplitude.dim() - 1)


def _outer_sum(a: Tensor, b: Tensor) -> Tensor:
    """Add each entry of ``a`` to each entry of ``b``, arranged as in a Kronecker product.

    ``[..., I, J]`` and ``[..., K, L]`` give ``[..., I * K, J * L]``.
    """
    joined = a[..., :, None, :, None] + b[..., None, :, None, :]
    return joined.flatten(-4, -3).flatten(-2, -1)


def earlier(summary: Tensor, amplitude: Tensor, decay: Tensor) -> Tensor:
    """Mix the summaries of the earlier blocks for each block i: ``sum_{b < i} sum_r a_r exp(-lambda_r (i - b)) S_b``.

    The blocks are divided into groups. A small matrix mixes the blocks within a group, and R running sums connect the groups.

    Args:
        summary: summaries S of the M blocks, ``[B, H, M, W]``.
        amplitude: amplitudes a of R exponential terms, ``[H or 1, R]``.
        decay: decays lambda per block, ``[H or 1, R]``.

    Returns:
        Mixed summaries, ``[B, H, M, W]``.
    """
    batch, heads, blocks, width = summary.shape
    group = at_most(blocks, GROUP)
    groups = divide_up(blocks, group)
    complete = groups * group == blocks
    x = summary if complete else F.pad(summary, (0, 0, 0, groups * group - blocks))
    # [B H groups, G, W]
    x = x.reshape(batch * heads * groups, group, width)
    index = torch.arange(group, device=summary.device, dtype=summary.dtype)
    within = _kernel(amplitude, decay, (index[:, None] - index[None, :]).abs()).tril(-1)

    # [H or 1, I, J] to [B H groups, I, J], for one bmm over all groups
    def everywhere(matrix: Tensor) -> Tensor:
        return matrix[None, :, None].expand(batch, heads, groups, *matrix.shape[-2:]).flatten(0, 2)

    if groups == 1:
        out = torch.bmm(everywhere(within), x)
    else:
        # A group is written as seen from its last block and read from there, so that no exponential exceeds 1.
        reading = amplitude[:, None] * (-decay[:, None] * (index[:, None] + 1)).exp()  # [H, G, R]
        writing = (-decay[..., None] * (group - 1 - index)).exp()  # [H, R, G]
        sums = (
            torch.bmm(everywhere(writing), x)
            .view(batch, heads, groups, writing.shape[1], width)
            .transpose(2, 3)
            .flatten(1, 2)
        )
        # Shifted by one group. The sum of the last group is not read, and padding of that group does not matter.
        preceding = F.pad(finite_(sums)[:, :, :-1], (0, 0, 1, 0))  # [B, H R, groups, W]
        fading = (group * decay).expand(heads, -1).reshape(-1, 1)
        states = preceding + earlier(preceding, torch.ones_like(fading), fading)  # the groups are a sequence themselves
        states = states.unflatten(1, (heads, -1)).transpose(2, 3).flatten(0, 2)
        out = torch.baddbmm(torch.bmm(everywhere(reading), states), everywhere(within), x)
    out = out.view(batch, heads, groups * group, width)
    return out if complete else out[:, :, :blocks]


def _separable(summary: Tensor, amplitude: Tensor, decay: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Mix the summaries of the blocks of a grid: each exponential term mixes along one axis after the other.

    Args:
        summary: summaries of the M blocks, ``[B, H, M, W]``.
        amplitude: amplitudes of R exponential terms, ``[H or 1, R]``.
        decay: decays along the A axes of the grid, ``[H or 1, R, A]``.
        grid: number of blocks along each axis.

    Returns:
        Mixed summaries, ``[B, H, M, W]``.
    """
    shape = summary.shape
    out = torch.zeros_like(summary)
    for term in range(amplitude.shape[-1]):
        x = summary
        for axis, length in enumerate(grid):
            outer, inner = prod(grid[:axis]), prod(grid[axis + 1 :])
            # The shape is [H or 1, length, length].
            weight = (-decay[:, term, axis, None, None] * _distance(length, summary)).exp()
            # Later axes and the numbers of a summary are columns of one product along this axis.
            lines = x.reshape(*shape[:2], outer, length, inner * shape[-1])
            x = (weight[None, :, None] @ lines).reshape(shape)
        out = out + amplitude[:, term, None, None] * x
    return out
