"""Base class, options and state of recurrent kinds of attention: retention, gla, gated_deltanet and mamba2."""

# Longer than other modules because all recurrent kinds share the projections, convolutions and states of one class.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from mhla_kernels.backend import Backend
from mhla_kernels.generation import mask_of_counts
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.attention.base import Attention
from lightning_mhla.attention.config import MIXING_OPTIONS, AttentionConfig
from lightning_mhla.attention.inputs import AttentionInputs, check_state
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.lepe import hide_rows
from lightning_mhla.attention.order import RasterOrder
from lightning_mhla.attention.positions import sequence_positions
from lightning_mhla.attention.short_conv import ShortConvolution
from lightning_mhla.recurrence.chunks import chunk_tokens

NORM_EPS = 1e-5
"""Epsilon of the output's RMSNorm, as in the layers of flash-linear-attention."""


@dataclass(frozen=True)
class RecurrentOptions:
    """Options that all recurrent kinds of attention have in common.

    Args:
        direction: direction in which bidirectional attention reads the tokens: both (sum of a forward and a backward
            recurrence), alternate (forward in layers with even index, backward in layers with odd index), forward or backward.
        backend: torch, triton (the kernels of fla-core, which need a GPU), or auto (triton if possible, otherwise torch).
    """

    direction: Literal["both", "alternate", "forward", "backward"] = "both"
    backend: Backend = "auto"


@dataclass(frozen=True)
class ConvolvedOptions(RecurrentOptions):
    """Options of recurrent kinds of attention that begin with a short convolution, in addition to :class:`RecurrentOptions`.

    Args:
        conv: width in tokens of the causal convolution of queries, keys and values; 0 for no convolution.

    Raises:
        ValueError: if ``conv`` is negative.
    """

    conv: int = 4

    def __post_init__(self) -> None:
        if self.conv < 0:
            raise ValueError(f"conv={self.conv} must be positive, or 0 for none")


@dataclass(frozen=True)
class RecurrentState:
    """State of a recurrent layer that is carried from one generation step to the next.

    Attributes:
        lengths: number of tokens so far in each row.
        memory: state of the recurrence, ``[B, H, Dk, Dv]``; empty for a layer without a recurrence.
        last: latest inputs of the short convolution, ``[B, taps - 1, channels]``, where each output depends on ``taps`` tokens;
            None without a convolution.
        kind: name of the kind of attention. Only layers of this kind can use the state.
    """

    lengths: tuple[int, ...]
    memory: Tensor
    last: Tensor | None
    kind: str

    def select(self, rows: Tensor) -> RecurrentState:
        """Return the state of the batch rows whose indices are in ``rows``, a 1-D integer tensor."""
        index = rows.to(self.memory.device)
        last = None if self.last is None else self.last.index_select(0, index)
        lengths = tuple(self.lengths[row] for row in rows.tolist())
        return RecurrentState(lengths, self.memory.index_select(0, index), last, self.kind)

    @property
    def bytes(self) -> int:
        """Size of all tensors of the state, in bytes."""
        return sum(x.numel() * x.element_size() for x in (self.memory, self.last) if x is not None)


