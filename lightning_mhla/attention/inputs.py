"""Inputs of an attention kind: tokens, queries, keys, values, masks and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_mhla.attention.layout import Placement
from lightning_mhla.attention.positions import Rotary
from lightning_mhla.attention.sequence import SequenceShare

UNHANDLED = {
    "key_mask": "does not take key_mask: it has to see every token",
    "rotary": "does not take rotary: set rotary: false",
    "cu_seqlens": "does not take cu_seqlens: do not pack sequences (separate_documents: false)",
    "share": "does not take share: train without sequence parallelism (sequence_parallel_size: 1)",
    "state": "cannot generate: it has no continue_from; leave out predict and TextSamples",
}
"""Error for each optional input that a kind does not support, with the remedy."""


class Projections(NamedTuple):
    """Projections of a different module, used in place of the layer's own; see :mod:`lightning_mhla.swap`.

    Attributes:
        split: function from tokens ``[B, N, dim]`` to q ``[B, N, H, Dk]``, k ``[B, N, Hkv, Dk]`` and v ``[B, N, Hkv, Dv]``.
        merge: function from ``[B, N, H * Dv]`` to tokens.
        in_raster: whether ``split`` expects tokens in raster order, the order of the surrounding module, or in block order.
    """

    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    merge: Callable[[Tensor], Tensor]
    in_raster: bool = False


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of :meth:`Attention.attend`, tokens in block order.

    Attributes:
        x: tokens ``[B, N, dim]``.
        q: queries ``[B, N, H, Dk]``, before the feature map.
        k: keys ``[B, N, H, Dk]``, before the feature map; fewer heads if the kind does not repeat them (``repeats_heads``).
        v: values ``[B, N, H, Dv]``, with as many heads as ``k``.
        key_mask: ``[B, N]`` bool, False for hidden tokens, which are zero. None without a mask.
        rotary: angles by which q and k are rotated; None without rotary embedding.
        cu_seqlens: first token of each packed sequence (B = 1), followed by N; None for one sequence per row.
        share: part of a sequence that these tokens are, if processes share the sequence; None for complete sequences.
        placement: permutation of the tokens if :meth:`Attention.forward` is given their layout; None for the layer's own.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    rotary: Rotary | None = None
    cu_seqlens: Sequence[int] | None = None
    share: SequenceShare | None = None
    placement: Placement | None = None

    @property
    def turned(self) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated if there are angles."""
        return (self.q, self.k) if self.rotary is None else (self.rotary.turn(self.q), self.rotary.turn(self.k))
