"""Base class of the cross-attention layers: queries from one sequence, keys and values from another, the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention.config import AttentionConfig, report_unused
from lightning_mhla.attention.layout import BlockLayout, Placement
from lightning_mhla.attention.lepe import hide_rows
from lightning_mhla.attention.order import BlockOrder
from lightning_mhla.attention.output import apply_gate, build_norm, open_stage
from lightning_mhla.attention.projections import check_heads

SELF_ONLY = ("lepe", "rotary", "key_weighting", "normalize_before_rotary")
"""Options of :class:`AttentionConfig` that need queries and keys of the same tokens."""


class CrossProjections(NamedTuple):
    """Input and output projections of a cross-attention layer, its own or those of a layer that it replaces.

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
        first: number of query blocks of the sequence before that of the first query.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None
    queries: Placement
    context: Placement
    first: int = 0


class CrossAttention(nn.Module):
    """Cross-attention layer, and base class of its kinds: softmax, linear and mhla.

    The layer projects tokens to queries and context tokens to keys and values, and computes attention from them, for which each
    kind implements :meth:`attend`. Then follow an RMSNorm of each head's output and a gate, both optional, and the output
    projection.

    A layout with ``block_size`` is a sequence: each call may have fewer tokens than the layout, or any number if the mixing
    coefficients allow it. Other layouts are grids, and each call must have their number of tokens.

    Args:
        dim: width of the tokens.
        heads: number of query heads.
        layout: token grid of the queries and its partition into blocks.
        context_layout: token grid of the context and its partition into blocks.
        config: configuration of the layer; None for the defaults of its kind.
        context_dim: width of the context tokens; None for ``dim``.
        key_value_heads: number of key heads and of value heads, a divisor of ``heads``; None for ``heads``.
        key_width: width of the keys of one head; None for ``dim // heads``.
        value_width: width of the values of one head; None for ``dim // heads``.
        bias: whether the projections have a bias.
        projections: whether the layer has its own projections. If not, callers pass the projections of another module to
            :meth:`forward`.

    Raises:
        ValueError: if the configuration is for a different kind or blocks, or has an option that only self-attention supports,
            or if widths and numbers of heads do not fit together.
    """

    kind: ClassVar[str] = ""
    """Name of the kind; the layer's configuration must have the same."""
    kinds: ClassVar[dict[str, type[CrossAttention]]] = {}
    """Cross-attention classes by kind."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Options of :class:`AttentionConfig` that have no effect on the kind; the log names those that are set."""
    uses_blocks: ClassVar[bool] = False
    """Whether the kind divides tokens into blocks."""

    def __init_subclass__(cls, kind: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if kind:
            cls.kind = kind
            cls.kinds[kind] = cls

    def __init__(
        self,
        dim: int,
        heads: int,
        layout: BlockLayout,
        context_layout: BlockLayout,
        config: AttentionConfig | None = None,
        *,
        context_dim: int | None = None,
        key_value_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        bias: bool = True,
        projections: bool = True,
    ) -> None:
        super().__init__()
        config = AttentionConfig(kind=self.kind) if config is None else config
        key_value_heads = key_value_heads or heads
        check_heads(dim, heads, key_value_heads, key_width, value_width)
        check_cross_config(config, self.kind)
        report_unused(config, self.unused)
        self.config, self.heads, self.key_value_heads = config, heads, key_value_heads
        self.key_width, self.value_width = key_width or dim // heads, value_width or dim // heads
        inner, keys = heads * self.value_width, key_value_heads * self.key_width
        width = keys + key_value_heads * self.value_width
        self.q = nn.Linear(dim, heads * self.key_width, bias=bias) if projections else None
        self.kv = nn.Linear(context_dim or dim, width, bias=bias) if projections else None
        self.proj = nn.Linear(inner, dim, bias=bias) if projections else None
        self.gate = nn.Linear(dim, inner, bias=bias) if config.gate else None
        self.norm = build_norm(config, self.value_width) if "output_norm" not in self.unused else None
        self.query_order = BlockOrder(False, buffers=projections)
        self.context_order = BlockOrder(False, buffers=projections)
        self.context_layout = context_layout
        self.fit(layout, context_layout=context_layout)

    @override
    def extra_repr(self) -> str:
        return f"heads={self.heads}, layout={self.layout}, context_layout={self.context_layout}"

    def fit(
        self, layout: BlockLayout, device: torch.device | None = None, context_layout: BlockLayout | None = None
    ) -> None:
        """Adapt the layer to different token layouts. Learned parameters stay the same.

        Args:
            layout: new layout of the queries, with as many axes as the former one.
            device: device of the tokens; None for the CPU.
            context_layout: new layout of the context, with as many axes as the former one; None to keep it.
        """
        self.layout = layout
        self.context_layout = self.context_layout if context_layout is None else context_layout
        with torch.inference_mode(False):  # inference tensors could not be used in training later
            self.query_order.fit(self.layout, device)
            self.context_order.fit(self.context_layout, device)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        *,
        start: int = 0,
        projections: CrossProjections | None = None,
        layout: BlockLayout | None = None,
        context_layout: BlockLayout | None = None,
    ) -> Tensor:
        """Compute the attention outputs ``[B, Nq, dim]`` of tokens ``[B, Nq, dim]`` that read a context.

        Args:
            x: tokens, in raster order.
            context: context tokens ``[B, Nk, context_dim]``, in raster order.
            mask: mask of visible tokens, ``[B, Nq]`` bool. Outputs of hidden tokens are zero. None if all tokens are visible.
            context_mask: mask of visible context tokens, ``[B, Nk]`` bool. Hidden tokens do not influence the outputs, even if
                they contain NaN. None if all are visible. The attention outputs of a row without visible context are zero.
            start: number of tokens of the sequence before ``x``, for generation piece by piece. Only for a layout with
                ``block_size``.
            projections: projections to use if the layer has none of its own; None for the layer's own.
            layout: layout of the queries for this call only; None for the layout of the last :meth:`fit`.
            context_layout: layout of the context for this call only; None for that of the last :meth:`fit`.

        Returns:
            Outputs in the shape and order of ``x``.

        Raises:
            ValueError: if the number of tokens does not fit its layout, or masks do not fit the tokens.
        """
        check_mask("mask", mask, x)
        check_mask("context_mask", context_mask, context)
        queries = place("query", self.query_order, layout, x, start)
        keys = place("context", self.context_order, context_layout, context)
        projections = self._own_projections() if projections is None else projections
        tokens, visible = queries.enter(x, mask)
        read, readable = keys.enter(context, context_mask)
        q = projections.queries(hide_rows(tokens, visible))
        k, v = projections.context(
            hide_rows(read, readable)
        )  # NaN in hidden tokens would spread, because 0 * NaN is NaN
        size = (self.layout if layout is None else layout).block_size
        first = 0 if size is None else start // size
        out = self.attend(CrossInputs(q, k, v, visible, readable, queries, keys, first))
        out = (out if self.norm is None else self.norm(out)).flatten(2)
        out = apply_gate(out, tokens, self.gate, self.config.gate_activation)
        return queries.leave(hide_rows(projections.merge(out), visible))

    def attend(self, inputs: CrossInputs) -> Tensor:
        """Compute the attention outputs ``[B, Nq, H, Dv]`` of all queries. Each kind implements this method."""
        raise NotImplementedError

    def open_gate(self) -> None:
        """Initialize the gate so that it leaves the output unchanged, to start from weights that had no gate.

        Raises:
            ValueError: if the gate has no bias.
        """
        open_stage(self.gate, None, self.config.gate_activation)

    def _own_projections(self) -> CrossProjections:
        assert self.q is not None, "a layer without projections is given those of another module"
        assert self.proj is not None
        return CrossProjections(self._project, self._project_context, self.proj)

    def _project(self, x: Tensor) -> Tensor:
        assert self.q is not None
        return self.q(x).unflatten(-1, (self.heads, self.key_width))

    def _project_context(self, context: Tensor) -> tuple[Tensor, Tensor]:
        assert self.kv is not None
        keys = self.key_value_heads * self.key_width
        k, v = self.kv(context).tensor_split([keys], dim=-1)
        return k.unflatten(-1, (-1, self.key_width)), v.unflatten(-1, (-1, self.value_width))


