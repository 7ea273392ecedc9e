"""Steps that all recurrences share: checks of the inputs, division into chunks of tokens, and the scan over chunks.

Shape letters: B rows of a batch, N tokens, H heads, K and V features of a key and a value, M chunks, C tokens of a chunk, S
sequences packed in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from mhla_kernels.blocks import BlockPartition, TokenLayout
from mhla_kernels.checks import as_integers
from mhla_kernels.problem import default_scale
from torch import Tensor


def chunk_tokens(width: int) -> int:
    """Return the number of tokens in a chunk for keys and values of up to ``width`` features.

    A chunk is a group of consecutive tokens that a recurrence processes together, with matrix products. Longer chunks need
    larger attention matrices, and shorter chunks need more states. In measurements of forward and backward passes on a CPU,
    chunks of 32 tokens were the fastest for up to 32 features, and chunks of 64 tokens for more.
    """
    return 32 if width <= 32 else 64


class ChunkedInputs(NamedTuple):
    """Checked inputs of a recurrence, divided into chunks of consecutive tokens, in float32 (float64 for float64 inputs).

    Shapes: B rows, H heads, M chunks of C tokens, K and V features of a key and a value, S packed sequences. The last chunk of
    a sequence may have fewer tokens than C. Its unused entries are zero.

    Attributes:
        q: queries multiplied by the scale, ``[B, H, M, C, K]``.
        k: keys, ``[B, H, M, C, K]``.
        v: values, ``[B, H, M, C, V]``.
        initial: initial states, ``[B, H, K, V]``, or ``[S, H, K, V]`` for packed sequences.
        bounds: index of the first chunk of each sequence, followed by M; ``(0, M)`` if each row is one sequence.
        partition: partition of the tokens into chunks.
        dtype: dtype of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    initial: Tensor
    bounds: tuple[int, ...]
    partition: BlockPartition
    dtype: torch.dtype

    def split(self, x: Tensor) -> Tensor:
        """Divide a tensor into the same M chunks of C tokens as ``q``, and convert it to the dtype of ``q``.

        Args:
            x: tensor with one entry per token and head, ``[B, N, H]``, or with D entries, ``[B, N, H, D]``.

        Returns:
            ``[B, H, M, C]`` for ``[B, N, H]``, and ``[B, H, M, C, D]`` for ``[B, N, H, D]``.
        """
        # `partition.split` takes four axes, so a tensor without features gets an axis of one feature.
        wide = x.to(self.q.dtype)
        return self.partition.split(wide) if x.dim() == 4 else self.partition.split(wide[..., None])[..., 0]

    def merge(self, out: Tensor) -> Tensor:
        """Join M chunks of C outputs, ``[B, H, M, C, V]``, into ``[B, N, H, V]`` without padding, in the output dtype."""
        return self.partition.merge(out).to(self.dtype)


