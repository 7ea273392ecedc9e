"""Generation state of an MHLA model, with the interface of transformers' caches."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from lightning_mhla import GenerationCache


class StateCache(GenerationCache, Cache):
    """Generation states of all layers, in a class that transformers and peft recognize as a cache.

    The model sets the states itself as it reads tokens. Operations of transformers' caches that remove tokens or add keys and
    values, such as :meth:`crop` and :meth:`update`, raise ValueError.

    Args:
        depth: number of layers.
    """

    def __init__(self, depth: int) -> None:
        Cache.__init__(self, layers=[])
        GenerationCache.__init__(self, depth)

    @property
    def is_initialized(self) -> bool:
        """Whether the generation state has seen any tokens."""
        return self.columns > 0

    @property
    def batch_size(self) -> int:
        """Number of rows in the batch; -1 before the first tokens."""
        return len(self.lengths) or -1

    max_batch_size = batch_size

    @property
    def max_cache_len(self) -> int:
        """Maximum number of tokens that the cache can hold for each batch row: -1, because a generation state has no limit."""
        return -1

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the maximum number of tokens in each batch row: -1 in every layer, because a state has no limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the width of the attention mask for the next ``query_length`` tokens, and the index of its first column, 0.

        The mask has a column for each token position that the state has already read, and for each of the next tokens.
        """
        return self.columns + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the generation state has seen any tokens; the arguments are ignored."""
        return self.is_initialized

    def reset(self) -> None:
        """Clear the states of all layers, so that the cache has seen no tokens."""
        self.layers = [None] * len(self.layers)
        self.columns = 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the generation states of the batch rows at ``indices``, ``[n]`` int64, in this order."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat the generation state of every batch row ``repeats`` times, with the copies next to each other."""
        self.select(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError if tokens are to be removed, which a generation state does not support.

        Args:
            tokens_to_remove: number of tokens to remove, which transformers passes as a negative integer; 0 does nothing.
        """
        if tokens_to_remove:
            raise ValueError(f"crop({tokens_to_remove}): a state cannot remove tokens; compute it again")

    def activate_past_recording(self) -> NoReturn:
        """Raise ValueError, because a generation state cannot drop tokens, as assisted decoding would require."""
        raise ValueError("a state cannot remove tokens, which assisted decoding needs; generate without an assistant")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ValueError, because a generation state does not store keys and values."""
        raise ValueError("the model keeps a state in place of keys and values, and cannot take them")

    early_initialization = update
    update_conv_state = update
    update_recurrent_state = update


def check_cache(cache: Any) -> None:
    """Raise ValueError if a cache is not a generation state, for example if it is a cache of keys and values.

    Args:
        cache: value of the argument ``past_key_values``; None is accepted.
    """
    if cache is not None and not isinstance(cache, GenerationCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, but the model keeps a state in place of keys and values: "
            "leave it out, or give what the model returned. Prefix tuning, which trains keys and values, is not supported; "
            "train a prompt (PromptTuningConfig, PromptEncoderConfig) or LoRA"
        )