class Operands(NamedTuple):
    """Inputs of a recurrence: queries, keys, values and gates, such as decays.

    Attributes:
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        gates: gates by name, ``[B, N, H, ...]`` each. A token whose key, value and gates are all 0 leaves the state unchanged.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]

    def hide(self, real: Tensor | None) -> Operands:
        """Return a copy with keys, values and gates set to zero where ``real`` is False.

        The hidden tokens leave the state unchanged. A zero key and value add nothing to it, and it does not decay, because
        decays are stored as logarithms.

        Args:
            real: ``[B, N]`` bool, False for tokens to hide; None to hide no token.

        Returns:
            New inputs with the same queries; the inputs themselves if ``real`` is None.
        """
        if real is None:
            return self
        gates = {name: hide_rows(gate, real) for name, gate in self.gates.items()}
        return Operands(self.q, hide_rows(self.k, real), hide_rows(self.v, real), gates)


class RecurrentAttention(Attention):
    """Base class of attention layers with a recurrent state, which decays before each token is added to it.

    Bidirectional attention reads the tokens in raster order, in the directions that the option ``direction`` sets. Tokens
    that the key mask hides leave the state unchanged. The output of each head is normalized by an RMSNorm. It is then
    multiplied by a gate, the SiLU of a projection of the input, as in RetNet, GLA and Gated DeltaNet. Derived classes implement
    :meth:`operands`, and set :attr:`recurrence` or implement :meth:`recur`. The constructor takes the arguments of
    :class:`Attention`.

    Raises:
        ValueError: if the layer is bidirectional and ``direction`` is ``"alternate"``. Use :meth:`AttentionConfig.at_layer` to
            replace this value with ``"forward"`` or ``"backward"`` in each layer.
    """

    Options: ClassVar[type] = RecurrentOptions
    handles = ("key_mask", "rotary", "cu_seqlens")
    unused: ClassVar[tuple[str, ...]] = (
        *MIXING_OPTIONS, "normalize", "feature_map", "output_norm", "gate", "rotary"
    )  # fmt: skip
    Order = RasterOrder
    conv_bias: ClassVar[bool] = False
    """Whether the short convolution has a bias."""
    recurrence: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    """Function that computes the recurrence, with the gates of :meth:`operands` as keyword arguments."""
    options: RecurrentOptions

    def __init__(self, dim: int, heads: int, layout: BlockLayout, config: AttentionConfig, **options: Any) -> None:
        super().__init__(dim, heads, layout, config, gate=True, **options)
        if not self.causal and self.options.direction == "alternate":
            raise ValueError("direction: alternate depends on the layer; build layers with config.at_layer(index)")
        self.norm = nn.RMSNorm(self.value_width, NORM_EPS)
        taps = getattr(self.options, "conv", 0)
        self.conv = ShortConvolution(sum(self.sections), taps, self.conv_bias) if taps else None

    @classmethod
    @override
    def options_at(cls, options: dict[str, Any] | None, layer: int) -> dict[str, Any] | None:
        if options is None or options["direction"] != "alternate":
            return options
        return {**options, "direction": "backward" if layer % 2 else "forward"}

    @override
    def operator_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs  # the short convolution reads the projected heads, and _prepared repeats what comes out

    def operands(self, inputs: AttentionInputs) -> Operands:
        """Compute the queries, keys, values and gates of the recurrence.

        Args:
            inputs: inputs of the layer, with queries, keys and values after the short convolution and rotary embedding.

        Returns:
            Inputs of the recurrence. Queries, keys and values may have fewer heads than the layer; the caller repeats them.
        """
        raise NotImplementedError

    def recur(self, operands: Operands, **options: Any) -> tuple[Tensor, Tensor]:
        """Compute the recurrence of this kind of attention over all tokens. The default calls :attr:`recurrence`.

        Args:
            operands: queries, keys, values and gates, all with the number of heads of the layer.
            **options: keyword arguments of the recurrence: ``initial_state``, ``cu_seqlens`` and ``backend``.

        Returns:
            Outputs ``[B, N, H, Dv]``, and the final state ``[B, H, Dk, Dv]``.
        """
        q, k, v, gates = operands
        return type(self).recurrence(q, k, v, **gates, **options)

    @override
    def attend(self, inputs: AttentionInputs) -> Tensor:
        return self._in_directions(inputs, None)

    @override
    def weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the attention matrix ``[B, H, N, N]`` that maps the values, after their short convolution, to the outputs."""
        batch, tokens = inputs.x.shape[:2]
        # With one-hot values [B, N, H, N], the output of a token is its row of the matrix.
        units = torch.eye(tokens, dtype=inputs.x.dtype, device=inputs.x.device)[None, :, None]
        return self._in_directions(inputs, units.expand(batch, tokens, self.heads, tokens)).transpose(1, 2)

    def _in_directions(self, inputs: AttentionInputs, values: Tensor | None) -> Tensor:
        direction = "forward" if self.causal else self.options.direction
        if direction == "forward":
            return self._read(inputs, values)
        backward = _turned_round(inputs)
        turned = None if values is None else values.flip(1)
        if direction == "backward":
            return self._read(backward, turned).flip(1)
        if inputs.cu_seqlens is not None:  # packed sequences fill the one row
            return self._read(inputs, values) + self._read(backward, turned).flip(1)
        both = _together(inputs, backward)
        out = self._read(both, None if values is None or turned is None else torch.cat([values, turned]))
        forward, back = out.chunk(2)
        return forward + back.flip(1)

    def _read(self, inputs: AttentionInputs, values: Tensor | None) -> Tensor:
        """Compute the recurrence from the first token to the last, and return the outputs ``[B, N, H, D]``.

        Args:
            inputs: inputs of the layer.
            values: values ``[B, N, H, D]`` of the recurrence; None to compute them from ``inputs``.
        """
        positions = None if inputs.cu_seqlens is None else sequence_positions(inputs.x, inputs.cu_seqlens)
        operands = self._prepared(inputs, inputs.key_mask, None, positions)
        if values is not None:
            operands = operands._replace(v=values).hide(inputs.key_mask)
        out, _ = self.recur(operands, cu_seqlens=inputs.cu_seqlens, backend=self.options.backend)
        return self.skip(out, operands)

    def skip(self, out: Tensor, operands: Operands) -> Tensor:
        """Add a skip connection to the outputs of the recurrence. The default implementation adds nothing.

        Args:
            out: outputs of the recurrence, ``[B, N, H, Dv]``.
            operands: inputs of the recurrence.
        """
        return out

    @override
    def continue_from(
        self, inputs: AttentionInputs, state: RecurrentState | None, counts: Sequence[int]
    ) -> tuple[Tensor, RecurrentState]:
        check_state(state, RecurrentState, self.config.kind)
        last = None if state is None else state.last
        operands = self._prepared(inputs, mask_of_counts(counts, inputs.x), last, None)
        memory = None if state is None else state.memory
        out, memory = self.recur(operands, initial_state=memory, backend=self.options.backend)
        if self.conv is not None:
            last = self.conv.carry(self._joined(inputs), last, counts)
        previous_lengths = (0,) * len(counts) if state is None else state.lengths
        lengths = tuple(a + b for a, b in zip(previous_lengths, counts, strict=True))
        return self.skip(out, operands), RecurrentState(lengths, memory, last, self.config.kind)

    def _joined(self, inputs: AttentionInputs) -> Tensor:
        return torch.cat([x.flatten(2) for x in (inputs.q, inputs.k, inputs.v)], -1)

    def _prepared(
        self, inputs: AttentionInputs, real: Tensor | None, last: Tensor | None, positions: Tensor | None
    ) -> Operands:
        """Compute the inputs of the recurrence for all heads, after the short convolution and rotary embedding.

        Args:
            inputs: inputs of the layer.
            real: ``[B, N]`` bool, False for tokens that must not affect the state; None if all tokens may affect it.
            last: inputs of the convolution for the ``taps - 1`` previous tokens, ``[B, taps - 1, channels]``; None for zeros.
            positions: position of each token in its packed sequence, ``[N]``; None if sequences are not packed.
        """
        q, k, v = inputs.q, inputs.k, inputs.v
        if self.conv is not None:
            # Hidden tokens are zero, but a bias of the projections gives them nonzero heads, which neighbors would read.
            joined = F.silu(self.conv(hide_rows(self._joined(inputs), real), last, positions))
            parts = joined.split([x.shape[2] * x.shape[3] for x in (q, k, v)], -1)
            q, k, v = (part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, (q, k, v), strict=True))
        if inputs.rotary is not None:
            q, k = inputs.rotary.turn(q), inputs.rotary.turn(k)
        q, k, v, gates = self.operands(replace(inputs, q=q, k=k, v=v))
        q, k, v = (x.repeat_interleave(self.heads // x.shape[2], 2) for x in (q, k, v))
        return Operands(q, k, v, gates).hide(real)

    @torch.no_grad()
    @override
    def open_gate(self) -> None:
        """Initialize the parts that pretrained weights do not include: output gate, ``lepe``, short convolution and decays.

        Output gate and ``lepe`` (a convolution of the values) initially leave the output unchanged. The short convolution
        initially passes its input on to the SiLU that follows it. The parameters of the decays and of the other gates of the
        recurrence are drawn from a fixed seed, so that they are the same on all machines.

        Raises:
            ValueError: if the gate has no bias.
        """
        super().open_gate()
        if self.conv is not None:
            self.conv.pass_through()
        # The caller's random numbers stay as they would be without this layer.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.reset_gates()

    def reset_gates(self) -> None:
        """Draw new initial values for the parameters of the recurrence, such as decays. The default does nothing."""

    @override
    def operator_flops(self, tokens: int) -> float:
        """Return the number of floating-point operations of the short convolution and the recurrence on one sequence.

        Args:
            tokens: number of tokens of the sequence.
        """
        directions = 2 if not self.causal and self.options.direction == "both" else 1
        chunk = chunk_tokens(max(self.key_width, self.value_width))
        # Updating and reading the state, and the attention to (chunk + 1) / 2 tokens of the own chunk on average.
        multiply_adds = 2 * self.key_width * self.value_width + (chunk + 1) / 2 * (self.key_width + self.value_width)
        convolved = 0 if self.conv is None else self.conv.weight.numel() / self.heads
        return 2.0 * directions * self.heads * tokens * (multiply_adds + convolved)


def _turned_round(inputs: AttentionInputs) -> AttentionInputs:
    """Return attention inputs with the tokens in reverse order, and mask, rotary angles and sequence bounds to match."""
    x, q, k, v = (tensor.flip(1) for tensor in (inputs.x, inputs.q, inputs.k, inputs.v))
    mask, rotary = inputs.key_mask, inputs.rotary
    mask = None if mask is None else mask.flip(1)
    if rotary is not None:
        rotary = rotary._replace(cos=rotary.cos.flip(-2), sin=rotary.sin.flip(-2))
    bounds = inputs.cu_seqlens
    if bounds is not None:
        numbers = bounds.tolist() if isinstance(bounds, Tensor) else bounds
        bounds = [x.shape[1] - int(bound) for bound in reversed(numbers)]
    return AttentionInputs(x, q, k, v, mask, rotary, bounds)


def _together(one: AttentionInputs, two: AttentionInputs) -> AttentionInputs:
    """Concatenate two attention inputs along the batch axis. Both have the same number of rows."""
    x, q, k, v = (torch.cat([getattr(one, name), getattr(two, name)]) for name in ("x", "q", "k", "v"))
    mask = None if one.key_mask is None or two.key_mask is None else torch.cat([one.key_mask, two.key_mask])
    if one.rotary is None or two.rotary is None:
        return AttentionInputs(x, q, k, v, mask)
    # Angles are [N, D / 2] or [B, N, D / 2], and the two directions need different ones.
    rows = (len(one.x), *one.rotary.cos.shape[-2:])
    cos = torch.cat([one.rotary.cos.expand(rows), two.rotary.cos.expand(rows)])
    sin = torch.cat([one.rotary.sin.expand(rows), two.rotary.sin.expand(rows)])
    return AttentionInputs(x, q, k, v, mask, one.rotary._replace(cos=cos, sin=sin))
