"""State of a model between calls while it generates: that of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class GenerationCache:
    """States of all layers of a :class:`lightning_mhla.Backbone`, changed in place as tokens arrive.

    A state of mhla and linear attention has a size of its own; keys and values of softmax attention grow with the tokens.

    Attributes:
        layers: the state of each layer; None before any token.
        columns: columns of the batch so far, padding included.
    """

    is_compileable = is_croppable = False  # asked for by transformers' generate

    def __init__(self, depth: int) -> None:
        self.layers: list[Any] = [None] * depth
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, padding included; asked for by transformers' generate."""
        return self.columns

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens so far in each row; empty before any."""
        return () if self.layers[0] is None else self.layers[0].lengths

    def select(self, rows: Tensor | Sequence[int]) -> None:
        """Keep other rows, for example the beams that survive: ``rows`` are indices, repeats allowed."""
        chosen = rows if isinstance(rows, Tensor) else torch.tensor(list(rows))
        self.layers = [None if state is None else state.select(chosen) for state in self.layers]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """:meth:`select`, under the name by which transformers' beam search calls it."""
        self.select(beam_idx)

    @property
    def bytes(self) -> int:
        """Memory of all states."""
        return sum(state.bytes for state in self.layers if state is not None)
