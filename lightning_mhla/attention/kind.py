"""Interface of a kind of attention: class attributes and methods, with their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_mhla.attention.config import KINDS, AttentionConfig, Causal
from lightning_mhla.attention.inputs import UNHANDLED, AttentionInputs
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.lepe import LocalPositionalEncoding
from lightning_mhla.attention.order import BlockOrder, GivenOrder, TokenOrder
from lightning_mhla.attention.output import apply_gate, merge_heads

REMOVED = {
    "uses_linear_options": "name the options that the kind ignores, such as normalize and output_norm, in unused",
    "repeats_heads": "define operator_inputs(self, inputs) and return inputs, whose keys and values are not repeated",
    "scans": "write Order = RasterOrder",
    "always_gated": "pass gate=True to super().__init__",
    "_around": "define finish(self, out, inputs)",
}
"""Class attributes and methods that kinds of attention no longer support, each with advice on its replacement."""


class AttentionKind(nn.Module):
    """Interface of a kind of attention, such as softmax or mhla.

    The class of a kind does not derive from this class directly, but from the complete layer,
    :class:`lightning_mhla.attention.Attention`. It implements :meth:`attend`. If the kind supports generation token by token,
    the class also implements :meth:`continue_from`. A class overrides the following members if their defaults are not suitable:

    - ``Order``, the class that puts the tokens into the order that :meth:`attend` needs;
    - :meth:`projected_heads`, which returns the numbers of heads that the input projection computes;
    - :meth:`operator_inputs`, which converts the projected heads to the inputs of :meth:`attend`;
    - :meth:`finish`, which applies norm, ``lepe`` (a depthwise convolution of the values) and gate to the output of
      :meth:`attend`.
    """

    kind: ClassVar[str | None] = None
    """Name of this kind of attention, which the layer's configuration must also name."""
    Options: ClassVar[type | None] = None
    """Dataclass of the options that are specific to this kind; None if there are none."""
    Order: ClassVar[type[TokenOrder]] = BlockOrder
    """Order of the tokens in :meth:`attend`: :class:`BlockOrder`; :class:`RasterOrder` for a scan over the tokens; or
    :class:`GivenOrder` if their order does not matter."""
    handles: ClassVar[tuple[str, ...]] = ()
    """Optional inputs that :meth:`attend` supports, such as ``"key_mask"``. All others raise ValueError."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Options of :class:`AttentionConfig` that have no effect on this kind. If some of them are set, the log names them."""
    fixed: ClassVar[dict[str, Any]] = {}
    """Fixed values of options of :class:`AttentionConfig`, which replace the values in the configuration."""
    uses_blocks: ClassVar[bool] = False
    """Whether the kind divides tokens into blocks, so that its configuration needs ``block_grid`` or ``block_size``."""
    mixes_prefix: ClassVar[bool] = True
    """Whether prefix tokens form a block with mixing coefficients, so that all images must have equally many blocks."""
    causal_only: ClassVar[bool] = False
    """Whether the kind cannot attend to later tokens, so that images and video cannot use it."""
    block_causal: ClassVar[bool] = False
    """Whether the kind supports block-causal attention, in which a token attends to its own block and to earlier ones."""
    config: AttentionConfig
    heads: int
    key_value_heads: int
    norm: nn.Module | None
    lepe: LocalPositionalEncoding | None
    gate: nn.Linear | None

    def __init_subclass__(cls, kind: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, replacement in REMOVED.items():
            if name in vars(cls):
                raise ValueError(f"{cls.__name__}.{name} no longer has an effect; {replacement} instead")
        if cls.uses_blocks and issubclass(cls.Order, GivenOrder):
            raise ValueError(f"{cls.__name__} divides tokens into blocks; write Order = BlockOrder")
        if kind is not None:
            cls.kind = kind
            KINDS[kind] = cls

    def check_supported(self, config: AttentionConfig, layout: BlockLayout, causal: Causal) -> None:
        """Check that this kind of attention supports a configuration and a token layout.

        Args:
            config: configuration of the layer.
            layout: token grid and its partition into blocks.
            causal: whether the layer is causal, or ``"block"`` for a block-causal layer.

        Raises:
            ValueError: if ``causal`` is neither a bool nor ``"block"``, the configuration names a different kind, or the kind
                does not support the layer's causality. A causal layer is rejected if it has ``lepe``, prefix tokens or a grid
                with more than one axis, and a block-causal layer also if it has uneven blocks.
        """
        if causal not in (False, True, "block"):
            raise ValueError(f"causal={causal!r} must be True, False or 'block'")
        if self.kind not in (None, config.kind):
            raise ValueError(
                f"{type(self).__name__} computes attention kind {self.kind!r}, but its configuration has kind "
                f"{config.kind!r}; build_attention builds the layer that a configuration names"
            )
        if self.causal_only and not causal:
            raise ValueError(f"attention kind {config.kind!r} is causal only: use it for sequences, or choose another")
        if causal and (len(layout.grid) != 1 or layout.prefix_tokens):
            raise ValueError(f"causal attention needs a 1-D grid without prefix tokens, not {layout}")
        if causal and config.lepe:
            raise ValueError("lepe sees later tokens too; leave it out of causal attention")
        if causal != "block":
            return
        if not self.block_causal:
            able = sorted(kind for kind, layer in KINDS.items() if layer.block_causal)
            raise ValueError(f"attention kind {config.kind!r} is not block-causal; choose one of {', '.join(able)}")
        if "block_size" not in layout.operator_blocks:
            raise ValueError(f"block-causal attention needs equal blocks, such as block_size=64, not those of {layout}")

    def projected_heads(self) -> tuple[int, int, int]:
        """Return the numbers of query, key and value heads that the input projection computes."""
        return self.heads, self.key_value_heads, self.key_value_heads

    @classmethod
    def options_at(cls, options: dict[str, Any] | None, layer: int) -> dict[str, Any] | None:
        """Return the attention options of one layer. The default implementation returns ``options`` unchanged.

        Args:
            options: options of this kind of attention in the model's configuration, by name; None if none are set.
            layer: index of the layer, counted from 0.
        """
        return options

    def operator_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        """Convert projected heads to inputs of :meth:`attend`.

        The default implementation repeats key heads and value heads, so that every query head has its own. A kind that supports
        fewer key heads than query heads overrides this method and returns ``inputs`` unchanged.
        """
        return inputs.repeated(self.heads // self.key_value_heads)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute the attention outputs ``[B, N, H, Dv]`` of all tokens. Each kind of attention implements this method.

        Args:
            inputs: queries, keys, values and optional inputs. An optional input is None unless the class attribute ``handles``
                contains its name.
        """
        raise NotImplementedError

    def weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the attention matrix ``[B, H, N, N]`` that :meth:`attend` applies to the values, for analysis.

        The default implementation calls :meth:`attend` with one-hot values, so that the output is the matrix. This is valid
        only for kinds whose outputs are linear in the values.
        """
        batch, tokens, heads, _ = inputs.v.shape
        # Value j is the unit vector j, so that the output of a query lists its weights.
        units = torch.eye(tokens, dtype=inputs.v.dtype, device=inputs.v.device)[None, :, None]
        return self.attend(replace(inputs, v=units.expand(batch, tokens, heads, tokens))).transpose(1, 2)

    def finish(self, out: Tensor, inputs: AttentionInputs) -> Tensor:
        """Apply norm, ``lepe`` (a depthwise convolution of the values) and gate to the output of :meth:`attend`.

        Args:
            out: output of :meth:`attend`, ``[B, N, H, Dv]``.
            inputs: inputs of the layer, before :meth:`operator_inputs` repeats key and value heads.

        Returns:
            Input of the output projection, ``[B, N, H * Dv]``.
        """
        out = out if self.norm is None else self.norm(out)
        return apply_gate(merge_heads(out, inputs, self.lepe), inputs.x, self.gate, self.config.gate_activation)

    def continue_from(self, inputs: AttentionInputs, state: Any, counts: Sequence[int]) -> tuple[Tensor, Any]:
        """Compute causal attention for the next tokens of each row, given the state after the previous tokens.

        Kinds that support generation implement this method. A state has the attributes ``lengths`` (number of previous tokens
        in each row) and ``bytes`` (size in memory), and a method ``select(rows)`` that returns the state of the rows with the
        given indices.

        Args:
            inputs: inputs of the next tokens. Rows with fewer tokens than others are padded on the right.
            state: state after the previous tokens; None for the first tokens. Do not use it again, because the method may
                modify it in place.
            counts: number of next tokens in each row, without padding.

        Returns:
            Outputs ``[B, N, H, Dv]``, and the state after these tokens.
        """
        raise NotImplementedError

    def operator_flops(self, tokens: int) -> float:
        """Return the number of floating-point operations of :meth:`attend`, counting two for each multiply-add.

        Args:
            tokens: number of tokens of one sequence.

        Raises:
            NotImplementedError: if the kind of attention does not count its operations.
        """
        raise NotImplementedError(f"the operations of {type(self).__name__} are not counted")

    def require(self, *names: str) -> None:
        """Check that this kind of attention supports certain optional inputs, or generation.

        Args:
            *names: names of optional inputs, such as ``"key_mask"``, or ``"state"`` for generation.

        Raises:
            ValueError: if the kind does not support one of them.
        """
        for name in names:
            able = (
                type(self).continue_from is not AttentionKind.continue_from if name == "state" else name in self.handles
            )
            if not able:
                raise ValueError(f"attention kind {self.config.kind!r} {UNHANDLED[name]}")
