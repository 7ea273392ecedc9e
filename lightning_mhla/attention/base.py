"""The base of every attention kind: projections, and the modules around the operator.

Longer than other modules: it is the one interface that a kind derives from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.attention.config import KINDS, AttentionConfig, report_unused
from lightning_mhla.attention.inputs import UNHANDLED, AttentionInputs, Projections
from lightning_mhla.attention.layout import BlockLayout, LayoutTables, Placement
from lightning_mhla.attention.lepe import LocalPositionalEncoding, hide_rows
from lightning_mhla.attention.positions import Rotary, grid_angles, next_positions, rotary_angles, sequence_positions
from lightning_mhla.attention.sequence import SequenceShare

OUTPUT_NORM_EPS = 1e-6
"""Of the RMSNorm of each head's output (the paper's public code); in bfloat16 torch's own would be 0.008."""

OPEN_GATE = 1.2784645427610738
"""Bias at which SiLU is 1."""


class Attention(LayoutTables):
    """Self-attention over the tokens of a layout: projections, an operator, and the modules around it.

    A kind derives from this class, gives its name (``class Mine(Attention, kind="mine")``) and implements
    :meth:`attend`, and :meth:`continue_from` if it can generate. ``Options``, a dataclass, gives it options of its own:
    ``attention: {kind: mine, options: {...}}`` in YAML, ``self.options`` here.

    Args:
        dim: width of the tokens.
        heads: number of query heads.
        layout: token grid and its blocks.
        config: see :class:`AttentionConfig`.
        key_value_heads: number of key and value heads, a divisor of ``heads``; None for as many.
        key_width: width of a key, ``dim // heads`` if None.
        value_width: width of a value, ``dim // heads`` if None.
        bias: whether the projections have a bias.
        causal: whether token t attends to tokens ``j <= t`` only; 1-D grids.
        block_ordered: tokens come and go in the layout's block order (the backbone sees to it) instead of raster order.
        projections: False leaves them out: :meth:`forward` is then given those of another module, and rotary angles too.
    """

    kinds: ClassVar[dict[str, type[Attention]]] = KINDS
    kind: ClassVar[str | None] = None
    """Name of the kind, which the layer's configuration must have too."""
    Options: ClassVar[type | None] = None
    """Dataclass of the kind's own options."""
    handles: ClassVar[tuple[str, ...]] = ()
    """Optional inputs that :meth:`attend` uses, names of :data:`UNHANDLED`; others are errors."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Options of :class:`AttentionConfig` that the kind does not use."""
    uses_blocks: ClassVar[bool] = False
    """Whether the layout needs ``block_grid`` or ``block_size``."""
    causal_only: ClassVar[bool] = False
    """Whether the kind cannot attend to later tokens, so that images and video cannot use it."""
    uses_linear_options: ClassVar[bool] = True
    """Whether ``normalize``, ``feature_map`` and ``output_norm`` mean what they mean to mhla."""
    repeats_heads: ClassVar[bool] = True
    """Whether :meth:`attend` wants as many key heads as query heads."""
    scans: ClassVar[bool] = False
    """Whether the operator reads tokens one after the other: it is given them in raster order, whatever order they come in."""
    always_gated: ClassVar[bool] = False
    """Whether the kind has an output gate by itself, whatever ``gate`` says."""
    options: Any
    order: Tensor | None
    inverse: Tensor | None
    cos: Tensor
    sin: Tensor

    def __init_subclass__(cls, kind: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if kind is not None:
            cls.kind = kind
            KINDS[kind] = cls

    def __init__(
        self,
        dim: int,
        heads: int,
        layout: BlockLayout,
        config: AttentionConfig,
        *,
        key_value_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        bias: bool = True,
        causal: bool = False,
        block_ordered: bool = False,
        projections: bool = True,
    ) -> None:
        super().__init__()
        if self.kind not in (None, config.kind):
            raise ValueError(
                f"{type(self).__name__} computes attention kind {self.kind!r}, but its configuration has kind "
                f"{config.kind!r}; build_attention builds the layer that a configuration names"
            )
        key_value_heads = key_value_heads or heads
        if heads % key_value_heads:
            raise ValueError(f"key_value_heads={key_value_heads} must divide heads={heads}")
        if (key_width is None or value_width is None) and dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}; give key_width and value_width")
        if self.causal_only and not causal:
            raise ValueError(f"attention kind {config.kind!r} is causal only: use it for sequences, or choose another")
        if causal and (len(layout.grid) != 1 or layout.prefix_tokens):
            raise ValueError(f"causal attention needs a 1-D grid without prefix tokens, not {layout}")
        if causal and config.lepe:
            raise ValueError("lepe sees later tokens too; leave it out of causal attention")
        report_unused(config, [name for name in self.unused if projections or name != "rotary"])
        self.config, self.causal, self.block_ordered = config, causal, block_ordered
        self.projects = projections
        self.rotary = config.rotary and not (projections and "rotary" in self.unused)
        if self.rotary and projections and (len(layout.grid) > 2 or layout.prefix_tokens):
            raise ValueError(f"rotary positions are those of a 1-D or 2-D grid without prefix tokens, not of {layout}")
        self.turns_by_grid = self.rotary and projections and len(layout.grid) == 2
        self.options = self.Options(**config.options or {}) if self.Options is not None else None
        self.heads, self.key_value_heads = heads, key_value_heads
        self.key_width, self.value_width = key_width or dim // heads, value_width or dim // heads
        widths = (self.key_width, self.key_width, self.value_width)
        self.sections = [count * width for count, width in zip(self.projected_heads(), widths, strict=True)]
        inner = heads * self.value_width
        self.qkv = nn.Linear(dim, sum(self.sections), bias=bias) if projections else None
        self.proj = nn.Linear(inner, dim, bias=bias) if projections else None
        self.gate = nn.Linear(dim, inner, bias=bias) if config.gate or self.always_gated else None
        norm = config.output_norm if config.output_norm is not None else not config.normalize
        self.norm = nn.RMSNorm(self.value_width, OUTPUT_NORM_EPS) if norm and self.uses_linear_options else None
        self.lepe = (
            LocalPositionalEncoding(self._inner(layout), inner, config.lepe, projections) if config.lepe else None
        )
        if projections:
            for name in ("order", "inverse", *(("cos", "sin") if self.turns_by_grid else ())):
                self.register_buffer(name, None, persistent=False)
        self.fit(layout)

    @override
    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}, layout={self.layout}"

    def fit(self, layout: BlockLayout, device: torch.device | None = None) -> None:
        """Take tokens of another layout from now on; what is learned stays as it is.

        Without projections the tables of a layout are no buffers: a copy of the model (a weight average, say) may have
        seen other sizes.

        Args:
            layout: as many axes and prefix tokens as the layer was made with.
            device: device of the tokens.
        """
        self.layout = layout
        with torch.inference_mode(False):  # or training could not use a layout that sampling saw first
            moves = not layout.is_raster and self.block_ordered == self.scans
            for name, values in self.tables().items():
                setattr(self, name, values.to(device) if moves or name not in ("order", "inverse") else None)
            if self.lepe is not None:
                self.lepe.fit(self._inner(layout), device)

    @override
    def tables(self) -> dict[str, Tensor]:
        """Return permutations from the order of the tokens to that of the operator and back, and angles of an image."""
        there, back = self.layout.order, self.layout.inverse
        orders = {"order": back, "inverse": there} if self.scans else {"order": there, "inverse": back}
        if not self.turns_by_grid:
            return orders
        height, width = self.layout.grid
        angles = grid_angles((height, width), self.key_width, self.config.rotary_base).select(
            self._inner(self.layout).order
        )
        return {**orders, "cos": angles.cos, "sin": angles.sin}

    def _inner(self, layout: BlockLayout) -> BlockLayout:
        """The layout in whose order the operator has its tokens."""
        return replace(layout, blocks=(1,) * len(layout.grid), block_size=None) if self.scans else layout

    def projected_heads(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values, as they are projected."""
        return self.heads, self.key_value_heads, self.key_value_heads

    @classmethod
    def options_at(cls, options: dict[str, Any] | None, layer: int) -> dict[str, Any] | None:
        """The kind's own options in a layer of this number, for options that depend on it."""
        return options

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """The operator, tokens in block order; ``[B, N, H, Dv]``.

        Args:
            inputs: see :class:`AttentionInputs`; of the optional ones, those that ``handles`` names may be there.
        """
        raise NotImplementedError

    def weights(self, inputs: AttentionInputs) -> Tensor:
        """Attention matrix ``[B, H, N, N]`` that :meth:`attend` applies to the values, for analysis.

        By default, :meth:`attend` is applied to one-hot values; its output is the matrix. A kind whose outputs are not
        linear in the values has no such matrix.
        """
        batch, tokens, heads, _ = inputs.v.shape
        units = torch.eye(tokens, dtype=inputs.v.dtype, device=inputs.v.device)[None, :, None]
        return self.attend(replace(inputs, v=units.expand(batch, tokens, heads, tokens))).transpose(1, 2)

    def continue_from(self, inputs: AttentionInputs, state: Any, counts: Sequence[int]) -> tuple[Tensor, Any]:
        """Causal attention of the next tokens of every row, and the state after them.

        Args:
            inputs: the next tokens; whatever a row has beyond its count is padding at its right.
            state: state after the tokens so far, modified in place (do not use it again); None at the start. It has
                ``lengths``, tokens so far in each row, ``bytes`` and ``select(rows)``.
            counts: number of real tokens in each row.
        """
        raise NotImplementedError

    def operator_flops(self, tokens: int) -> float:
        """Floating-point operations of :meth:`attend` on one sequence of ``tokens``: two for each multiply-add."""
        raise NotImplementedError(f"the operations of {type(self).__name__} are not counted")

    def flops(self, tokens: int) -> float:
        """Floating-point operations of the forward pass on one sequence of ``tokens``, projections included."""
        projections = [module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear)]
        return 2.0 * tokens * sum(projections) + self.operator_flops(tokens)

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest sequence; None for sequences of any length."""
        return None if self.causal else self.layout.num_tokens

    def extend(self, tokens: int) -> None:
        """Let a causal layer take sequences of ``tokens`` tokens; what it does on shorter ones stays the same."""
        assert self.causal
        self.layout = BlockLayout((tokens,), block_size=self.layout.block_size or tokens)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        rotary: Rotary | None = None,
        cu_seqlens: Sequence[int] | None = None,
        projections: Projections | None = None,
        share: SequenceShare | None = None,
        layout: BlockLayout | None = None,
    ) -> Tensor:
        """Tokens ``[B, N, dim]`` to the same shape.

        Args:
            x: tokens, in raster order unless ``block_ordered``.
            key_mask: ``[B, N]`` bool, in the same order; False tokens are not seen, whatever they hold, and get zeros.
            rotary: cosine and sine of the angles that ``config.rotary`` turns by, in the same order; None for those of
                tokens counted from 0 (see :func:`lightning_mhla.attention.positions.rotary_angles`). Images have their own
                (:func:`lightning_mhla.attention.positions.grid_angles`).
            cu_seqlens: causal: first token of each of the sequences that are packed in the one row (B = 1), and N.
            projections: those to use, where the layer has none of its own.
            share: causal: N tokens here are a part of a sequence, of which other processes hold the rest.
            layout: layout of these tokens alone, which changes nothing in the layer: in graphs, where :meth:`fit` would be a
                side effect. None for that of the last :meth:`fit`.
        """
        placement = None if layout is None else self._place(layout, x.device)
        raster = x
        if share is None:
            x, key_mask = self._enter(x, key_mask, packed=cu_seqlens is not None, placement=placement)
            x = hide_rows(x, key_mask)
        elif not self.causal or key_mask is not None or cu_seqlens is not None:
            raise ValueError("a sequence spread over processes is causal, without padding and not packed")
        else:
            self._check_length(share.tokens)
        order, inverse = (self.order, self.inverse) if placement is None else (placement.order, placement.inverse)
        q, k, v, merge = self._split(x, raster, order, projections)
        rotary = self._rotary(rotary, x, cu_seqlens, 0 if share is None else share.start, order)
        out = self.attend(self._inputs(x, q, k, v, key_mask, rotary, cu_seqlens, share, placement))
        out = hide_rows(merge(self._around(out, x, v, key_mask, placement)), key_mask)
        return out if inverse is None else out.index_select(1, inverse)

    def _place(self, layout: BlockLayout, device: torch.device) -> Placement:
        """Places of the tokens of a layout; kinds that have to see every token get none that is empty."""
        if not self.uses_blocks:
            return Placement(layout, None, None, {})
        return layout.place(device, gaps="key_mask" in self.handles)

    def _split(
        self, x: Tensor, raster: Tensor, order: Tensor | None, projections: Projections | None
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Queries, keys and values in block order, and the function that merges them."""
        if projections is None:
            return *self._project(x), self._merge
        if order is None or not projections.in_raster:
            return *projections.split(x), projections.merge
        q, k, v = (heads.index_select(1, order) for heads in projections.split(raster))
        return q, k, v, projections.merge

    def _inputs(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        rotary: Rotary | None = None,
        cu_seqlens: Sequence[int] | None = None,
        share: SequenceShare | None = None,
        placement: Placement | None = None,
    ) -> AttentionInputs:
        """Inputs of the kind; raises ValueError for those that it does not handle."""
        given = {"key_mask": key_mask, "rotary": rotary, "cu_seqlens": cu_seqlens, "share": share}
        self.require(*(name for name, value in given.items() if value is not None))
        k, v = self._repeated(k, v)
        return AttentionInputs(x, q, k, v, key_mask, rotary, cu_seqlens, share, placement)

    def require(self, *names: str) -> None:
        """Raise ValueError for what a layer of this kind cannot do.

        Args:
            names: keys of :data:`UNHANDLED`: optional inputs, or ``"state"`` for generation.
        """
        for name in names:
            able = type(self).continue_from is not Attention.continue_from if name == "state" else name in self.handles
            if not able:
                raise ValueError(f"attention kind {self.config.kind!r} {UNHANDLED[name]}")

    def next_tokens(
        self,
        x: Tensor,
        state: Any,
        counts: Sequence[int],
        rotary: Rotary | None = None,
        projections: Projections | None = None,
    ) -> tuple[Tensor, Any]:
        """The next tokens ``[B, N, dim]`` of every row, causal, to the same shape, and the state after them.

        Args:
            x: tokens; whatever a row has beyond its count is padding at its right.
            state: as for :meth:`continue_from`, like the rest.
            counts: see there.
            rotary: angles of these tokens, None for those that follow the state's.
            projections: as for :meth:`forward`.
        """
        self.require("state")
        if not self.causal:
            raise ValueError("only causal attention generates token by token; build the layer with causal=True")
        q, k, v, merge = self._split(x, x, None, projections)
        if not self.rotary:
            rotary = None
        elif rotary is None:
            rotary = self.angles(next_positions(() if state is None else state.lengths, x))
        out, state = self.continue_from(self._inputs(x, q, k, v, rotary=rotary), state, counts)
        return merge(self._around(out, x, v, None)), state

    def attention_matrix(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        rotary: Rotary | None = None,
        projections: Projections | None = None,
    ) -> Tensor:
        """Attention weights ``[B, H, N, N]`` for what :meth:`forward` is given; rows and columns in the order of ``x``."""
        raster = x
        x, key_mask = self._enter(x, key_mask)
        x = hide_rows(x, key_mask)
        q, k, v, _ = self._split(x, raster, self.order, projections)
        weights = self.weights(self._inputs(x, q, k, v, key_mask, self._rotary(rotary, x, order=self.order)))
        if self.inverse is None:
            return weights
        return weights.index_select(2, self.inverse).index_select(3, self.inverse)

    def angles(self, positions: Tensor) -> Rotary:
        """Rotary angles of this layer for tokens at ``positions`` ``[N]`` or ``[B, N]``."""
        return rotary_angles(positions, self.key_width, self.config.rotary_base)

    def _rotary(
        self,
        given: Rotary | None,
        x: Tensor,
        cu_seqlens: Sequence[int] | None = None,
        start: int = 0,
        order: Tensor | None = None,
    ) -> Rotary | None:
        if not self.rotary:
            return None
        if self.turns_by_grid:
            cos, sin = self.cos.to(x.device), self.sin.to(x.device)  # a model on the meta device has real tables
            return Rotary(cos, sin, interleaved=True)
        if given is not None:
            return given if order is None else given.select(order)
        return self.angles(start + sequence_positions(x, cu_seqlens))

    @torch.no_grad()
    def open_gate(self) -> None:
        """Let gate and ``lepe`` start as if they were not there: for weights that were trained without them.

        Raises:
            ValueError: for a gate without bias, which cannot.
        """
        if self.lepe is not None:
            for parameter in self.lepe.parameters():
                nn.init.zeros_(parameter)
        if self.gate is not None:
            if self.gate.bias is None:
                raise ValueError("weights without a gate cannot start a layer whose gate has no bias; set gate: false")
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, 1.0 if self.config.gate_activation == "identity" else OPEN_GATE)

    def _around(
        self, out: Tensor, x: Tensor, v: Tensor, key_mask: Tensor | None, placement: Placement | None = None
    ) -> Tensor:
        """``[B, N, H * Dv]`` after norm, ``lepe`` and gate."""
        if self.norm is not None:
            out = self.norm(out)
        out = self._with_lepe(out, v, key_mask, placement)
        if self.gate is None:
            return out
        gate = self.gate(x)
        return out * (gate if self.config.gate_activation == "identity" else F.silu(gate))

    def _with_lepe(self, out: Tensor, v: Tensor, key_mask: Tensor | None, placement: Placement | None = None) -> Tensor:
        """``[B, N, H * Dv]``, with the convolution of the values where there is one."""
        if self.lepe is None:
            return out.flatten(2)
        values = v.repeat_interleave(self.heads // v.shape[2], 2).flatten(2)
        return out.flatten(2) + self.lepe(values, key_mask, placement)

    def _enter(
        self, x: Tensor, key_mask: Tensor | None, packed: bool = False, placement: Placement | None = None
    ) -> tuple[Tensor, Tensor | None]:
        layout, order = (self.layout, self.order) if placement is None else (placement.layout, placement.order)
        if not self.causal and x.shape[1] != layout.num_tokens:
            raise ValueError(f"{x.shape[1]} tokens for a layout of {layout.num_tokens} ({layout})")
        if not packed and placement is None:  # the operator checks each packed sequence
            self._check_length(x.shape[1])
        if order is None:
            return x, key_mask
        x, key_mask = x.index_select(1, order), key_mask if key_mask is None else key_mask.index_select(1, order)
        if placement is None or placement.filled is None:
            return x, key_mask
        filled = placement.filled.expand(x.shape[:2])
        return x, filled if key_mask is None else key_mask & filled

    def _check_length(self, tokens: int) -> None:
        limit = self.max_tokens
        if limit is not None and tokens > limit:
            raise ValueError(
                f"{tokens} tokens are more than the {limit} of the layer's mixing coefficients; extend the model "
                f"(its method extend), or train with mixing: exponential, which takes any length"
            )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.qkv is not None, "a layer without projections is given those of another module"
        q, k, v = self.qkv(x).split(self.sections, dim=-1)
        q, k = (tensor.unflatten(-1, (-1, self.key_width)) for tensor in (q, k))
        return q, k, v.unflatten(-1, (-1, self.value_width))

    def _merge(self, out: Tensor) -> Tensor:
        assert self.proj is not None, "a layer without projections is given those of another module"
        return self.proj(out)

    def _repeated(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values for every query head, where the kind wants them so."""
        repeats = self.heads // self.key_value_heads
        if repeats == 1 or not self.repeats_heads:
            return k, v
        return k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)


def build_attention(config: AttentionConfig, dim: int, heads: int, layout: BlockLayout, **options: Any) -> Attention:
    """The attention module that ``config.kind`` names; ``options`` as for :class:`Attention`."""
    return Attention.kinds[config.kind](dim, heads, layout, config, **options)
