"""Base class of the attention layers: construction, forward pass, and generation token by token.

Other modules contain the parts of a layer: the methods that a kind of attention implements (``kind``), projections
(``projections``), token order (``order``), rotary positions (``positions``), and output norm, local positional encoding and
gate (``output``, ``lepe``).
"""

# Longer than other modules because it contains a single class.

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from mhla_kernels.checks import as_indices
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention.config import KINDS, AttentionConfig, Causal, report_unused
from lightning_mhla.attention.inputs import AttentionInputs, check_mask, check_tokens
from lightning_mhla.attention.kind import AttentionKind
from lightning_mhla.attention.layout import BlockLayout, Placement
from lightning_mhla.attention.lepe import LocalPositionalEncoding, hide_rows
from lightning_mhla.attention.output import build_norm, open_stage
from lightning_mhla.attention.positions import GridRotary, Rotary, SequenceRotary, build_rotary, next_positions
from lightning_mhla.attention.projections import Projections, check_heads
from lightning_mhla.attention.sequence import SequenceShare


class Attention(AttentionKind):
    """Self-attention layer, and base class of all kinds of attention.

    The layer projects tokens to queries, keys and values and computes attention from them. Kinds of attention, such as softmax
    or mhla, differ in this computation. The layer then applies an RMSNorm to the output, adds a depthwise convolution of the
    values (``lepe``), multiplies by a gate, and projects the result. Norm, ``lepe`` and gate are optional.

    To add a kind, derive a class from this one, for example ``class Mine(Attention, kind="mine")``, and implement
    :meth:`attend`. If the kind supports generation token by token, also implement :meth:`continue_from`. Declare the options of
    the kind in a nested dataclass named ``Options``. YAML sets these options as ``attention: {kind: mine, options: {...}}``,
    and the layer stores them in ``self.options``.

    Args:
        dim: width of the tokens.
        heads: number of query heads.
        layout: token grid and its partition into blocks.
        config: configuration of the layer, see :class:`AttentionConfig`.
        key_value_heads: number of key heads and of value heads, a divisor of ``heads``; None for ``heads``.
        key_width: width of the keys of one head; None for ``dim // heads``.
        value_width: width of the values of one head; None for ``dim // heads``.
        bias: whether the projections have a bias.
        causal: True if each token attends only to itself and earlier tokens, or ``"block"`` if each token attends to all tokens
            of its own block and of earlier blocks (block-causal attention). Both require a 1-D grid without prefix
            tokens.
        block_ordered: whether inputs and outputs are in block order, in which the tokens of each block are contiguous, instead
            of raster order. :class:`lightning_mhla.Backbone` sets this, and reorders the tokens once for all layers.
        projections: whether the layer has its own projections. If not, callers pass the projections of another module to
            :meth:`forward`.
        gate: whether the output has a gate; None for the value of ``config.gate``.

    Raises:
        ValueError: if ``config.kind`` is not the kind of the class, if widths and numbers of heads do not fit
            together, or if the kind or the layout does not support causal attention or rotary positions.
    """

    kinds: ClassVar[dict[str, type[Attention]]] = KINDS
    """Attention classes by kind."""
    options: Any

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
        causal: Causal = False,
        block_ordered: bool = False,
        projections: bool = True,
        gate: bool | None = None,
    ) -> None:
        super().__init__()
        key_value_heads = heads if key_value_heads is None else key_value_heads
        check_heads(dim, heads, key_value_heads, key_width, value_width)
        self.check_supported(config, layout, causal)
        used = {"block_size"} if causal == "block" else set()
        # In a pretrained model, queries and keys need the rotation that their projections were trained with, whatever the kind.
        used |= set() if projections else {"rotary"}
        self.ignored = [name for name in self.unused if name not in used]
        report_unused(config, self.ignored)
        config = replace(config, **self.fixed) if self.fixed else config
        # 0, 1 and NumPy's booleans pass the check above, but forward passes compare by `is True`
        self.causal: Causal = "block" if causal == "block" else bool(causal)
        self.config, self.block_ordered, self.projects = config, block_ordered, projections
        self.options = self.Options(**config.options or {}) if self.Options is not None else None
        self.heads, self.key_value_heads = heads, key_value_heads
        self.key_width, self.value_width = key_width or dim // heads, value_width or dim // heads
        widths = (self.key_width, self.key_width, self.value_width)
        self.sections = [count * width for count, width in zip(self.projected_heads(), widths, strict=True)]
        inner = heads * self.value_width
        self.qkv = nn.Linear(dim, sum(self.sections), bias=bias) if projections else None
        self.proj = nn.Linear(inner, dim, bias=bias) if projections else None
        self.gate = nn.Linear(dim, inner, bias=bias) if (config.gate if gate is None else gate) else None
        self.norm = build_norm(config, self.value_width) if "output_norm" not in self.unused else None
        self.lepe = LocalPositionalEncoding(layout, inner, config.lepe, projections) if config.lepe else None
        self.token_order = self.Order(block_ordered, buffers=projections)
        turns = config.rotary and not (projections and "rotary" in self.unused)
        self.rotary = build_rotary(layout, self.key_width, config.rotary_base, projections) if turns else None
        self.fit(layout)

    @override
    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}, layout={self.layout}"

    def fit(self, layout: BlockLayout, device: torch.device | None = None) -> None:
        """Adapt the layer to a different token layout. Learned parameters stay the same.

        Args:
            layout: new layout. It must have as many axes and prefix tokens as the layout that the layer was built with.
            device: device of the tokens; None for the CPU.
        """
        self.layout = layout
        operator_layout = self.token_order.operator_layout(layout)
        with torch.inference_mode(False):  # inference tensors could not be used in training later
            self.token_order.fit(layout, device)
            for part in (self.rotary, self.lepe):
                if isinstance(part, GridRotary | LocalPositionalEncoding):
                    part.fit(operator_layout, device)

    def flops(self, tokens: int) -> float:
        """Return the number of floating-point operations of the forward pass for one sequence, including the projections.

        A multiply-add counts as two operations.

        Args:
            tokens: number of tokens of the sequence.

        Raises:
            NotImplementedError: if the kind of attention does not count its operations.
        """
        projections = [module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear)]
        return 2.0 * tokens * sum(projections) + self.operator_flops(tokens)

    @property
    def max_tokens(self) -> int | None:
        """Maximum length of a sequence in tokens; None if the length is not limited."""
        return None if self.causal else self.layout.num_tokens

    def extend(self, tokens: int) -> None:
        """Extend a causal layer to sequences of up to ``tokens`` tokens. Outputs for shorter sequences stay the same.

        Args:
            tokens: number of tokens in the longest sequence. A number that the layout already covers has no effect.

        Raises:
            ValueError: if the layer is not causal.
        """
        if not self.causal:
            raise ValueError("only causal attention is extended; call fit with the layout of more tokens")
        if tokens <= self.layout.num_tokens:
            return
        # causal layers have blocks of equal sizes, however many the layout was built with
        in_blocks = self.uses_blocks or self.causal == "block"
        size = self.layout.block_size or (self.layout.block_sizes[0] if in_blocks else tokens)
        self.layout = BlockLayout((tokens,), block_size=size)

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
        """Compute the attention outputs ``[B, N, dim]`` of tokens ``[B, N, dim]``.

        Args:
            x: tokens, in raster order, or in block order if the layer was built with ``block_ordered``.
            key_mask: ``[B, N]`` bool, False for hidden tokens, in the order of ``x``. Hidden tokens do not influence other
                tokens, even if they contain NaN, and their outputs are zero. None if all tokens are visible.
            rotary: rotary angles of the tokens, in the order of ``x``; None to compute them from positions counted from 0.
                Layers for images that have their own projections ignore this argument and compute the angles from row and
                column. Layers without rotary embedding ignore it too.
            cu_seqlens: index of the first token of each sequence packed into the row (B = 1), followed by N. Only for a 1-D
                layout without prefix tokens, ``lepe`` and ``key_weighting``. None for one sequence in each row.
            projections: projections of another module, if the layer has none of its own; None to use the layer's own.
            share: part of each sequence that this process holds, if sequences are distributed over processes. Only for causal
                attention. None for complete sequences.
            layout: token layout for this call only; None for the layout of the last :meth:`fit`. Compiled graphs pass it,
                because :meth:`fit` would modify the layer inside the graph.

        Returns:
            Outputs in the shape and order of ``x``.

        Raises:
            ValueError: if the number of tokens does not fit the layout, the kind of attention does not support one of the
                arguments, or the arguments contradict each other.
        """
        self._check_tokens(x, key_mask, cu_seqlens, share, layout)
        projections = self._own_projections() if projections is None else projections
        placement = self.token_order.placement if layout is None else self._place(layout, x.device)
        tokens, visible = placement.enter(x, key_mask)
        tokens = hide_rows(tokens, visible)  # NaN in hidden tokens would otherwise spread, because 0 * NaN is NaN
        q, k, v = projections.heads(tokens, x, placement.order)
        angles = None
        if isinstance(self.rotary, GridRotary) and layout is not None:
            angles = self.rotary.of_placement(placement, tokens.device)
        elif self.rotary is not None:
            angles = self.rotary.of_tokens(tokens, rotary, placement.order, cu_seqlens, share)
        placed = None if layout is None else placement
        inputs = AttentionInputs(tokens, q, k, v, visible, angles, cu_seqlens, share, placed)
        self.require(*inputs.given)
        out = self.finish(self.attend(self.operator_inputs(inputs)), inputs)
        return placement.leave(hide_rows(projections.merge(out), visible))

    def next_tokens(
        self,
        x: Tensor,
        state: Any,
        counts: Sequence[int],
        rotary: Rotary | None = None,
        projections: Projections | None = None,
    ) -> tuple[Tensor, Any]:
        """Compute the outputs of the next tokens of each row during generation. The layer must be causal.

        A block-causal layer takes complete blocks, because a token's output depends on all tokens of its block.

        Args:
            x: tokens ``[B, N, dim]``. Rows with fewer than N tokens are padded on the right.
            state: state after the previous tokens, as this method returned it; None for the first tokens. Do not use it again,
                because the method may modify it in place.
            counts: number of tokens in each row of ``x``, without padding.
            rotary: rotary angles of these tokens; None to continue counting positions from the previous tokens.
            projections: projections of another module, if the layer has none of its own; None to use the layer's own.

        Returns:
            Outputs ``[B, N, dim]``, and the state after these tokens (see :meth:`continue_from`).

        Raises:
            ValueError: if the kind of attention does not support generation token by token, the layer is not causal, a
                block-causal layer gets a part of a block, or ``x``, ``counts`` and ``state`` do not fit each other.
        """
        self.require("state")
        if not self.causal:
            raise ValueError("only causal attention generates token by token; build the layer with causal=True")
        check_tokens("x", x)
        numbers = as_indices(counts, "counts")
        if numbers is None or len(numbers) != len(x) or not all(0 <= count <= x.shape[1] for count in numbers):
            shown = reprlib.repr(list(counts) if isinstance(counts, Sequence) else counts)
            raise ValueError(
                f"counts={shown} must be {len(x)} numbers from 0 to {x.shape[1]}, one for each row of x {list(x.shape)}"
            )
        counts = numbers
        if state is not None and len(state.lengths) != len(x):
            raise ValueError(f"the state has {len(state.lengths)} rows, but x has {len(x)}; select rows of the state")
        if self.causal == "block":
            check_complete_blocks(counts, int(self.layout.operator_blocks["block_size"]))
        projections = self._own_projections() if projections is None else projections
        q, k, v = projections.split(x)
        if not isinstance(self.rotary, SequenceRotary):
            rotary = None
        elif rotary is None:
            rotary = self.rotary.angles(next_positions(() if state is None else state.lengths, x))
        inputs = AttentionInputs(x, q, k, v, rotary=rotary)
        self.require(*inputs.given)
        out, state = self.continue_from(self.operator_inputs(inputs), state, counts)
        return projections.merge(self.finish(out, inputs)), state

    def attention_matrix(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        rotary: Rotary | None = None,
        projections: Projections | None = None,
    ) -> Tensor:
        """Compute the attention weights ``[B, H, N, N]`` of H heads, with queries as rows and keys as columns.

        Args:
            x: tokens ``[B, N, dim]``, in raster order, or in block order if the layer was built with ``block_ordered``. Rows
                and columns of the result have the same order.
            key_mask: ``[B, N]`` bool, False for hidden tokens; None if all tokens are visible.
            rotary: rotary angles of the tokens, in the order of ``x``, as for :meth:`forward`; None to compute them.
            projections: projections of another module, if the layer has none of its own; None to use the layer's own.

        Raises:
            ValueError: if the number of tokens does not fit the layout, or the kind of attention does not support one of the
                arguments.
        """
        self._check_tokens(x, key_mask)
        projections = self._own_projections() if projections is None else projections
        placement = self.token_order.placement
        tokens, visible = placement.enter(x, key_mask)
        tokens = hide_rows(tokens, visible)
        q, k, v = projections.heads(tokens, x, placement.order)
        angles = None if self.rotary is None else self.rotary.of_tokens(tokens, rotary, placement.order)
        inputs = AttentionInputs(tokens, q, k, v, visible, angles)
        self.require(*inputs.given)
        weights = self.weights(self.operator_inputs(inputs))
        if placement.inverse is None:
            return weights
        return weights.index_select(2, placement.inverse).index_select(3, placement.inverse)

    def open_gate(self) -> None:
        """Initialize the gate and ``lepe`` (a convolution of the values) so that they leave the output unchanged.

        The layer can then start from weights that were trained without a gate and without ``lepe``.

        Raises:
            ValueError: if the gate has no bias.
        """
        open_stage(self.gate, self.lepe, self.config.gate_activation)

    def _check_tokens(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Sequence[int] | None = None,
        share: SequenceShare | None = None,
        layout: BlockLayout | None = None,
    ) -> None:
        """Check that the arguments of :meth:`forward` fit the layer and each other.

        Args:
            x: tokens ``[B, N, dim]``.
            key_mask: mask of visible tokens; None if all tokens are visible.
            cu_seqlens: bounds of packed sequences; None for one sequence in each row.
            share: part of each sequence that this process holds; None for complete sequences.
            layout: token layout for this call only; None for the layer's own layout.

        Raises:
            ValueError: if ``x`` does not have three axes, the number of tokens does not fit the layout or exceeds the maximum
                sequence length, the mask does not fit the tokens, or arguments exclude each other.
        """
        check_tokens("x", x)
        check_mask("key_mask", key_mask, x)
        if share is not None and (self.causal is not True or key_mask is not None or cu_seqlens is not None):
            raise ValueError(
                "a sequence spread over processes is causal (not block-causal), without padding and not packed"
            )
        if layout is not None and self.block_ordered:
            raise ValueError(
                "a layout for one call needs tokens in raster order, not block_ordered=True; call fit instead"
            )
        tokens, present = x.shape[1] if share is None else share.tokens, self.layout if layout is None else layout
        mixes_tokens = self.lepe is not None or self.config.key_weighting
        if cu_seqlens is not None and (mixes_tokens or len(present.grid) > 1 or present.prefix_tokens):
            raise ValueError(
                "cu_seqlens packs sequences into a row, and lepe, key_weighting, prefix tokens and grids of images would mix "
                "them; pad the rows instead, with key_mask"
            )
        if not self.causal and tokens != present.num_tokens:
            raise ValueError(f"{tokens} tokens for a layout of {present.num_tokens} ({present})")
        # `max_tokens` is the limit of the layer's own layout, and does not apply to the layout of one call.
        if layout is not None or cu_seqlens is not None:  # the operator checks the length of each packed sequence
            return
        limit = self.max_tokens
        if limit is not None and tokens > limit:
            raise ValueError(
                f"{tokens} tokens are more than the {limit} of the layer's mixing coefficients; extend the model "
                f"(its method extend), or train with mixing: exponential, which takes any length"
            )

    def _place(self, layout: BlockLayout, device: torch.device) -> Placement:
        """Return the permutation of tokens into block order for a layout that is passed to :meth:`forward`.

        A kind that does not use blocks keeps the order. Blocks are padded to equal length only if the kind of attention
        supports a key mask, which hides the padding.
        """
        if not self.uses_blocks:
            return Placement(layout, None, None, {})
        return layout.place(device, gaps="key_mask" in self.handles)

    def _own_projections(self) -> Projections:
        assert self.proj is not None, "a layer without projections is given those of another module"
        return Projections(self._project, self.proj)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.qkv is not None
        q, k, v = self.qkv(x).split(self.sections, dim=-1)
        q, k = (heads.unflatten(-1, (-1, self.key_width)) for heads in (q, k))
        return q, k, v.unflatten(-1, (-1, self.value_width))


def check_complete_blocks(counts: Sequence[int], block_size: int) -> None:
    """Check that block-causal generation receives complete blocks.

    Args:
        counts: number of new tokens in each row.
        block_size: number of tokens in a block.

    Raises:
        ValueError: if a number of tokens is not a multiple of ``block_size``.
    """
    for count in counts:
        if count % block_size:
            raise ValueError(
                f"block-causal attention generates complete blocks of {block_size} tokens, but got {count} tokens; each "
                "token needs all others of its block"
            )


def build_attention(config: AttentionConfig, dim: int, heads: int, layout: BlockLayout, **options: Any) -> Attention:
    """Build an attention layer of the kind that ``config.kind`` names.

    Args:
        config: configuration of the layer.
        dim: width of the tokens.
        heads: number of query heads.
        layout: token grid and its partition into blocks.
        **options: further keyword arguments of :class:`Attention`, such as ``causal``.

    Raises:
        ValueError: if the arguments do not fit together (see :class:`Attention`).
    """
    return Attention.kinds[config.kind](dim, heads, layout, config, **options)
