"""Arguments of the Triton cross-attention operator, and the kernel calls made from them: one for queries, one for keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.cross.layout import CrossLayout
from mhla_kernels.triton_backend.call import Arguments, Call
from mhla_kernels.triton_backend.cross.tables import token_ranges
from mhla_kernels.triton_backend.tables import LOW


class CrossArguments(NamedTuple):
    """Arguments of ``torch.ops.mhla.cross_attention``, in the order of its parameters, with tensors first.

    Attributes:
        q: queries, ``[B, Nq, H, K]``, float32 or bfloat16, any strides.
        k: keys, ``[B, Nk, H, K]``, in the dtype of q, any strides.
        v: values, ``[B, Nk, H, V]``, in the dtype of q, any strides.
        coefficients: list of one float32 matrix, the mixing coefficients times the scale of the outputs, ``[1, Mq, Mk]`` or
            ``[H, Mq, Mk]``.
        query_tables: lookup tables of the queries, as :func:`mhla_kernels.triton_backend.cross.tables.cross_tables` returns
            them.
        key_tables: lookup tables of the keys.
        query_mask: ``[B, Nq]`` bool, False for masked queries; None if no query is masked.
        key_mask: ``[B, Nk]`` bool, False for masked keys; None if no key is masked.
        cu_seqlens: index of the first query of each of S packed sequences, followed by Nq, ``[S + 1]`` int64 on the device of
            q; None without packing.
        key_cu_seqlens: index of the first key of each packed sequence, followed by Nk, in the same form.
        block_size: queries in a block; 0 for uneven blocks.
        key_block_size: keys in a block; 0 for uneven blocks.
        block_offsets: index of the first query of each uneven block, followed by Nq; None for blocks of equal size.
        key_block_offsets: index of the first key of each uneven block, followed by Nk; None for blocks of equal size.
        relu: whether the kernels apply the feature map ``relu(x) + 1e-6`` to q and k.
        eps: number added to the normalizer; None if outputs are not divided by the normalizer.
        form: ``"parallel"`` (weights of all token pairs) or ``"chunked"`` (a summary of each block of keys).
        guard: name under which the kernels are disabled in this process if they fail; PyTorch then computes the result. If
            empty, errors are raised instead.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    coefficients: list[Tensor]
    query_tables: list[Tensor]
    key_tables: list[Tensor]
    query_mask: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    key_cu_seqlens: Tensor | None
    block_size: int
    key_block_size: int
    block_offsets: list[int] | None
    key_block_offsets: list[int] | None
    relu: bool
    eps: float | None
    form: str
    guard: str

    @property
    def layout(self) -> CrossLayout:
        """Partition of the queries and of the keys into blocks."""
        offsets, key_offsets = (None if x is None else tuple(x) for x in (self.block_offsets, self.key_block_offsets))
        return CrossLayout(
            TokenLayout(self.q.shape[1], self.block_size, offsets, self.cu_seqlens),
            TokenLayout(self.k.shape[1], self.key_block_size, key_offsets, self.key_cu_seqlens),
        )


class Side(Call):
    """Kernel call for one side of cross-attention, queries or keys, whose tokens are the rows of the matrix of scores.

    The kernels are those of self-attention and expect q, k and v on each side. A tensor that a side lacks is replaced with a
    placeholder, whose shape is read but whose entries are not.

    Args:
        arguments: arguments of the kernels for this side.
        other: call of the other side, whose tokens are the columns of the matrix of scores.
    """

    def __init__(self, arguments: Arguments, other: Call) -> None:
        super().__init__(arguments)
        self.other = other

    @property
    @override
    def columns(self) -> Call:
        return self.other

    @property
    @override
    def isolates_sequences(self) -> bool:
        return self.tables.packed

    @override
    def tile_table(self, rows: int) -> tuple[Tensor, int]:
        table, count = super().tile_table(rows)
        if not self.tables.packed:
            return table, count
        ranges = token_ranges(table, self.arguments.cu_seqlens, self.columns.arguments.layout)
        return torch.cat([table[:LOW], ranges]), count


def sides(arguments: CrossArguments) -> tuple[Side, Side]:
    """Return two kernel calls for cross-attention: one with queries and one with keys as the rows of the matrix of scores."""
    q, k, v = arguments[:3]
    of_queries = Arguments(
        q,
        q,
        v.new_empty(1, 1, 1, 1).expand(*q.shape[:3], v.shape[-1]),  # values for every query, which are never read
        coefficients=arguments.coefficients,
        tables=arguments.query_tables,
        key_mask=arguments.query_mask,
        cu_seqlens=arguments.cu_seqlens,
        block_size=arguments.block_size,
        block_offsets=arguments.block_offsets,
        causal=False,
        relu=arguments.relu,
        eps=arguments.eps,
        form=arguments.form,
        mixer="dense",
        guard="",
    )
    of_keys = of_queries._replace(
        q=k,
        k=k,
        v=v,
        tables=arguments.key_tables,
        key_mask=arguments.key_mask,
        cu_seqlens=arguments.key_cu_seqlens,
        block_size=arguments.key_block_size,
        block_offsets=arguments.key_block_offsets,
    )
    # Plain calls of the other side: two sides that hold each other would be a cycle, which keeps their tensors alive.
    return Side(of_queries, Call(of_keys)), Side(of_keys, Call(of_queries))
