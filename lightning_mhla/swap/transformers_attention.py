"""Attention behind transformers' attention interface, with a state in transformers' cache; imports transformers.

Every replaced module has a configuration of its own whose ``_attn_implementation`` is :data:`NAME`; the others keep
theirs. The interface is given queries, keys and values; a hook hands on the module's input, which gates need, and the cache.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

from lightning_mhla.attention import Attention, Projections
from lightning_mhla.attention.rows import real_tokens, rows_in_order

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
    if module.config._attn_implementation != NAME:  # what was replaced is asked for
        return
    if kwargs.get("cache") is not None:
        raise ValueError("swapped attention has no paged keys and values: use generate, not continuous batching")
    x = args[0] if args else kwargs["hidden_states"]
    cache = kwargs.get("past_key_values")
    module.call = Call(x, None if cache is None else state_layer(cache, module.layer_idx))


class StateLayer(CacheLayerMixin):
    """A layer of transformers' cache that holds the state of :meth:`Attention.continue_from`, no keys and values.

    Attributes:
        state: after the tokens so far; None at the start.
        columns: tokens so far, padding included.
        kept: whether the state was made: training does not need it.
        kind: attention kind that made it.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.columns = 0
        self.kept = True
        self.kind: str | None = None

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
        raise ValueError(
            "the cache holds keys and values of other attention (another model's, or those of prefix tuning); begin with an "
            "empty one"
        )
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
        ValueError: for a mask that hides more than padding and later tokens, documents that are packed beside padding or in
            several rows, more tokens than dense coefficients reach to, and a state that was not kept.
    """
    (x, cache), attention = module.call, module.swapped
    module.call = None  # nothing of a call is kept
    _check_length(attention, x.shape[1] if cache is None else cache.columns)
    query = query * (options["scaling"] * query.shape[-1] ** 0.5)
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    bounds = documents(options.get("position_ids"), attention_mask, x)
    mask = key_mask(attention_mask, x, cache) if bounds is None else None
    real, counts, order = real_tokens(mask, x)
    if order is not None:
        x, inverse = rows_in_order(x, order), order.argsort(dim=1)
        heads = [rows_in_order(tensor.flatten(2), order).unflatten(2, tensor.shape[2:]) for tensor in heads]
    host = Projections(lambda _: (heads[0], heads[1], heads[2]), lambda out: out)
    if cache is None or bounds is not None or (module.training and torch.is_grad_enabled()):
        if cache is not None:
            if cache.columns > x.shape[1]:
                raise ValueError("training and packed documents cannot continue a cache; begin without one")
            cache.kept = False
        visible = None
        if any(count < x.shape[1] for count in counts):
            visible = real if order is None else real.gather(1, order)
        out = attention(x, visible, cu_seqlens=bounds, projections=host)
    else:
        if not cache.kept:
            raise ValueError("the cache was filled in training or with packed documents, which keep no state")
        if cache.state is not None and cache.kind != attention.config.kind:
            raise ValueError(f"the state is of attention kind {cache.kind!r}, not {attention.config.kind!r}")
        out, cache.state = attention.next_tokens(x, cache.state, counts, projections=host)
        cache.kind = attention.config.kind
    return (out if order is None else rows_in_order(out, inverse)), None


def _check_length(attention: Attention, tokens: int) -> None:
    limit = attention.max_tokens
    if limit is not None and tokens > limit:
        raise ValueError(
            f"{tokens} tokens are more than the {limit} that dense coefficients were made for (max_position_embeddings); "
            'swap with mixing="exponential", which takes any number'
        )


def documents(position_ids: Tensor | None, attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """``cu_seqlens`` of documents packed in the one row; None where nothing is packed.

    As in transformers, a document begins where a position does not follow the one before it.

    Args:
        position_ids: ``[B, N]`` or ``[1, N]``; None for none.
        attention_mask: as for :func:`swapped_attention`.
        x: ``[B, N, dim]``.

    Raises:
        ValueError: for documents in one of several rows, or beside padding.
    """
    if position_ids is None or x.shape[1] < 2 or _counts_up(position_ids):
        return None
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        real: Tensor | None = attention_mask[:, -x.shape[1] :].bool()
    else:
        real = _own_keys(attention_mask, x)
    if real is not None:
        starts = starts & real[:, 1:] & real[:, :-1]
    if not bool(starts.any()):
        return None
    if x.shape[0] != 1 or (real is not None and not bool(real.all())):
        raise ValueError(
            "position_ids that start again pack documents in a row, which needs a batch of one row without padding, not "
            f"{list(x.shape[:2])} tokens"
        )
    (first,) = starts[0].nonzero(as_tuple=True)
    return F.pad(F.pad(first + 1, (1, 0)), (0, 1), value=x.shape[1])


_counting: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Positions by tensor: its version, and whether they count up; the layers of a model are all given the same one."""