def check(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | Sequence[int] | None
) -> list[int] | None:
    """Check the arguments that all recurrences have in common, and convert ``cu_seqlens`` to a list.

    Args:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        initial_state: ``[B, H, Dk, Dv]``, or ``[S, H, Dk, Dv]`` for S packed sequences; None for zeros.
        cu_seqlens: index of the first token of each packed sequence, followed by N; None for one sequence in each row.

    Returns:
        ``cu_seqlens`` as a list of integers; None for one sequence in each row.

    Raises:
        ValueError: if shapes do not match, if ``cu_seqlens`` does not hold integers, decreases or does not run from 0 to N, or
            if packed sequences are in more than one row.
        TypeError: if q, k or v does not hold floating-point numbers.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise TypeError(f"{name} is {x.dtype}; it must be a floating-point tensor, such as float32 or bfloat16")
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"q and k must be [B, N, H, Dk] and v [B, N, H, Dv]; got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    bounds = None if cu_seqlens is None else check_bounds(cu_seqlens, q)
    rows = len(q) if bounds is None else len(bounds) - 1
    state_shape = (rows, q.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(f"initial_state must be {list(state_shape)}; got {list(initial_state.shape)}")
    return bounds


def check_bounds(cu_seqlens: Tensor | Sequence[int], q: Tensor) -> list[int]:
    """Check the bounds of packed sequences, and return them as a list of integers.

    Args:
        cu_seqlens: index of the first token of each packed sequence, followed by N.
        q: queries, ``[B, N, H, Dk]``.

    Raises:
        ValueError: if the bounds are not integers, decrease or do not run from 0 to N, or if B is not 1.
    """
    bounds = list(as_integers(cu_seqlens, "cu_seqlens"))
    if len(q) != 1:
        raise ValueError(f"cu_seqlens needs a batch of one row, but q has {len(q)} rows")
    rising = all(start <= end for start, end in pairwise(bounds))
    if not rising or bounds[0] != 0 or bounds[-1] != q.shape[1]:
        raise ValueError(f"cu_seqlens={bounds} must rise from 0 to the number of tokens, {q.shape[1]}")
    return bounds


def check_gate(name: str, gate: Tensor, shape: Sequence[int]) -> None:
    """Check that a tensor of gates or decays has the required shape.

    Args:
        name: name of the tensor, for the error message.
        gate: tensor to check.
        shape: required shape.

    Raises:
        ValueError: if the tensor has a different shape.
    """
    if tuple(gate.shape) != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)}; got {list(gate.shape)}")


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    bounds: list[int] | None,
) -> ChunkedInputs:
    """Divide the checked inputs of a recurrence into chunks of consecutive tokens. No chunk spans two packed sequences.

    Args:
        q: queries, ``[B, N, H, K]``.
        k: keys, ``[B, N, H, K]``.
        v: values, ``[B, N, H, V]``.
        scale: factor on the queries; None for ``K ** -0.5``.
        initial_state: initial states, ``[B, H, K, V]``, or ``[S, H, K, V]`` for S packed sequences; None for zeros.
        bounds: index of the first token of each packed sequence, followed by N; None for one sequence in each row.
    """
    wide = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cpu")
    tokens = q.shape[1]
    chunk = chunk_tokens(max(q.shape[-1], v.shape[-1]))
    layout = TokenLayout(tokens, chunk, cu_seqlens=cu_seqlens)
    partition = layout.partition(q.device) if tokens else BlockPartition(0, 0, 1)
    chunks: tuple[int, ...] = (0, partition.blocks)
    if bounds is not None:
        # An empty sequence has no chunk, and its final state is its initial state.
        counts = [-(-(end - start) // partition.slots) for start, end in pairwise(bounds)]
        chunks = (0, *accumulate(counts))
    rows = len(q) if bounds is None else len(bounds) - 1
    initial = (
        torch.zeros(rows, q.shape[2], q.shape[3], v.shape[3], dtype=wide, device=q.device)
        if initial_state is None
        else initial_state.to(wide)
    )
    q = q.to(wide) * (default_scale(q.shape[-1]) if scale is None else scale)
    q, k, v_split = (partition.split(x.to(wide)) for x in (q, k, v))
    return ChunkedInputs(q, k, v_split, initial, chunks, partition, v.dtype)


def scan_chunks(decay: Tensor, update: Tensor, initial: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute the states of a recurrence over chunks of tokens, ``state = decay * state + update``, for each sequence.

    Args:
        decay: decay over each of the M chunks, ``[B, H, M, K, 1]`` or ``[B, H, M, 1, 1]``.
        update: term that each chunk adds to the state, ``[B, H, M, K, V]``.
        initial: initial states, ``[B, H, K, V]``, or ``[S, H, K, V]`` for S packed sequences.
        bounds: index of the first chunk of each sequence, followed by M; ``(0, M)`` if each row is one sequence.

    Returns:
        The state before each chunk, ``[B, H, M, K, V]``, and the final state of each sequence, in the shape of ``initial``.
    """
    return _Scan.apply(decay, update, initial, tuple(bounds))


def rows_of(initial: Tensor, bounds: Sequence[int], sequence: int) -> Tensor:
    """Return the state of one packed sequence, or the states of all rows if ``bounds`` describes only one sequence.

    Args:
        initial: states, ``[B, H, K, V]``, or ``[S, H, K, V]`` for S packed sequences.
        bounds: index of the first chunk of each sequence, followed by the number of chunks.
        sequence: index of the packed sequence; ignored if ``bounds`` describes only one.

    Returns:
        State of the packed sequence, ``[1, H, K, V]``, or all of ``initial``.
    """
    return initial if len(bounds) == 2 else initial[sequence : sequence + 1]


class _Scan(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(decay: Tensor, update: Tensor, initial: Tensor, bounds: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        # written by hand, since autograd would record every step of the loop and save the state of each
        states, final = torch.empty_like(update), []
        for sequence, (first, last) in enumerate(pairwise(bounds)):
            state = rows_of(initial, bounds, sequence)
            for chunk in range(first, last):
                states[:, :, chunk] = state
                state = torch.addcmul(update[:, :, chunk], decay[:, :, chunk], state)
            final.append(state)
        return states, torch.cat(final)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[0])
        ctx.bounds = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        d_states, d_final = grads
        decay, states = ctx.saved_tensors
        d_update, d_initial = torch.empty_like(states), []
        for sequence, (first, last) in enumerate(pairwise(ctx.bounds)):
            # slope is the gradient of the state after a chunk; that of the state before it is d_states[c] + decay[c] * slope.
            slope = rows_of(d_final, ctx.bounds, sequence)
            for chunk in reversed(range(first, last)):
                d_update[:, :, chunk] = slope
                slope = torch.addcmul(d_states[:, :, chunk], decay[:, :, chunk], slope)
            d_initial.append(slope)
        # d_update[c] is the gradient of the state after chunk c, which decay[c] multiplies by the state before it.
        d_decay = (d_update * states).sum_to_size(decay.shape)
        return d_decay, d_update, torch.cat(d_initial), None
