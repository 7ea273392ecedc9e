"""What every attention kind shares: configuration, projections, and the modules around the operator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mhla.attention.lepe import LocalPositionalEncoding, hide_rows
from lightning_mhla.layout import BlockLayout, LayoutTables
from lightning_mhla.positions import Rotary, rotary_angles, sequence_positions
from lightning_mhla.sequence import SequenceShare

log = logging.getLogger(__name__)

FeatureMap = Literal["relu", "elu", "softplus", "identity"]

OUTPUT_NORM_EPS = 1e-6
"""Of the RMSNorm of each head's output (the paper's public code); in bfloat16 torch's own would be 0.008."""

OPEN_GATE = 1.2784645427610738
"""Bias at which SiLU is 1."""

CHOICES = {
    "mixing": ("dense", "exponential"),
    "mixing_init": ("locality", "uniform"),
    "feature_map": get_args(FeatureMap),
}
"""Options of :class:`AttentionConfig` that are one of a few words."""


@dataclass
class AttentionConfig:
    """Which attention a model uses; the same keys in every domain.

    Args:
        kind: mhla (mixed block summaries), linear (one summary of all tokens) or softmax.
        block_grid: number of blocks along each axis of the token grid (images, video).
        block_size: tokens in a block (sequences). One of block_grid and block_size; only mhla uses them.
        mixing: how the mixing coefficients are parametrised. dense is one free coefficient for each pair of blocks,
            exponential a sum of exponentials of their distance, at a cost that is linear in the number of blocks.
        mixing_terms: number of exponentials.
        mixing_init: how they start. locality gives near blocks more weight, uniform gives all the same.
        mixing_per_head: whether every head has coefficients of its own.
        mixing_trainable: whether they are learned.
        normalize: whether the weights of a query are divided by their sum (mhla, linear).
        feature_map: applied to queries and keys (mhla, linear). relu and elu are relu(x) + 1e-6 and elu(x) + 1.
        lepe: width of the depthwise convolution of the values that is added to the output, odd; 0 for none.
        rotary: whether queries and keys are turned by their position, after the feature map; sequences. It makes features
            signed, so mhla and linear need normalize off.
        rotary_base: of the geometric series of rotary frequencies.
        gate: whether the output is multiplied by SiLU of a projection of the input.
        output_norm: whether each head's output passes an RMSNorm; null for exactly where normalize is off.
    """

    kind: str = "mhla"
    block_grid: list[int] | None = None
    block_size: int | None = None
    mixing: Literal["dense", "exponential"] = "dense"
    mixing_terms: int = 4
    mixing_init: Literal["locality", "uniform"] = "locality"
    mixing_per_head: bool = False
    mixing_trainable: bool = True
    normalize: bool = True
    feature_map: FeatureMap = "relu"
    lepe: int = 0
    rotary: bool = False
    rotary_base: float = 10_000.0
    gate: bool = False
    output_norm: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in Attention.kinds:
            close = get_close_matches(str(self.kind), Attention.kinds, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"attention kind {self.kind!r} is not one of {sorted(Attention.kinds)}{hint}")
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                close = get_close_matches(str(value), allowed, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}{hint}")
        if self.mixing_terms < 1:
            raise ValueError(f"mixing_terms={self.mixing_terms} must be positive")
        for name in ("block_grid", "block_size"):
            value = getattr(self, name)
            if value is not None and min(value if isinstance(value, Sequence) else [value]) < 1:
                raise ValueError(f"{name}={value} must be positive")
        if self.block_grid is not None and self.block_size is not None:
            raise ValueError("give block_grid or block_size, not both")
        if self.lepe < 0 or (self.lepe and self.lepe % 2 == 0):
            raise ValueError(f"lepe={self.lepe} must be an odd width, or 0 for none")
        if self.normalize and self.feature_map == "identity" and self.kind != "softmax":
            raise ValueError("normalize wants nonnegative queries and keys; feature_map 'identity' does not give them")
        if self.normalize and self.rotary and self.kind != "softmax":
            raise ValueError(
                "normalize wants nonnegative queries and keys, and rotary turns them; set normalize: false"
            )


