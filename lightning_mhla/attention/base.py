"""Base class of the attention kinds: projections, and the modules around the operator.

Longer than other modules, because it holds the complete interface that a kind derives from.
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
"""Epsilon of the RMSNorm of each head's output, as in the paper's public code; torch's default in bfloat16 is 0.008."""

OPEN_GATE = 1.2784645427610738
"""Bias at which SiLU is 1."""


class Attention(LayoutTables):
    """Self-attention over the tokens of a layout: projections, an operator, and the modules around it.

    A kind derives from this class, states its name (``class Mine(Attention, kind="mine")``) and implements
    :meth:`attend`, and :meth:`continue_from` if it can generate. ``Options``, a dataclass, declares options of the kind
    itself. YAML sets them as ``attention: {kind: mine, options: {...}}``, and the layer holds them in ``self.options``.

    Args:
        dim: width of the tokens.
        heads: number of query heads.
        layout: token grid and its blocks.
        config: configuration, see :class:`AttentionConfig`.
        key_value_heads: number of key and value heads, a divisor of ``heads``; None for ``heads``.
        key_width: width of a key; None for ``dim // heads``.
        value_width: width of a value; None for ``dim // heads``.
        bias: whether the projections have a bias.
        causal: whether token t attends to tokens ``j <= t`` only; needs a 1-D grid.
        block_ordered: whether tokens enter and leave in the layout's block order, which the backbone ensures, instead of
            raster order.
        projections: whether the layer has its own projections. If not, :meth:`forward` takes those of a different module,
            and rotary angles with them.

    Raises:
        ValueError: if the configuration has a different kind, widths and heads do not fit, or the layout does not support
            causal attention or rotary positions.
    """

    kinds: ClassVar[dict[str, type[Attention]]] = KINDS
    kind: ClassVar[str | None] = None
    """Name of the kind; the layer's configuration must have the same."""
    Options: ClassVar[type | None] = None
    """Dataclass of the options of the kind itself; None without such options."""
    handles: ClassVar[tuple[str, ...]] = ()
    """Optional inputs that :meth:`attend` supports, as keys of :data:`UNHANDLED`; others raise an error."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Options of :class:`AttentionConfig` that the kind does not use."""
    uses_blocks: ClassVar[bool] = False
    """Whether the layout needs ``block_grid`` or ``block_size``."""
    causal_only: ClassVar[bool] = False
    """Whether the kind cannot attend to later tokens, so that images and video cannot use it."""
    uses_linear_options: ClassVar[bool] = True
    """Whether ``normalize``, ``feature_map`` and ``output_norm`` have the same meaning as for mhla."""
    repeats_heads: ClassVar[bool] = True
    """Whether :meth:`attend` needs as many key heads as query heads."""
    scans: ClassVar[bool] = False
    """Whether the operator is a recurrence over tokens and needs them in raster order, even if ``block_ordered``."""
    always_gated: ClassVar[bool] = False
    """Whether the kind has an output gate even if ``gate`` is off."""
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
        """Switch to tokens of a different layout. Learned parameters stay the same.

        Without projections the tables of a layout are plain attributes instead of buffers, because a copy of the model, such
        as a weight average, may be fitted to different sizes.

        Args:
            layout: layout with as many axes and prefix tokens as the one that the layer was built with.
            device: device of the tokens; None for the CPU.
        """
        self.layout = layout
        with torch.inference_mode(False):  # inference tensors could not be used in training later
            # a scan needs raster order and every other kind block order, so tokens are permuted only if they enter in the other
            moves = not layout.is_raster and self.block_ordered == self.scans
            for name, values in self.tables().items():
                setattr(self, name, values.to(device) if moves or name not in ("order", "inverse") else None)
            if self.lepe is not None:
                self.lepe.fit(self._inner(layout), device)

    @override
    def tables(self) -> dict[str, Tensor]:
        """Return the permutations between the order of the tokens and that of the operator, and an image's rotary angles."""
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
        """Return the layout whose block order is the operator's order: a single block, in raster order, for a scan."""
        return replace(layout, blocks=(1,) * len(layout.grid), block_size=None) if self.scans else layout

    def projected_heads(self) -> tuple[int, int, int]:
        """Return the numbers of query, key and value heads that the projection outputs."""
        return self.heads, self.key_value_heads, self.key_value_heads

    @classmethod
    def options_at(cls, options: dict[str, Any] | None, layer: int) -> dict[str, Any] | None:
        """Return the options of the kind itself for a layer, counted from 0. Kinds override it if options depend on it."""
        return options

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Apply the operator and return ``[B, N, H, Dv]``, tokens in block order.

        Args:
            inputs: inputs of the operator. Optional ones are None unless ``handles`` names them.
        """
        raise NotImplementedError

    def weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the attention matrix ``[B, H, N, N]`` that :meth:`attend` applies to the values, for analysis.

        The default implementation applies :meth:`attend` to one-hot values, so that its output is the matrix. A kind whose
        outputs are not linear in the values has no such matrix.
        """
        batch, tokens, heads, _ = inputs.v.shape
        units = torch.eye(tokens, dtype=inputs.v.dtype, device=inputs.v.device)[None, :, None]
        return self.attend(replace(inputs, v=units.expand(batch, tokens, heads, tokens))).transpose(1, 2)

    def continue_from(self, inputs: AttentionInputs, state: Any, counts: Sequence[int]) -> tuple[Tensor, Any]:
        """Apply causal attention to the next tokens of every row.

        Args:
            inputs: inputs of the next tokens. Tokens of a row beyond its count are padding on the right.
            state: state after the previous tokens, modified in place and not to be used again; None at the start. It has
                ``lengths`` (number of previous tokens in each row), ``bytes`` and ``select(rows)``.
            counts: number of tokens in each row without padding.

        Returns:
            Outputs ``[B, N, H, Dv]``, and the state after these tokens.
        """
        raise NotImplementedError

    def operator_flops(self, tokens: int) -> float:
        """Count the floating-point operations of :meth:`attend` on one sequence of ``tokens``, two for each multiply-add."""
        raise NotImplementedError(f"the operations of {type(self).__name__} are not counted")

    def flops(self, tokens: int) -> float:
        """Count the floating-point operations of the forward pass on one sequence of ``tokens``, with projections."""
        projections = [module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear)]
        return 2.0 * tokens * sum(projections) + self.operator_flops(tokens)

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens of the longest supported sequence; None for any length."""
        return None if self.causal else self.layout.num_tokens

    def extend(self, tokens: int) -> None:
        """Extend a causal layer to sequences of ``tokens`` tokens. Its outputs for shorter sequences stay the same."""
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
        """Apply the layer to tokens ``[B, N, dim]``; the output has the same shape.

        Args:
            x: tokens, in raster order unless ``block_ordered``.
            key_mask: mask of visible tokens, ``[B, N]`` bool, in the order of ``x``. Hidden tokens do not influence others,
                whatever they hold, and their outputs are zero. None without a mask.
            rotary: rotary angles of the tokens, in the order of ``x``; None for positions counted from 0 (see
                :func:`lightning_mhla.attention.positions.rotary_angles`). Images always use
                :func:`lightning_mhla.attention.positions.grid_angles`.
            cu_seqlens: first token of each sequence packed into the row (B = 1), followed by N; causal attention only.
            projections: projections to use if the layer has none of its own.
            share: part of a sequence that these tokens are, if processes share the sequence; causal attention only.
            layout: layout of these tokens. It does not change the layer, so that graphs can use it, in which :meth:`fit`
                would be a side effect. None for the layout of the last :meth:`fit`.

        Raises:
            ValueError: if the number of tokens does not fit the layout, or the kind does not support an input.
        """
        placement = None if layout is None else self._place(layout, x.device)
        raster = x
        if share is None:
            x, key_mask = self._enter(x, key_mask, packed=cu_seqlens is not None, placement=placement)
            x = hide_rows(x, key_mask)  # NaN in hidden tokens would otherwise spread, because 0 * NaN is NaN
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
        """Compute the permutation of a layout's tokens, without empty slots for kinds that do not support a mask."""
        if not self.uses_blocks:
            return Placement(layout, None, None, {})
        return layout.place(device, gaps="key_mask" in self.handles)

    def _split(
        self, x: Tensor, raster: Tensor, order: Tensor | None, projections: Projections | None
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return queries, keys and values in block order, and the function that merges the heads."""
        if projections is None:
            return *self._project(x), self._merge
        if order is None or not projections.in_raster:
            return *projections.split(x), projections.merge
        # the surrounding module may treat tokens by position, so it projects them in its own order; permute the results
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
        """Collect the inputs of :meth:`attend`, and raise ValueError for those that the kind does not support."""
        given = {"key_mask": key_mask, "rotary": rotary, "cu_seqlens": cu_seqlens, "share": share}
        self.require(*(name for name, value in given.items() if value is not None))
        k, v = self._repeated(k, v)
        return AttentionInputs(x, q, k, v, key_mask, rotary, cu_seqlens, share, placement)

    def require(self, *names: str) -> None:
        """Check that the kind supports optional inputs or generation.

        Args:
            *names: keys of :data:`UNHANDLED`: optional inputs, or ``"state"`` for generation.

        Raises:
            ValueError: if the kind does not support one of them.
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
        """Apply causal attention to the next tokens of every row.

        Args:
            x: tokens ``[B, N, dim]``. Tokens of a row beyond its count are padding on the right.
            state: state after the previous tokens, see :meth:`continue_from`; None at the start.
            counts: number of tokens in each row without padding.
            rotary: rotary angles of these tokens; None for positions that follow those of the state.
            projections: projections to use if the layer has none of its own.

        Returns:
            Outputs ``[B, N, dim]``, and the state after these tokens.

        Raises:
            ValueError: if the kind cannot generate, or the layer is not causal.
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
        """Compute the attention weights ``[B, H, N, N]``, rows and columns in the order of ``x``.

        Arguments are those of :meth:`forward`.
        """
        raster = x
        x, key_mask = self._enter(x, key_mask)
        x = hide_rows(x, key_mask)
        q, k, v, _ = self._split(x, raster, self.order, projections)
        weights = self.weights(self._inputs(x, q, k, v, key_mask, self._rotary(rotary, x, order=self.order)))
        if self.inverse is None:
            return weights
        return weights.index_select(2, self.inverse).index_select(3, self.inverse)

    def angles(self, positions: Tensor) -> Rotary:
        """Compute the rotary angles of this layer for tokens at ``positions``, ``[N]`` or ``[B, N]``."""
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
            cos, sin = self.cos.to(x.device), self.sin.to(x.device)  # the tables of a model on the meta device are real
            return Rotary(cos, sin, interleaved=True)
        if given is not None:
            return given if order is None else given.select(order)
        return self.angles(start + sequence_positions(x, cu_seqlens))

    @torch.no_grad()
    def open_gate(self) -> None:
        """Initialize gate and ``lepe`` so that they do not change the output, for weights that were trained without them.

        Raises:
            ValueError: if the gate has no bias.
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
        """Apply norm, ``lepe`` and gate to the operator's output and return ``[B, N, H * Dv]``."""
        if self.norm is not None:
            out = self.norm(out)
        out = self._with_lepe(out, v, key_mask, placement)
        if self.gate is None:
            return out
        gate = self.gate(x)
        return out * (gate if self.config.gate_activation == "identity" else F.silu(gate))

    def _with_lepe(self, out: Tensor, v: Tensor, key_mask: Tensor | None, placement: Placement | None = None) -> Tensor:
        """Merge the heads into ``[B, N, H * Dv]`` and add the convolution of the values, if the layer has one."""
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
        if not packed and placement is None:  # the operator checks the length of each packed sequence
            self._check_length(x.shape[1])
        if order is None:
            return x, key_mask
        x, key_mask = x.index_select(1, order), key_mask if key_mask is None else key_mask.index_select(1, order)
        if placement is None or placement.filled is None:
            return x, key_mask
        # index_select put some token into every empty slot; the mask hides it
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
        """Repeat keys and values to the number of query heads, if the kind needs it (``repeats_heads``)."""
        repeats = self.heads // self.key_value_heads
        if repeats == 1 or not self.repeats_heads:
            return k, v
        return k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)


def build_attention(config: AttentionConfig, dim: int, heads: int, layout: BlockLayout, **options: Any) -> Attention:
    """Build the attention layer that ``config.kind`` names; ``options`` are keyword arguments of :class:`Attention`."""
    return Attention.kinds[config.kind](dim, heads, layout, config, **options)