def _counts_up(position_ids: Tensor) -> bool:
    """Whether each position follows the one before it; tensors without values are taken to."""
    if not _has_values(position_ids):
        return True
    version = 0 if position_ids.is_inference() else position_ids._version
    known = _counting.get(position_ids)
    if known is None or known[0] != version:
        known = (version, bool((position_ids[:, 1:] == position_ids[:, :-1] + 1).all()))
        _counting[position_ids] = known
    return bool(known[1])


def _has_values(x: Tensor) -> bool:
    """Whether a tensor can be read: none of the meta device, and no fake one."""
    return type(x) is Tensor and not x.is_meta


def _own_keys(attention_mask: Any, x: Tensor) -> Tensor | None:
    """``[B, N]``: which of these tokens the mask lets see themselves; None without a mask."""
    if attention_mask is None:
        return None
    return _visible(attention_mask)[:, 0, :, -x.shape[1] :].diagonal(dim1=1, dim2=2)


def _visible(attention_mask: Any) -> Tensor:
    """``[B, heads or 1, N, columns]`` bool."""
    if not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"swapped attention does not know masks of {type(attention_mask).__name__}; set_attn_implementation of the "
            "model to sdpa or eager"
        )
    return attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0


def key_mask(attention_mask: Any, x: Tensor, cache: StateLayer | None = None) -> Tensor | None:
    """``[B, N]`` bool: which of these tokens are real; None where all are.

    Args:
        attention_mask: as for :func:`swapped_attention`.
        x: ``[B, N, dim]``.
        cache: the state before these tokens, whose columns already count them.

    Raises:
        ValueError: for a mask that hides more than padding and later tokens, or tokens that the state holds.
    """
    if attention_mask is None or (isinstance(attention_mask, Tensor) and not _has_values(attention_mask)):
        return None
    tokens = x.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        last = attention_mask.bool()
    else:
        visible = _visible(attention_mask)
        last = visible[:, 0, -1]
        position = torch.arange(visible.shape[-1], device=x.device)
        wanted = (last[:, None] & (position <= position[-tokens:, None]))[:, None]
        padding = ~last[:, None, -tokens:, None] & (visible.all(-1, keepdim=True) | ~visible.any(-1, keepdim=True))
        if not bool(((visible == wanted) | padding).all()):
            raise ValueError(
                "the attention mask hides more than padding and later tokens, and swapped attention knows no other masks"
            )
    if cache is not None and cache.state is not None and last.shape[1] > tokens:
        seen = tuple(last[:, :-tokens].sum(1).tolist())
        if last.shape[1] == cache.columns and seen != tuple(cache.state.lengths):
            raise ValueError(
                f"the attention mask has {list(seen)} real tokens before these, but the state holds {cache.state.lengths}: "
                "tokens that were read cannot be hidden"
            )
    return last[:, -tokens:].expand(x.shape[0], -1)


ALL_ATTENTION_FUNCTIONS.register(NAME, swapped_attention)