class Projections(NamedTuple):
    """What turns tokens into queries, keys and values and back, where another module owns it; see :mod:`lightning_mhla.swap`.

    Attributes:
        split: tokens ``[B, N, dim]`` to q ``[B, N, H, Dk]``, k ``[B, N, Hkv, Dk]`` and v ``[B, N, Hkv, Dv]``.
        merge: ``[B, N, H * Dv]`` to tokens.
    """

    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    merge: Callable[[Tensor], Tensor]


class Attention(LayoutTables):
    """Self-attention over the tokens of a layout: projections, an operator, and the modules around it.

    A kind derives from this class, gives its name (``class Mine(Attention, kind="mine")``) and implements
    :meth:`attend` and :meth:`weights`, and :meth:`continue_from` if it can generate.

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

    kinds: ClassVar[dict[str, type[Attention]]] = {}
    unused: ClassVar[tuple[str, ...]] = ()
    """Options of :class:`AttentionConfig` that the kind does not look at."""
    uses_blocks: ClassVar[bool] = False
    uses_linear_options: ClassVar[bool] = True
    repeats_heads: ClassVar[bool] = True
    order: Tensor | None
    inverse: Tensor | None

    def __init_subclass__(cls, kind: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if kind is not None:
            Attention.kinds[kind] = cls

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
        key_value_heads = key_value_heads or heads
        if heads % key_value_heads:
            raise ValueError(f"key_value_heads={key_value_heads} must divide heads={heads}")
        if (key_width is None or value_width is None) and dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}; give key_width and value_width")
        if causal and (len(layout.grid) != 1 or layout.prefix_tokens):
            raise ValueError(f"causal attention needs a 1-D grid without prefix tokens, not {layout}")
        if causal and config.lepe:
            raise ValueError("lepe looks at later tokens too; leave it out of causal attention")
        if config.rotary and projections and (len(layout.grid) != 1 or layout.prefix_tokens):
            raise ValueError(f"rotary positions are those of a 1-D grid without prefix tokens, not of {layout}")
        given = [f.name for f in fields(config) if f.name in self.unused and getattr(config, f.name) != f.default]
        _report_unused(config.kind, tuple(given))
        self.config, self.causal, self.block_ordered = config, causal, block_ordered
        self.heads, self.key_value_heads = heads, key_value_heads
        self.key_width, self.value_width = key_width or dim // heads, value_width or dim // heads
        self.sections = [heads * self.key_width, key_value_heads * self.key_width, key_value_heads * self.value_width]
        inner = heads * self.value_width
        self.qkv = nn.Linear(dim, sum(self.sections), bias=bias) if projections else None
        self.proj = nn.Linear(inner, dim, bias=bias) if projections else None
        self.gate = nn.Linear(dim, inner, bias=bias) if config.gate else None
        norm = config.output_norm if config.output_norm is not None else not config.normalize
        self.norm = nn.RMSNorm(self.value_width, OUTPUT_NORM_EPS) if norm and self.uses_linear_options else None
        self.lepe = LocalPositionalEncoding(layout, inner, config.lepe, projections) if config.lepe else None
        if projections:
            self.register_buffer("order", None, persistent=False)
            self.register_buffer("inverse", None, persistent=False)
        self.fit(layout)

    def fit(self, layout: BlockLayout, device: torch.device | None = None) -> None:
        """Take tokens of another layout from now on; what is learned stays as it is.

        Without projections the tables of a layout are no buffers: a copy of the model (a weight average, say) may have
        seen other sizes.

        Args:
            layout: as many axes and prefix tokens as the layer was made with.
            device: where tokens are.
        """
        self.layout = layout
        with torch.inference_mode(False):  # or training could not use a layout that sampling saw first
            moves = not (self.block_ordered or layout.is_raster)
            self.order = layout.order.to(device) if moves else None
            self.inverse = layout.inverse.to(device) if moves else None
            if self.lepe is not None:
                self.lepe.fit(layout, device)

    def tables(self) -> dict[str, Tensor]:
        """See :class:`LayoutTables`."""
        return {"order": self.layout.order, "inverse": self.layout.inverse}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        rotary: Rotary | None = None,
        cu_seqlens: Sequence[int] | None = None,
    ) -> Tensor:
        """The operator, tokens in block order.

        Args:
            q: ``[B, N, H, Dk]``, not mapped.
            k: ``[B, N, H, Dk]``, likewise. Fewer heads where the kind does not want them repeated (``repeats_heads``).
            v: ``[B, N, H, Dv]``, likewise.
            key_mask: ``[B, N]`` bool, or None.
            rotary: angles that q and k turn by, None for none. A kind that does not know positions leaves it out.
            cu_seqlens: see :meth:`forward`. A kind that does not pack sequences leaves it out.

        Returns:
            ``[B, N, H, Dv]``.
        """
        raise NotImplementedError

    def attend_shared(
        self, q: Tensor, k: Tensor, v: Tensor, share: SequenceShare, rotary: Rotary | None = None
    ) -> Tensor:
        """:meth:`attend`, causal, of a sequence that is spread over processes, each of which calls it.

        Args:
            q: ``[B, n, H, Dk]``, of this process's n tokens, like the rest.
            k: see :meth:`attend`.
            v: see :meth:`attend`.
            share: which tokens these are.
            rotary: angles of these tokens.
        """
        raise NotImplementedError(
            f"attention kind of {type(self).__name__} cannot share a sequence with other processes"
        )

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rotary: Rotary | None = None) -> Tensor:
        """Attention matrix ``[B, H, N, N]`` that :meth:`attend` applies, for analysis."""
        raise NotImplementedError

    def continue_from(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, counts: Sequence[int], rotary: Rotary | None = None
    ) -> tuple[Tensor, Any]:
        """Causal attention of the next tokens of every row, and the state after them; arguments as for :meth:`attend`.

        Args:
            q: ``[B, N, H, Dk]``, and so on.
            k: see :meth:`attend`.
            v: see :meth:`attend`.
            state: of the tokens so far, which is taken over and must not be used again; None for none. It has
                ``lengths``, tokens so far in each row, ``bytes`` and ``select(rows)``.
            counts: how many of the N tokens of each row are real; the others are at its right.
            rotary: see :meth:`attend`.
        """
        raise NotImplementedError(f"attention kind of {type(self).__name__} cannot generate")

    def operator_flops(self, tokens: int) -> float:
        """Floating-point operations of :meth:`attend` on one sequence of ``tokens``: two for each multiply-add."""
        raise NotImplementedError(f"the operations of {type(self).__name__} are not counted")

    def flops(self, tokens: int) -> float:
        """Floating-point operations of the forward pass on one sequence of ``tokens``, projections included."""
        projections = [each.weight.numel() for each in (self.qkv, self.proj, self.gate) if each is not None]
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
    ) -> Tensor:
        """Tokens ``[B, N, dim]`` to the same shape.

        Args:
            x: tokens, in raster order unless ``block_ordered``.
            key_mask: ``[B, N]`` bool, in the same order; False tokens are not seen, whatever they hold, and get zeros.
            rotary: cosine and sine of the angles that ``config.rotary`` turns by, in the same order; None for those of
                tokens counted from 0 (see :func:`lightning_mhla.positions.rotary_angles`).
            cu_seqlens: causal: first token of each of the sequences that are packed in the one row (B = 1), and N.
            projections: those to use, where the layer has none of its own.
            share: causal: N tokens here are a part of a sequence, of which other processes hold the rest.
        """
        if share is not None:
            return self._forward_shared(x, key_mask, rotary, cu_seqlens, share)
        x, key_mask = self._enter(x, key_mask, packed=cu_seqlens is not None)
        x = hide_rows(x, key_mask)
        split, merge = projections or (self._project, self._merge)
        q, k, v = split(x)
        given = {"rotary": self._rotary(rotary, x, cu_seqlens), "cu_seqlens": cu_seqlens}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        out = self.attend(q, *self._repeated(k, v), key_mask, **options)
        out = hide_rows(merge(self._around(out, x, v, key_mask)), key_mask)
        return out.index_select(1, self.inverse) if self.inverse is not None else out

    def _forward_shared(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        rotary: Rotary | None,
        cu_seqlens: Sequence[int] | None,
        share: SequenceShare,
    ) -> Tensor:
        if not self.causal or key_mask is not None or cu_seqlens is not None:
            raise ValueError("a sequence spread over processes is causal, without padding and not packed")
        self._check_length(share.tokens)
        q, k, v = self._project(x)
        if not self.config.rotary:
            rotary = None
        elif rotary is None:
            rotary = self.angles(share.start + sequence_positions(x))
        out = self.attend_shared(q, *self._repeated(k, v), share, rotary)
        return self._merge(self._around(out, x, v, None))

    def next_tokens(
        self, x: Tensor, state: Any, counts: Sequence[int], rotary: Rotary | None = None
    ) -> tuple[Tensor, Any]:
        """The next tokens ``[B, N, dim]`` of every row, causal, to the same shape, and the state after them.

        Args:
            x: tokens; whatever a row has beyond its count is padding at its right.
            state: as for :meth:`continue_from`, like the rest.
            counts: see there.
            rotary: angles of these tokens, None for those that follow the state's.
        """
        if not self.causal:
            raise ValueError("only causal attention goes on token by token; build the layer with causal=True")
        q, k, v = self._project(x)
        if not self.config.rotary:
            rotary = None
        elif rotary is None:
            rotary = self.angles(next_positions(() if state is None else state.lengths, x))
        out, state = self.continue_from(q, *self._repeated(k, v), state, counts, rotary)
        return self._merge(self._around(out, x, v, None)), state

    def attention_matrix(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        rotary: Rotary | None = None,
        projections: Projections | None = None,
    ) -> Tensor:
        """Attention weights ``[B, H, N, N]`` for what :meth:`forward` is given; rows and columns in the order of ``x``."""
        x, key_mask = self._enter(x, key_mask)
        split, _ = projections or (self._project, self._merge)
        q, k, v = split(hide_rows(x, key_mask))
        k, _ = self._repeated(k, v)
        rotary = self._rotary(rotary, x, None)
        weights = self.weights(q, k, key_mask, **({} if rotary is None else {"rotary": rotary}))
        if self.inverse is None:
            return weights
        return weights.index_select(2, self.inverse).index_select(3, self.inverse)

    def angles(self, positions: Tensor) -> Rotary:
        """Rotary angles of this layer for tokens at ``positions`` ``[N]`` or ``[B, N]``."""
        return rotary_angles(positions, self.key_width, self.config.rotary_base)

    def _rotary(self, given: Rotary | None, x: Tensor, cu_seqlens: Sequence[int] | None) -> Rotary | None:
        if not self.config.rotary:
            return None
        if given is not None:
            return given if self.order is None else given.select(self.order)
        return self.angles(sequence_positions(x, cu_seqlens))

    @torch.no_grad()
    def open_gate(self) -> None:
        """Let gate and ``lepe`` start as if they were not there: for weights that were trained without them."""
        if self.lepe is not None:
            for parameter in self.lepe.parameters():
                nn.init.zeros_(parameter)
        if self.gate is not None:
            assert self.gate.bias is not None, "a gate without bias cannot start open"
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, OPEN_GATE)

    def _around(self, out: Tensor, x: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """``[B, N, H * Dv]`` after norm, ``lepe`` and gate."""
        if self.norm is not None:
            out = self.norm(out)
        out = out.flatten(2)
        if self.lepe is not None:
            out = out + self.lepe(self._repeated(v, v)[1].flatten(2), key_mask)
        if self.gate is not None:
            out = out * F.silu(self.gate(x))
        return out

    def _enter(self, x: Tensor, key_mask: Tensor | None, packed: bool = False) -> tuple[Tensor, Tensor | None]:
        tokens = self.layout.num_tokens
        if not self.causal and x.shape[1] != tokens:
            raise ValueError(f"{x.shape[1]} tokens for a layout of {tokens} ({self.layout})")
        if not packed:  # the operator checks each packed sequence
            self._check_length(x.shape[1])
        if self.order is None:
            return x, key_mask
        return x.index_select(1, self.order), key_mask if key_mask is None else key_mask.index_select(1, self.order)

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
        q = q.unflatten(-1, (self.heads, self.key_width))
        k = k.unflatten(-1, (self.key_value_heads, self.key_width))
        return q, k, v.unflatten(-1, (self.key_value_heads, self.value_width))

    def _merge(self, out: Tensor) -> Tensor:
        assert self.proj is not None, "a layer without projections is given those of another module"
        return self.proj(out)

    def _repeated(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values for every query head, where the kind wants them so."""
        repeats = self.heads // self.key_value_heads
        if repeats == 1 or not self.repeats_heads:
            return k, v
        return k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)