def check_cross_config(config: AttentionConfig, kind: str) -> None:
    """Check that a configuration describes cross-attention of a kind.

    Args:
        config: configuration of the layer.
        kind: kind of cross-attention.

    Raises:
        ValueError: if the kind is different or has no cross-attention, or if an option needs queries and keys of the same
            tokens.
    """
    if config.kind not in CrossAttention.kinds:
        raise ValueError(
            f"attention kind {config.kind!r} reads its own tokens only; cross-attention has the kinds "
            f"{', '.join(sorted(CrossAttention.kinds))}"
        )
    if kind != config.kind:
        raise ValueError(
            f"this layer computes attention kind {kind!r}, but its configuration has kind {config.kind!r}; "
            "build_cross_attention builds the layer that a configuration names"
        )
    for name in SELF_ONLY:
        if value := getattr(config, name):
            raise ValueError(
                f"{name}={value} needs queries and keys of the same tokens; leave it out of cross-attention"
            )


def check_mask(name: str, mask: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless a mask is None or ``[B, N]`` bool for tokens ``[B, N, ...]``."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
        raise ValueError(
            f"{name} is {list(mask.shape)} {mask.dtype}; it must be bool {list(x.shape[:2])}, True for tokens"
        )


def place(name: str, order: BlockOrder, layout: BlockLayout | None, x: Tensor, start: int = 0) -> Placement:
    """Return the order and the blocks of a call's tokens.

    Args:
        name: ``"query"`` or ``"context"``, for error messages.
        order: permutation for the layout of the layer.
        layout: layout of this call; None for that of the layer.
        x: tokens ``[B, N, ...]``.
        start: number of tokens of the sequence before these.

    Returns:
        Order and blocks. For a sequence, its layout has one block for each (possibly partial) block of these tokens.

    Raises:
        ValueError: if the number of tokens does not fit the layout, or a grid has a start.
    """
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
    if start < 0:
        raise ValueError(f"start={start} must not be negative")
    lead = size - start % size
    if lead == size:
        return Placement(BlockLayout((tokens,), block_size=size), None, None, {"block_size": size})
    edges = (0, *range(lead, tokens, size), tokens)
    pieces = BlockLayout((tokens,), blocks=(len(edges) - 1,))  # only their number counts
    return Placement(pieces, None, None, {"block_offsets": edges})
