"""Configuration of attention layers, and the registry of the kinds of attention."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Self, get_args

from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range

log = logging.getLogger(__name__)

Features = Literal["relu", "elu", "softplus", "sana", "identity", "learned"]
GateActivation = Literal["silu", "identity"]
MixingKind = Literal["dense", "exponential"]
MixingInit = Literal["locality", "uniform"]
Causal = bool | Literal["block"]
"""Tokens that a token attends to: False for all; True for itself and earlier ones; ``"block"`` for those of its own block and
of earlier blocks (block-causal attention)."""

CHOICES = {
    "mixing": get_args(MixingKind),
    "mixing_init": get_args(MixingInit),
    "feature_map": get_args(Features),
    "gate_activation": get_args(GateActivation),
}
"""Names that an option of :class:`AttentionConfig` accepts, by option."""

KINDS: dict[str, Any] = {}
"""Attention classes by kind. A class that derives from :class:`lightning_mhla.attention.Attention` adds its own entry."""

OWN_KIND_HINT = (
    "a kind of your own is known once its module is imported: --allow=MODULE on the command line, import in Python"
)

MIXING_OPTIONS = (
    "block_grid", "block_size", "mixing", "mixing_terms", "mixing_init", "mixing_per_head", "mixing_trainable",
    "mixing_min_decay",
)  # fmt: skip
"""Options of :class:`AttentionConfig` that only the attention kinds mhla and mhla_window use."""

EXPONENTIAL_OPTIONS = ("mixing_terms", "mixing_min_decay")
"""Options of :class:`AttentionConfig` that only exponential mixing coefficients use."""


@dataclass
class AttentionConfig:
    """Configuration of an attention layer, with the same options for text, images and video.

    Args:
        kind: kind of attention: mhla (mixed block summaries), mhla_window (softmax in the current block and the blocks next to
            it, mhla for the others), linear (one summary of all tokens), softmax, rala and mala (images), retention,
            gla, gated_deltanet, mamba2, gated_conv (a short convolution instead of attention), or your own kind from a module
            that --allow=MODULE imports. An unknown name raises an error that lists the known ones.
        block_grid: number of blocks along each axis of the token grid (images, video).
        block_size: number of tokens in a block (sequences). mhla and mhla_window need either block_grid or block_size. Other
            kinds use blocks only in block-causal attention, where every kind needs block_size.
        mixing: parametrization of the mixing coefficients, the weights with which a block reads the summaries of other blocks.
            dense has one free coefficient for each pair of blocks. exponential is a sum of exponentials of the distance between
            blocks, and its cost is linear in the number of blocks.
        mixing_terms: number of exponentials in exponential mixing.
        mixing_init: initial mixing coefficients. locality gives nearby blocks more weight, and uniform gives all blocks equal
            weight.
        mixing_per_head: whether each head has its own mixing coefficients.
        mixing_trainable: whether the mixing coefficients are trained.
        mixing_min_decay: smallest decay per block of exponential mixing, from 1e-5 to 2.5. A layer forgets a block after about
            1 / mixing_min_decay blocks. If sequences are much longer than in training, choose it so that a layer forgets
            within the training length.
        normalize: whether the attention weights of each query are divided by their sum, the normalizer (mhla, linear).
        feature_map: feature map of queries and keys (mhla, mhla_window, linear): relu, elu, softplus, sana, identity or
            learned. relu is relu(x) + 1e-6, and elu is elu(x) + 1. sana is relu(x), and adds 1e-15 instead of 1e-6 to the
            normalizer, as SANA does in diffusers. learned concatenates exp(W x) and exp(-W x) with a learned matrix W
            (Hedgehog, arXiv 2402.04347), and is applied after rotary. In mhla_window, every map is applied after rotary, and
            relu and sana are both relu(x).
        lepe: width of a depthwise convolution of the values that is added to the output. It must be odd; 0 means no
            convolution.
        rotary: whether rotary position embedding is applied to queries and keys after the feature map; for sequences, and for
            images (by row and column). Rotated features may be negative, so mhla and linear also need either normalize off or
            normalize_before_rotary on.
        rotary_base: base of the geometric series of rotary frequencies.
        normalize_before_rotary: whether the normalizer is computed from queries and keys before rotation (RoFormer, arXiv
            2104.09864, equation 19). Only for mhla and linear without causal attention.
        key_weighting: whether each key is multiplied by the number of tokens times its softmax weight for the mean query of its
            head (RALA, arXiv 2411.07635). Only for mhla and linear without causal attention.
        gate: whether the output is multiplied by a gate, a projection of the input followed by gate_activation.
        gate_activation: activation of the gate, silu or identity.
        output_norm: whether an RMSNorm is applied to the output of each head; null applies it only if normalize is off.
        options: options of the kind itself, by name. mhla_window has sinks (number of first tokens that every token attends to
            by softmax, default 0), feature_positions (number of positions that features for far tokens distinguish, where later
            positions count as the last of them and None stands for all, default None), and far_init (added to the initial
            logarithm of the weight of far tokens, default 0.0); retention, gla, gated_deltanet and mamba2 have direction (both,
            alternate, forward or backward, default 'both') and backend (auto, torch or triton, default 'auto'); gla has
            decay_rank (default 16) and decay_divisor (default 16.0); gated_deltanet and mamba2 have conv (width of a
            convolution over tokens, default 4); mamba2 has groups (number of key and query heads, where None stands for
            key_value_heads if that option is smaller than the number of heads, otherwise for 1, default None); gated_conv has
            conv (width of its convolution, default 3). The other built-in kinds have no options of their own.
    """

    kind: str = "mhla"
    block_grid: list[int] | None = None
    block_size: int | None = None
    mixing: MixingKind = "dense"
    mixing_terms: int = 4
    mixing_init: MixingInit = "locality"
    mixing_per_head: bool = False
    mixing_trainable: bool = True
    mixing_min_decay: float = 1e-5
    normalize: bool = True
    feature_map: Features = "relu"
    lepe: int = 0
    rotary: bool = False
    rotary_base: float = 10_000.0
    normalize_before_rotary: bool = False
    key_weighting: bool = False
    gate: bool = False
    gate_activation: GateActivation = "silu"
    output_norm: bool | None = None
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            close = get_close_matches(str(self.kind), KINDS, 1)
            hint = f"did you mean {close[0]!r}?" if close else OWN_KIND_HINT
            raise ValueError(f"attention kind {self.kind!r} is not one of {sorted(KINDS)}; {hint}")
        self.options = self._checked_options()
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                close = get_close_matches(str(value), allowed, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}{hint}")
        if self.mixing_terms < 1:
            raise ValueError(f"mixing_terms={self.mixing_terms} must be positive")
        for name in ("block_grid", "block_size"):
            value = getattr(self, name)
            if value is not None and min(value if isinstance(value, Sequence) else [value], default=0) < 1:
                raise ValueError(f"{name}={value} must be positive")
        if self.block_grid is not None and self.block_size is not None:
            raise ValueError("give block_grid or block_size, not both")
        if self.lepe < 0 or (self.lepe and self.lepe % 2 == 0):
            raise ValueError(f"lepe={self.lepe} must be an odd width, or 0 for none")
        check_range(above=0, rotary_base=self.rotary_base, mixing_min_decay=self.mixing_min_decay)
        normalized = self.normalize and "normalize" not in KINDS[self.kind].unused
        if normalized and self.feature_map == "identity":
            raise ValueError("normalize needs nonnegative queries and keys, which feature_map 'identity' does not give")
        if self.feature_map == "learned" and (self.key_weighting or self.normalize_before_rotary):
            raise ValueError("feature_map 'learned' does not support key_weighting or normalize_before_rotary")
        signed = self.rotary and not self.normalize_before_rotary and self.feature_map != "learned"
        if normalized and signed:
            raise ValueError(
                "normalize needs nonnegative queries and keys, and rotary makes them negative; set normalize: false, or "
                "normalize_before_rotary: true for images"
            )

    def _checked_options(self) -> dict[str, Any] | None:
        """Return the options of the attention kind, checked and with defaults filled in; None if none are set.

        If no options are set, the kind's defaults are not filled in, because a default configuration would then contain options
        that other kinds reject. The result is also None if the kind has no options of its own.
        """
        if self.options is None:
            return None
        kind = KINDS[self.kind].Options
        if kind is None:
            if self.options:
                raise ValueError(f"attention kind {self.kind!r} has no options of its own, but got {self.options}")
            return None
        return asdict(as_dataclass(kind, self.options, f"attention kind {self.kind!r}"))

    def at_layer(self, layer: int) -> Self:
        """Resolve the options that depend on the layer, and return the configuration of one layer.

        For example, the option ``direction: alternate`` becomes ``forward`` or ``backward``.

        Args:
            layer: index of the layer, counted from 0.
        """
        options = KINDS[self.kind].options_at(self.options, layer)
        return self if options == self.options else replace(self, options=options)

    def with_kind(self, kind: str) -> Self:
        """Return a copy of the configuration with the given kind of attention.

        ``options`` are removed if the kind changes, because they belong to the former kind.
        """
        return replace(self, kind=kind, options=self.options if kind == self.kind else None)


@dataclass
class CrossAttentionConfig(AttentionConfig):
    """Configuration of cross-attention in a pretrained model. The context is a text or another sequence, read in blocks.

    The options of :class:`AttentionConfig` describe the queries: ``block_grid`` for images and video, ``block_size`` for
    text. ``mixing_init: locality`` has an effect only if the queries are a sequence. If they are an image or a video, all
    blocks start with equal weight.

    Args:
        key_block_size: number of tokens in a block of the context; null for ``block_size``, or 16 if the queries are an
            image or a video.
        key_tokens: length in tokens of the longest context that dense mixing coefficients cover; null for the maximum of the
            model, or 512 if the model has none. Exponential mixing coefficients take any length.
    """

    key_block_size: int | None = None
    key_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("key_block_size", "key_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be positive")


def report_unused(config: AttentionConfig, unused: Sequence[str]) -> None:
    """Log which options in ``config`` differ from their defaults although they have no effect.

    These are options that the kind of attention ignores and, with dense mixing, the options of exponential mixing. The same
    message is logged only once.

    Args:
        config: configuration of a layer.
        unused: names of the options that the kind ignores.
    """
    changed = [field.name for field in fields(config) if getattr(config, field.name) != field.default]
    _report(config.kind, tuple(name for name in changed if name in unused))
    if config.mixing == "dense" and "mixing" not in unused:
        _report(f"{config.kind} with mixing: dense", tuple(name for name in changed if name in EXPONENTIAL_OPTIONS))


@cache
def _report(kind: str, names: tuple[str, ...]) -> None:
    if names:
        log.info("attention kind %s does not use %s", kind, ", ".join(names))


def layout_for(
    configs: Sequence[AttentionConfig], grid: Sequence[int], prefix_tokens: int = 0, causal: Causal = False
) -> BlockLayout:
    """Build the token layout that all layers of a model share. The layout has a single block if no layer uses blocks.

    Args:
        configs: configurations of the layers.
        grid: number of tokens along each axis.
        prefix_tokens: number of tokens before the grid, such as class tokens.
        causal: causality of the attention: False, True or ``"block"``. In block-causal attention, every layer uses blocks.

    Raises:
        ValueError: if two layers need different blocks, or a layer that uses blocks sets neither ``block_grid`` nor
            ``block_size``.
    """
    using = [config for config in configs if causal == "block" or KINDS[config.kind].uses_blocks]
    if not using:
        return BlockLayout(tuple(grid), blocks=(1,) * len(grid), prefix_tokens=prefix_tokens)
    first = using[0]
    if any((c.block_grid, c.block_size) != (first.block_grid, first.block_size) for c in using):
        raise ValueError("all layers must ask for the same block_grid or block_size; tokens are put in order only once")
    if first.block_grid is None and first.block_size is None:
        raise ValueError(f"attention kind {first.kind!r} needs block_grid (blocks along each axis) or block_size")
    blocks = None if first.block_grid is None else tuple(first.block_grid)
    return BlockLayout(tuple(grid), blocks, first.block_size, prefix_tokens)


def check_blocks(config: AttentionConfig, layout: BlockLayout) -> None:
    """Check that the blocks that a configuration sets, if any, are the blocks of the layout.

    Args:
        config: configuration of a layer.
        layout: token grid and its partition into blocks.

    Raises:
        ValueError: if the blocks differ.
    """
    grid = config.block_grid and tuple(config.block_grid)
    if grid not in (None, layout.block_grid) or config.block_size not in (None, layout.block_size):
        raise ValueError(
            f"the configuration asks for blocks {config.block_grid or config.block_size}, not those of {layout}"
        )


def attention_per_layer(config: AttentionConfig, kinds: Sequence[str] | None, depth: int) -> list[AttentionConfig]:
    """Return the attention configurations of a model's layers, which may alternate between kinds of attention.

    Args:
        config: configuration that all layers share, except for the kind.
        kinds: kinds of attention of the first layers, repeated for the layers after them; None for ``config.kind`` in all
            layers.
        depth: number of layers.

    Returns:
        One configuration for each layer.

    Raises:
        ValueError: if ``depth`` is not a multiple of the number of kinds, or ``config`` sets options of a kind that is not in
            ``kinds``.
    """
    if kinds is None:
        return [config] * depth
    if not kinds or depth % len(kinds):
        raise ValueError(f"layer_kinds={list(kinds)} is repeated to the depth, so its length must divide depth={depth}")
    # Options that equal the defaults of the kind, as `options: {}` gives them, were not necessarily set by the user.
    custom_options = config.options if config.options != replace(config, options={}).options else None
    if custom_options and config.kind not in kinds:
        raise ValueError(f"options={custom_options} are those of kind {config.kind!r}, which layer_kinds does not list")
    return [config.with_kind(kind) for kind in kinds] * (depth // len(kinds))