@cache
def _report_unused(kind: str, names: tuple[str, ...]) -> None:
    """Say once which of the given options do nothing, as when one file serves several kinds."""
    if names:
        log.info("attention kind %s does not use %s", kind, ", ".join(names))


def layout_for(configs: Sequence[AttentionConfig], grid: Sequence[int], prefix_tokens: int = 0) -> BlockLayout:
    """The one layout that all layers of a model share; a single block if no layer uses blocks.

    Raises:
        ValueError: when layers ask for different blocks, or a kind that uses blocks is given none.
    """
    using = [config for config in configs if Attention.kinds[config.kind].uses_blocks]
    if not using:
        return BlockLayout(tuple(grid), blocks=(1,) * len(grid), prefix_tokens=prefix_tokens)
    first = using[0]
    if any((c.block_grid, c.block_size) != (first.block_grid, first.block_size) for c in using):
        raise ValueError("all layers must ask for the same block_grid or block_size; tokens are put in order only once")
    if first.block_grid is None and first.block_size is None:
        raise ValueError(f"attention kind {first.kind!r} needs block_grid (blocks along each axis) or block_size")
    blocks = None if first.block_grid is None else tuple(first.block_grid)
    return BlockLayout(tuple(grid), blocks, first.block_size, prefix_tokens)


