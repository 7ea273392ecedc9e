"""Attention behind transformers' attention interface, with a state in transformers' cache; imports transformers.

Every replaced module has a configuration of its own whose ``_attn_implementation`` is :data:`NAME`; the others go on with
theirs. The interface is given queries, keys and values; a hook hands on the module's input, which gates need, and the cache.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

from lightning_mhla.attention import Attention, Projections
from lightning_mhla.attention.rows import packed_bounds, real_tokens, rows_in_order

NAME = "lightning_mhla"
"""Name of the attention function."""


class Call(NamedTuple):
    """One call of an attention module.

    Attributes:
        x: its input ``[B, N, dim]``.
        cache: the state of this layer, before these tokens; None without a cache.
    """

    x: Tensor
    cache: StateLayer | None


def install(module: Any, attention: Attention) -> None:
    """Let ``attention`` take the place of the attention function of ``module``."""
    module.config = copy.copy(module.config)
    module.config._attn_implementation = NAME
    module.swapped = attention
    module.register_forward_pre_hook(_keep_call, with_kwargs=True)


def _keep_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0] if args else kwargs["hidden_states"]
    cache = kwargs.get("past_key_values")
    module.call = Call(x, None if cache is None else state_layer(cache, module.layer_idx))


class StateLayer(CacheLayerMixin):
    """A layer of transformers' cache that holds the state of :meth:`Attention.continue_from`, no keys and values.

    Attributes:
        state: after the tokens so far; None at the start.
        columns: tokens so far, padding included.
        kept: whether the state was made: training does not need it.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.columns = 0
        self.kept = True

    @override
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is to be made."""

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the tokens; the attention function takes them into the state."""
        self.columns += key_states.shape[-2]
        return key_states, value_states

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    @override
    def get_seq_length(self) -> int:
        return self.columns

    @override
    def get_max_length(self) -> int:
        return -1

    @override
    def reset(self) -> None:
        self.state, self.columns, self.kept = None, 0, True

    @override
    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, repeats allowed."""
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.state is not None:
            self.state = self.state.select(torch.arange(len(self.state.lengths)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: tokens cannot be taken out of a state.

        Raises:
            ValueError: for any number but 0.
        """
        if tokens_to_remove:
            raise ValueError(
                "a state cannot forget its last tokens: assisted generation and contrastive search need a softmax model"
            )


def state_layer(cache: Cache, index: int) -> StateLayer:
    """The layer of ``cache`` that holds a state; it takes the place of an empty one.

    Raises:
        ValueError: for a cache of another kind, and for one that another model filled.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, StateLayer):
        return layer
    if type(layer) is not DynamicLayer:
        raise ValueError(
            f"swapped attention keeps a state in DynamicCache, not in the {type(layer).__name__} of "
            f"{type(cache).__name__}; leave cache_implementation out"
        )
    if layer.get_seq_length():
        raise ValueError("the cache holds keys and values of other attention; begin with an empty one")
    cache.layers[index] = state = StateLayer()
    return state


def swapped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of ours as an attention function of transformers.

    Args:
        module: the attention module.
        query: ``[B, H, N, Dk]``, turned by its positions.
        key: ``[B, Hkv, N, Dk]``, of these tokens only.
        value: ``[B, Hkv, N, Dv]``.
        attention_mask: ``[B, columns]``, or ``[B, 1, N, columns]`` as boolean or as what is added to scores; None for none.
        options: of transformers' functions: ``scaling`` and ``position_ids`` are used.

    Returns:
        ``[B, N, H * Dv]``, and None for the weights.

    Raises:
        ValueError: for a mask that hides more than padding and later tokens, and for a state that was not kept.
    """
    (x, cache), attention = module.call, module.swapped
    module.call = None  # nothing of a call is kept
    query = query * (options["scaling"] * query.shape[-1] ** 0.5)
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    bounds = None
    if (position_ids := options.get("position_ids")) is not None and (cache is None or cache.state is None):
        bounds = packed_bounds(position_ids, x)
    mask = None if bounds is not None else key_mask(attention_mask, x)
    real, counts, order = real_tokens(mask, x)
    if order is not None:
        x, inverse = rows_in_order(x, order), order.argsort(dim=1)
        heads = [rows_in_order(tensor.flatten(2), order).unflatten(2, tensor.shape[2:]) for tensor in heads]
    host = Projections(lambda _: (heads[0], heads[1], heads[2]), lambda out: out)
    if cache is None or bounds is not None or (module.training and torch.is_grad_enabled()):
        if cache is not None:
            _check_new(cache, x)
            cache.kept = False
        visible = None
        if any(count < x.shape[1] for count in counts):
            visible = real if order is None else real.gather(1, order)
        out = attention(x, visible, cu_seqlens=bounds, projections=host)
    else:
        if not cache.kept:
            raise ValueError("the cache was filled in training or with packed documents, which keep no state")
        out, cache.state = attention.next_tokens(x, cache.state, counts, projections=host)
    return (out if order is None else rows_in_order(out, inverse)), None


def _check_new(cache: StateLayer, x: Tensor) -> None:
    if cache.columns > x.shape[1]:
        raise ValueError("training and packed documents cannot continue a cache; begin without one")


def key_mask(attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """``[B, N]`` bool: which of these tokens are real; None where all are.

    Raises:
        ValueError: for a mask that hides more than padding and later tokens.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:
        return attention_mask[:, -x.shape[1] :].bool()
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    last = visible[:, 0, -1]
    real = last[:, -x.shape[1] :]
    position = torch.arange(visible.shape[-1], device=x.device)
    causal = position <= position[-x.shape[1] :, None]
    wanted = last[:, None] & causal
    if not bool((visible[:, 0] == wanted)[real].all()):
        raise ValueError(
            "the attention mask hides more than padding and later tokens, and swapped attention knows no other masks"
        )
    return real.expand(x.shape[0], -1)


ALL_ATTENTION_FUNCTIONS.register(NAME, swapped_attention)
