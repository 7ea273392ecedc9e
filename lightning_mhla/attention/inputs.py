"""Inputs of an attention kind: tokens, queries, keys, values, masks and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

OPTIONAL = ("key_mask", "rotary", "cu_seqlens", "share")
"""Optional inputs, which a kind supports if its ``handles`` names them."""


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of :meth:`Attention.attend`, with tokens in the operator's order: block order, or raster order for a scan.

    Attributes:
        x: tokens ``[B, N, dim]``.
        q: queries ``[B, N, H, Dk]``, before the feature map.
        k: keys ``[B, N, H, Dk]``, before the feature map; ``Hkv`` heads if :meth:`Attention.operator_inputs` does
            not repeat them.
        v: values ``[B, N, H, Dv]``, with as many heads as ``k``.
        key_mask: ``[B, N]`` bool, False for hidden tokens, which are zero. None without a mask.
        rotary: angles by which q and k are rotated; None without rotary embedding.
        cu_seqlens: first token of each packed sequence (B = 1), followed by N; None for one sequence per row.
        share: part of each sequence that this process holds, if sequences are distributed over processes; None for complete
            sequences.
        placement: permutation of the tokens if :meth:`Attention.forward` was called with ``layout``; None for the permutation
            of the layer's own layout.
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
    def given(self) -> list[str]:
        """Names of the optional inputs that are not None."""
        return [name for name in OPTIONAL if getattr(self, name) is not None]

    def repeated(self, repeats: int) -> AttentionInputs:
        """Return inputs with every key and value head repeated ``repeats`` times in a row, once for each query head."""
        if repeats == 1:
            return self
        return replace(self, k=self.k.repeat_interleave(repeats, 2), v=self.v.repeat_interleave(repeats, 2))

    @property
    def turned(self) -> tuple[Tensor, Tensor]:
        """Queries and keys after rotary embedding, or unchanged if ``rotary`` is None."""
        return (self.q, self.k) if self.rotary is None else (self.rotary.turn(self.q), self.rotary.turn(self.k))
