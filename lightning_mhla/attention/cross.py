"""Base class of the cross-attention layers, whose queries read the keys and values of a second sequence, the context."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention.config import AttentionConfig, report_unused
from lightning_mhla.attention.cross_inputs import ContextSummaries, CrossInputs, CrossProjections, place
from lightning_mhla.attention.inputs import check_mask, check_tokens
from lightning_mhla.attention.layout import BlockLayout, Placement
from lightning_mhla.attention.lepe import hide_rows
from lightning_mhla.attention.order import BlockOrder
from lightning_mhla.attention.output import apply_gate, build_norm, open_stage
from lightning_mhla.attention.projections import check_heads

SELF_ONLY = ("lepe", "rotary", "key_weighting", "normalize_before_rotary")
"""Options of :class:`AttentionConfig` that need queries and keys of the same tokens."""


class CrossAttention(nn.Module):
    """Cross-attention layer, and base class of its kinds: softmax, linear and mhla.

    The layer projects tokens to queries and context tokens to keys and values, and computes attention from them. Each kind
    implements this computation in :meth:`attend`. The layer then applies an RMSNorm to each head's output, multiplies by a
    gate, and projects the result. Norm and gate are optional.

    A layout with ``block_size`` and without prefix tokens is a sequence, and calls may have any number of tokens. Only the
    kind mhla with dense mixing coefficients has a limit: the number of blocks for which the layer was built. With any other
    layout, each call must have exactly as many tokens as the layout.

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
        ValueError: if the configuration is for a different kind or has an option that only self-attention supports, or if
            widths and numbers of heads do not fit together.
    """

    kind: ClassVar[str] = ""
    """Name of this kind of attention, which the layer's configuration must also name."""
    kinds: ClassVar[dict[str, type[CrossAttention]]] = {}
    """Cross-attention classes by kind."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Options of :class:`AttentionConfig` that have no effect on this kind. If some of them are set, the log names them."""
    uses_blocks: ClassVar[bool] = False
    """Whether the kind divides tokens into blocks."""
    summarizes: ClassVar[bool] = False
    """Whether the kind supports :meth:`summarize`, so that calls can read summaries in place of a context."""

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
        key_value_heads = heads if key_value_heads is None else key_value_heads
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
            context_layout: new layout of the context, with as many axes as the former one; None to keep the former one.
        """
        self.layout = layout
        self.context_layout = self.context_layout if context_layout is None else context_layout
        with torch.inference_mode(False):  # inference tensors could not be used in training later
            self.query_order.fit(self.layout, device)
            self.context_order.fit(self.context_layout, device)

    def forward(
        self,
        x: Tensor,
        context: Tensor | ContextSummaries,
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
            context: context tokens ``[B, Nk, context_dim]``, in raster order, or their summaries from :meth:`summarize`.
                Summaries already contain the mask and the layout of the context.
            mask: mask of visible tokens, ``[B, Nq]`` bool. Outputs of hidden tokens are zero. None if all tokens are visible.
            context_mask: mask of visible context tokens, ``[B, Nk]`` bool. Hidden tokens do not influence the outputs, even if
                they contain NaN. None if all are visible. The attention outputs of a row without visible context are zero.
            start: number of tokens of the sequence before ``x``, for generation piece by piece. Must be 0 unless the
                layout of the queries is a sequence.
            projections: projections of another module, if the layer has none of its own; None to use the layer's own.
            layout: layout of the queries for this call only; None for the layout of the last :meth:`fit`.
            context_layout: layout of the context for this call only; None for the layout of the last :meth:`fit`.

        Returns:
            Outputs in the shape and order of ``x``.

        Raises:
            ValueError: if the number of tokens is zero or does not fit the layout, if ``start`` is negative or not supported by
                the layout, if masks do not fit the tokens, or if tokens and context differ in rows. Summaries are rejected if
                they were computed by a different layer, differ from the queries in rows, heads or widths, or are passed with
                ``context_mask`` or ``context_layout``.
        """
        check_tokens("x", x)
        check_mask("mask", mask, x)
        queries = place("query", self.query_order, layout, x, start)
        projections = self._own_projections() if projections is None else projections
        tokens, visible = queries.enter(x, mask)
        size = (self.layout if layout is None else layout).block_size
        first = 0 if size is None else start // size
        if isinstance(context, ContextSummaries):
            if context_mask is not None or context_layout is not None:
                raise ValueError(
                    "summaries contain the mask and the layout of their context; leave out context_mask and context_layout"
                )
            q = projections.queries(hide_rows(tokens, visible))
            context.check(self, q)
            # The summaries take the place of keys and values, of which there are none.
            nothing = q[:, :0]
            inputs = CrossInputs(q, nothing, nothing, visible, None, queries, context.context, first)
            out = self.attend_summaries(inputs, context)
        else:
            k, v, readable, keys = self._read(context, context_mask, projections, context_layout)
            if context.shape[0] != x.shape[0]:  # not by `len`, which makes the size a constant of an exported graph
                raise ValueError(f"a context of {context.shape[0]} rows does not fit tokens of {x.shape[0]} rows")
            q = projections.queries(hide_rows(tokens, visible))
            out = self.attend(CrossInputs(q, k, v, visible, readable, queries, keys, first))
        out = (out if self.norm is None else self.norm(out)).flatten(2)
        out = apply_gate(out, tokens, self.gate, self.config.gate_activation)
        return queries.leave(hide_rows(projections.merge(out), visible))

    def summarize(
        self,
        context: Tensor,
        context_mask: Tensor | None = None,
        *,
        projections: CrossProjections | None = None,
        context_layout: BlockLayout | None = None,
    ) -> ContextSummaries:
        """Compute the key-value summaries of a context once, for many calls of :meth:`forward` with the same weights.

        Only the kinds mhla and linear support this method.

        Args:
            context: context tokens ``[B, Nk, context_dim]``, in raster order.
            context_mask: mask of visible context tokens, ``[B, Nk]`` bool; None if all are visible.
            projections: projections of another module, if the layer has none of its own; None to use the layer's own.
            context_layout: layout of the context; None for the layout of the last :meth:`fit`.

        Raises:
            ValueError: if the kind has no summaries, the number of tokens does not fit the layout, or the mask does not fit the
                tokens.
        """
        if not self.summarizes:
            raise ValueError(f"cross-attention of kind {self.kind!r} has no summaries; pass the context to each call")
        projections = self._own_projections() if projections is None else projections
        return self.summaries_of(*self._read(context, context_mask, projections, context_layout))

    def _read(
        self,
        context: Tensor,
        mask: Tensor | None,
        projections: CrossProjections,
        layout: BlockLayout | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Placement]:
        """Project a context to keys and values, in block order.

        Args:
            context: context tokens ``[B, Nk, context_dim]``, in raster order.
            mask: mask of visible context tokens, ``[B, Nk]`` bool; None if all are visible.
            projections: projections of the layer.
            layout: layout of the context; None for the layout of the last :meth:`fit`.

        Returns:
            Keys ``[B, Nk, Hkv, Dk]``, values ``[B, Nk, Hkv, Dv]``, their mask ``[B, Nk]`` (None if all are visible), and the
            permutation of the context tokens into block order. If blocks are padded to equal length, Nk includes the padding,
            and the mask hides it.
        """
        check_tokens("context", context)
        check_mask("context_mask", mask, context)
        placement = place("context", self.context_order, layout, context)
        tokens, visible = placement.enter(context, mask)
        # NaN in hidden tokens would spread, because 0 * NaN is NaN
        k, v = projections.context(hide_rows(tokens, visible))
        return k, v, visible, placement

    def attend(self, inputs: CrossInputs) -> Tensor:
        """Compute the attention outputs ``[B, Nq, H, Dv]`` of all queries. Each kind implements this method.

        Args:
            inputs: queries, keys and values, with masks and the partition into blocks.
        """
        raise NotImplementedError

    def summaries_of(self, k: Tensor, v: Tensor, key_mask: Tensor | None, context: Placement) -> ContextSummaries:
        """Compute the key-value summaries of a context. Kinds that support summaries implement this method.

        Args:
            k: keys ``[B, Nk, Hkv, Dk]`` in block order, before the feature map.
            v: values ``[B, Nk, Hkv, Dv]`` in block order.
            key_mask: ``[B, Nk]`` bool, False for hidden context tokens; None if none is hidden.
            context: order and blocks of the context.
        """
        raise NotImplementedError

    def attend_summaries(self, inputs: CrossInputs, summaries: ContextSummaries) -> Tensor:
        """Compute the attention outputs ``[B, Nq, H, Dv]`` of queries that read summaries, in the dtype of the queries.

        Kinds that support summaries implement this method.

        Args:
            inputs: inputs of the call, with empty keys and values, because the summaries replace them.
            summaries: summaries that this layer computed, with as many rows as the queries.
        """
        raise NotImplementedError

    def open_gate(self) -> None:
        """Initialize the gate so that it leaves the output unchanged.

        The layer can then start from weights that were trained without a gate.

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
    """Check that a configuration is valid for a cross-attention layer of a certain kind.

    Args:
        config: configuration of the layer.
        kind: kind that the layer computes, such as ``"mhla"``.

    Raises:
        ValueError: if the configuration names a different kind or a kind without cross-attention, or sets an option that needs
            queries and keys of the same tokens.
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
