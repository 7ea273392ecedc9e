"""Inputs of an attention kind: tokens, queries, keys and values, and what is known of them."""

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
"""Abilities that a kind may lack, and the way out."""


class Projections(NamedTuple):
    """Functions from tokens to queries, keys and values and back, of another module; see :mod:`lightning_mhla.swap`.

    Attributes:
        split: tokens ``[B, N, dim]`` to q ``[B, N, H, Dk]``, k ``[B, N, Hkv, Dk]`` and v ``[B, N, Hkv, Dv]``.
        merge: ``[B, N, H * Dv]`` to tokens.
        in_raster: whether ``split`` is given tokens in raster order, as the module around has them; else in block order.
    """

    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    merge: Callable[[Tensor], Tensor]
    in_raster: bool = False


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of :meth:`Attention.attend`, tokens in block order.

    Attributes:
        x: tokens ``[B, N, dim]``.
        q: ``[B, N, H, Dk]``, not mapped.
        k: ``[B, N, H, Dk]``, not mapped. Fewer heads where the kind does not want them repeated (``repeats_heads``).
        v: ``[B, N, H, Dv]``, heads as for k.
        key_mask: ``[B, N]`` bool, False for hidden tokens, which are set to zero. None for none.
        rotary: angles that q and k turn by; None for none.
        cu_seqlens: first token of each packed sequence (B = 1), and N; None for one sequence in each row.
        share: part of a sequence that these tokens are, where processes share it; None for whole sequences.
        placement: places of the tokens where :meth:`Attention.forward` is given their layout; None for those of the layer's
            own.
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
        """Queries and keys turned by their positions."""
        return (self.q, self.k) if self.rotary is None else (self.rotary.turn(self.q), self.rotary.turn(self.k))
