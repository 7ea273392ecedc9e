"""Inputs of the attention computation: tokens, queries, keys, values, masks and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from mhla_kernels.checks import check_is_tensor
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
"""Error message, with a remedy, for each input that a kind of attention may not support."""

OPTIONAL = ("key_mask", "rotary", "cu_seqlens", "share")
"""Names of the optional inputs. A kind of attention lists the ones that it supports in its attribute ``handles``."""


def check_tokens(name: str, x: Tensor) -> None:
    """Raise ValueError unless tokens are ``[B, N, width]``. The message contains ``name``, the name of the argument."""
    check_is_tensor(name, x)
    if x.dim() != 3:
        raise ValueError(f"{name} is {list(x.shape)}; it must be [batch, tokens, width]")


def check_mask(name: str, mask: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless a mask is None or ``[B, N]`` bool for tokens ``x``, ``[B, N, ...]``.

    The message contains ``name``, the name of the argument.
    """
    if mask is None:
        return
    check_is_tensor(name, mask)
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise ValueError(
            f"{name} is {list(mask.shape)} {mask.dtype}; it must be bool {list(x.shape[:2])}, True for tokens"
        )


def check_state(state: Any, state_class: type, kind: str | None) -> None:
    """Check that a generation state was made by a layer of the same kind of attention.

    Args:
        state: state to check; None, which stands for the state before the first token, is always valid.
        state_class: class of the states of this kind.
        kind: name of the kind of attention of the layer.

    Raises:
        ValueError: if the state is of a different class or kind.
    """
    if state is not None and not (isinstance(state, state_class) and getattr(state, "kind", None) == kind):
        made = f"kind {state.kind!r}" if isinstance(getattr(state, "kind", None), str) else type(state).__name__
        raise ValueError(f"the state is of {made}, but the layer is of kind {kind!r}; give it a state that it returned")


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of :meth:`Attention.attend`: queries, keys and values, with optional masks and positions.

    The class attribute ``Order`` of the kind of attention decides the order of the tokens. By default they are in block order,
    in which the tokens of each block are contiguous.

    Attributes:
        x: tokens ``[B, N, dim]``.
        q: queries ``[B, N, H, Dk]``, before the feature map.
        k: keys ``[B, N, H, Dk]``, before the feature map. A kind that supports fewer key heads than query heads gets
            ``[B, N, Hkv, Dk]``.
        v: values ``[B, N, H, Dv]``, with as many heads as ``k``.
        key_mask: ``[B, N]`` bool, False for hidden tokens, which are zero in ``x``. None if no token is hidden.
        rotary: rotary angles of the tokens; None without rotary embedding.
        cu_seqlens: index of the first token of each packed sequence (B = 1), followed by N; None for one sequence in each row.
        share: part of each sequence that this process holds, if sequences are distributed over processes; None for complete
            sequences.
        placement: permutation of the tokens, if :meth:`Attention.forward` was called with ``layout``; None if the layer's own
            layout applies.
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
        """Names of the inputs among ``key_mask``, ``rotary``, ``cu_seqlens`` and ``share`` that are not None."""
        return [name for name in OPTIONAL if getattr(self, name) is not None]

    def repeated(self, repeats: int) -> AttentionInputs:
        """Return the inputs with ``repeats`` adjacent copies of each key head and value head.

        This gives every query head its own key head and value head.
        """
        if repeats == 1:
            return self
        return replace(self, k=self.k.repeat_interleave(repeats, 2), v=self.v.repeat_interleave(repeats, 2))

    @property
    def turned(self) -> tuple[Tensor, Tensor]:
        """Queries and keys after rotary embedding, in the shapes of ``q`` and ``k``; unchanged if ``rotary`` is None."""
        return (self.q, self.k) if self.rotary is None else (self.rotary.turn(self.q), self.rotary.turn(self.k))
