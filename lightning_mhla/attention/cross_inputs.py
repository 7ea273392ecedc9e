"""Inputs of cross-attention layers: projections, order and blocks of queries and context, and summaries of a context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import ref

from mhla_kernels.checks import as_index
from mhla_kernels.cross.summaries import KeySummaries
from torch import Tensor, nn

from lightning_mhla.attention.layout import BlockLayout, Placement
from lightning_mhla.attention.order import BlockOrder


class CrossProjections(NamedTuple):
    """Input and output projections of a cross-attention layer, either its own or taken from a layer that it replaces.

    Attributes:
        queries: function from tokens ``[B, Nq, dim]`` to queries ``[B, Nq, H, Dk]``.
        context: function from context tokens ``[B, Nk, context_dim]`` to keys ``[B, Nk, Hkv, Dk]`` and values
            ``[B, Nk, Hkv, Dv]``.
        merge: function from outputs of the heads, ``[B, Nq, H * Dv]``, to tokens ``[B, Nq, dim]``.
    """

    queries: Callable[[Tensor], Tensor]
    context: Callable[[Tensor], tuple[Tensor, Tensor]]
    merge: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CrossInputs:
    """Inputs of :meth:`CrossAttention.attend`, with the tokens of each block contiguous.

    Attributes:
        q: queries ``[B, Nq, H, Dk]``, before the feature map.
        k: keys ``[B, Nk, Hkv, Dk]``, before the feature map.
        v: values ``[B, Nk, Hkv, Dv]``.
        query_mask: ``[B, Nq]`` bool, False for hidden queries; None if no query is hidden.
        key_mask: ``[B, Nk]`` bool, False for hidden context tokens; None if none is hidden.
        queries: order and blocks of the queries.
        context: order and blocks of the context.
        first: number of blocks of the sequence before the block of the first query.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None
    queries: Placement
    context: Placement
    first: int = 0


@dataclass
class ContextSummaries:
    """Key-value summaries of the blocks of one context, as :meth:`CrossAttention.summarize` returns them.

    The cost of reading summaries depends on the number of blocks of the context, not on its number of tokens. In passes without
    gradients, the mixed summary for the latest block of queries is stored, so that later tokens of this block do not compute it
    again.

    Summaries depend on the weights of the layer and must be computed again when the weights change. Only the layer that
    computed them can read them; its copies cannot.

    Attributes:
        keys: sums of ``k v^T``, ``[B, H, Mk, K, V]``, and sums of k, ``[B, H, Mk, K]``, over the tokens of each of Mk blocks.
            Keys k have K features, and values v have width V.
        context: order and blocks of the context.
        layer: weak reference to the layer that computed the summaries.
        key_width: width Dk of the keys before the feature map.
        mixture: index of a block of queries and its mixed summary, if the last call had queries of this block only; None before
            the first call, and after calls with several blocks of queries or with gradients.
    """

    keys: KeySummaries
    context: Placement
    layer: ref[nn.Module] = field(repr=False)
    key_width: int
    mixture: tuple[int, KeySummaries] | None = field(default=None, repr=False)

    def select(self, rows: Tensor) -> ContextSummaries:
        """Return the summaries of the batch rows with the indices ``rows``, ``[B']`` int64. An index may occur repeatedly."""
        mixture = None if self.mixture is None else (self.mixture[0], self.mixture[1].select(rows))
        return replace(self, keys=self.keys.select(rows), mixture=mixture)

    def check(self, layer: nn.Module, q: Tensor) -> None:
        """Check that the queries of a layer can read these summaries.

        Args:
            layer: layer that computed the queries.
            q: queries ``[B, Nq, H, Dk]``, before the feature map.

        Raises:
            ValueError: if a different layer computed the summaries, or if summaries and queries differ in rows, heads or
                widths.
        """
        if self.layer() is not layer:
            raise ValueError(
                "these summaries were computed by a different layer, with different weights; compute them with summarize of "
                "the layer that reads them"
            )
        rows, heads = self.keys.totals.shape[:2]
        if (q.shape[0], *q.shape[2:]) != (rows, heads, self.key_width):
            raise ValueError(
                f"summaries of {rows} rows, {heads} heads and keys of width {self.key_width} do not fit queries "
                f"{list(q.shape)}, [B, Nq, H, Dk]; select rows of the summaries, or compute those of the context of these rows"
            )


def place(name: str, order: BlockOrder, layout: BlockLayout | None, x: Tensor, start: int = 0) -> Placement:
    """Return the order of the tokens of one cross-attention call, and their partition into blocks.

    Args:
        name: ``"query"`` or ``"context"``, for error messages.
        order: permutation for the layout of the layer.
        layout: layout of this call; None for the layout of the layer.
        x: tokens ``[B, N, ...]``.
        start: number of tokens that precede ``x`` in the sequence.

    Returns:
        Order and blocks of the tokens. A block of a sequence counts even if the call has only a part of its tokens.

    Raises:
        ValueError: if the number of tokens is zero or does not fit the layout, if ``start`` is not an integer or is negative,
            or if it is not 0 for a layout without ``block_size`` or with prefix tokens.
    """
    number = as_index(start)
    if number is None or number < 0:
        raise ValueError(f"start={start!r} must be an integer, at least 0: the number of tokens before these")
    chosen, tokens = order.layout if layout is None else layout, x.shape[1]
    if chosen.block_size is None or chosen.prefix_tokens:
        if start:
            raise ValueError(f"start={start} needs a layout with block_size, a sequence, not {chosen}")
        if tokens != chosen.num_tokens:
            raise ValueError(f"{tokens} {name} tokens for a layout of {chosen.num_tokens} ({chosen})")
        if layout is not None:
            return layout.place(x.device)
        return Placement(chosen, order.order, order.inverse, chosen.operator_blocks)
    size = chosen.block_size
    if tokens == 0:
        raise ValueError(f"0 {name} tokens, but attention needs at least one: {list(x.shape)}")
    # Blocks are counted from the start of the sequence, so these tokens first fill up the block that earlier tokens began.
    lead = size - start % size
    if lead == size:
        return Placement(BlockLayout((tokens,), block_size=size), None, None, {"block_size": size})
    edges = (0, *range(lead, tokens, size), tokens)
    pieces = BlockLayout((tokens,), blocks=(len(edges) - 1,))  # only their number counts
    return Placement(pieces, None, None, {"block_offsets": edges})
