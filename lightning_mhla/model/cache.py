"""State of a model between the steps of autoregressive generation, with one entry for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class GenerationCache:
    """Generation states of all layers of a :class:`lightning_mhla.Backbone`, updated in place as tokens are generated.

    The state of a linear attention layer has a constant size. The state of an MHLA layer with dense mixing coefficients grows
    by one key-value matrix per block of tokens, and the state of a softmax layer by one key and one value per token.

    Args:
        depth: number of layers.

    Attributes:
        layers: list with the generation state of the attention in each layer; all entries are None before the first token.
        columns: number of token positions in each row of the batch so far, padding included.
    """

    is_compileable = is_croppable = False  # read by transformers' generate

    def __init__(self, depth: int) -> None:
        self.layers: list[Any] = [None] * depth
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of token positions in each row so far, padding included.

        transformers' ``generate`` calls this method.

        Args:
            layer_idx: number of the layer; ignored, because all layers have the same number of positions.
        """
        return self.columns

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens so far in each row, without padding; empty before the first token."""
        return () if self.layers[0] is None else self.layers[0].lengths

    def select(self, rows: Tensor | Sequence[int]) -> None:
        """Select rows of the batch, in place, for example the surviving beams of a beam search.

        Args:
            rows: indices of rows; an index may occur several times.
        """
        indices = rows if isinstance(rows, Tensor) else torch.tensor(list(rows))
        self.layers = [None if state is None else state.select(indices) for state in self.layers]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the batch as :meth:`select` does, under the name that transformers' beam search calls."""
        self.select(beam_idx)

    @property
    def bytes(self) -> int:
        """Memory of all states, in bytes."""
        return sum(state.bytes for state in self.layers if state is not None)
