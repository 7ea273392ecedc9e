"""The model's state under the interface of transformers' caches."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from lightning_mhla import GenerationCache


class StateCache(GenerationCache, Cache):
    """States of all layers, recognised as a cache by transformers and peft.

    A state sums up the tokens that it has seen, so that it can neither be cropped nor take keys and values in.

    Args:
        depth: number of layers.
    """

    def __init__(self, depth: int) -> None:
        Cache.__init__(self, layers=[])
        GenerationCache.__init__(self, depth)

    @property
    def is_initialized(self) -> bool:
        """Whether the state has seen any tokens."""
        return self.columns > 0

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before any tokens."""
        return len(self.lengths) or -1

    max_batch_size = batch_size

    @property
    def max_cache_len(self) -> int:
        """-1: the state has no number of columns that it ends at."""
        return -1

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the state has no number of columns that it ends at."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of the mask of the next ``query_length`` tokens, and its first column."""
        return self.columns + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the state has seen any tokens."""
        return self.is_initialized

    def reset(self) -> None:
        """Forget all tokens."""
        self.layers = [None] * len(self.layers)
        self.columns = 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self.select(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Reject removing tokens, which a state cannot take back.

        Raises:
            ValueError: for any number but 0.
        """
        if tokens_to_remove:
            raise ValueError(f"crop({tokens_to_remove}): the state cannot take tokens back; compute it again")

    def activate_past_recording(self) -> NoReturn:
        """Reject the recording of earlier states, which assisted decoding asks for.

        Raises:
            ValueError: always.
        """
        raise ValueError("the state cannot take tokens back, which assisted decoding needs; generate without assistant")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Reject keys and values from outside.

        Raises:
            ValueError: always.
        """
        raise ValueError("the model keeps a state in place of keys and values, which cannot be put in")

    early_initialization = update
    update_conv_state = update
    update_recurrent_state = update


def check_cache(cache: Any) -> None:
    """Reject caches of keys and values.

    Args:
        cache: what the model is given as ``past_key_values``.

    Raises:
        ValueError: for anything but a state.
    """
    if cache is not None and not isinstance(cache, GenerationCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, but the model keeps a state in place of keys and values: "
            "leave it out, or give what the model returned. Prefix tuning, which trains keys and values, is not supported; "
            "train a prompt (PromptTuningConfig, PromptEncoderConfig) or LoRA"
        )