def attention_per_layer(config: AttentionConfig, kinds: Sequence[str] | None, depth: int) -> list[AttentionConfig]:
    """One configuration for each of ``depth`` layers: ``kinds`` repeated to the depth, or ``config.kind`` everywhere.

    Raises:
        ValueError: when the number of kinds does not divide the depth.
    """
    if kinds is None:
        return [config] * depth
    if not kinds or depth % len(kinds):
        raise ValueError(f"layer_kinds={list(kinds)} is repeated to the depth, so its length must divide depth={depth}")
    return [replace(config, kind=kind) for kind in kinds] * (depth // len(kinds))


MIXING_OPTIONS = (
    "block_grid", "block_size", "mixing", "mixing_terms", "mixing_init", "mixing_per_head", "mixing_trainable"
)  # fmt: skip
"""Options of :class:`AttentionConfig` that only mhla looks at."""


def build_attention(config: AttentionConfig, dim: int, heads: int, layout: BlockLayout, **options: Any) -> Attention:
    """The attention module that ``config.kind`` names; ``options`` as for :class:`Attention`."""
    return Attention.kinds[config.kind](dim, heads, layout, config, **options)


def map_features(
    q: Tensor, k: Tensor, feature_map: FeatureMap, rotary: Rotary | None = None
) -> tuple[Tensor, Tensor, Literal["identity", "relu"]]:
    """Queries and keys after feature map and rotary, and what is left to the operator (relu costs nothing there)."""
    rest: Literal["identity", "relu"] = "identity"
    if feature_map == "elu":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    elif feature_map == "softplus":
        q, k = F.softplus(q), F.softplus(k)
    else:
        rest = feature_map
    if rotary is None:
        return q, k, rest
    return rotary.turn(q, rest), rotary.turn(k, rest), "identity"


def next_positions(lengths: Sequence[int], x: Tensor) -> Tensor:
    """Positions of the next tokens ``[B, N, dim]`` after rows of ``lengths``: ``[N]``, or ``[B, N]`` where they differ."""
    place = torch.arange(x.shape[1], device=x.device)
    if len(set(lengths)) < 2:
        return place + max(lengths, default=0)
    return place + torch.tensor(lengths, device=x.device)[:, None]
