"""Attention behind transformers' attention interface, with a state in transformers' cache; imports transformers.

Every replaced module has a configuration of its own whose ``_attn_implementation`` is :data:`NAME`; the others keep
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

from lightning_mhla.attention import Attention, BlockLayout, Projections
from lightning_mhla.attention.rows import padding_last, real_tokens, rows_in_order
from lightning_mhla.swap.host import TokenGrid, fit
from lightning_mhla.swap.transformers_masks import (
    GIVEN,
    check_nothing_hidden,
    check_values,
    documents,
    padding_mask,
    real_of_decoder,
)
from lightning_mhla.system.torch_private import is_fake

NAME = "lightning_mhla"
"""Name of the attention function."""


class AttentionCall(NamedTuple):
    """One call of an attention module.

    Attributes:
        x: its input ``[B, N, dim]``.
        cache: the state of this layer, before these tokens; None without a cache.
    """

    x: Tensor
    cache: StateLayer | None


def install(module: Any, attention: Attention, grid: TokenGrid | None = None) -> None:
    """Let ``attention`` take the place of the attention function of ``module``.

    Args:
        module: an attention module of transformers.
        attention: the new attention.
        grid: token grid of the present image; None for text.
    """
    module.config = copy.copy(module.config)
    module.config._attn_implementation = NAME
    module.swapped, module.grid, module.blocks, module.fitted = attention, grid, attention.layout.block_grid, None
    module.register_forward_pre_hook(_keep_call, with_kwargs=True)


def _keep_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if module.config._attn_implementation != NAME:  # what was replaced is asked for
        return
    if kwargs.get("cache") is not None:
        raise ValueError("swapped attention has no paged keys and values: use generate, not continuous batching")
    x = args[0] if args else kwargs["hidden_states"]
    cache = kwargs.get("past_key_values")
    module.call = AttentionCall(x, None if cache is None else state_layer(cache, module.layer_idx))


class Unread(NamedTuple):
    """Tokens that a state is still to be made of.

    Attributes:
        x: ``[B, N, dim]``.
        q: ``[B, N, H, Dk]``.
        k: ``[B, N, Hkv, Dk]``.
        v: ``[B, N, Hkv, Dv]``.
        real: ``[B, N]`` bool, tokens that are not padding; None for all.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor | None

    def select(self, rows: Tensor) -> Unread:
        """The tokens of other rows, ``rows`` being indices."""
        index = rows.to(self.x.device)
        x, q, k, v = (tensor.index_select(0, index) for tensor in (self.x, self.q, self.k, self.v))
        return Unread(x, q, k, v, None if self.real is None else self.real.index_select(0, index))


class StateLayer(CacheLayerMixin):
    """A layer of transformers' cache that holds the state of :meth:`Attention.continue_from`, no keys and values.

    Attributes:
        state: after the tokens so far; None at the start.
        columns: tokens so far, padding included.
        kept: whether the state was made: training does not need it.
        kind: attention kind that made it.
        unread: tokens that a graph took in with an empty cache, of which the next call makes the state: a graph cannot count
            the real tokens of its rows, and mostly nobody continues what it read.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.columns = 0
        self.kept = True
        self.kind: str | None = None
        self.unread: Unread | None = None

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
        self.state, self.columns, self.kept, self.unread = None, 0, True, None

    @override
    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, repeats allowed."""
        if self.unread is not None:
            self.unread = self.unread.select(indices)
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.unread is not None:
            rows = torch.arange(len(self.unread.x), device=self.unread.x.device)
            self.unread = self.unread.select(rows.repeat_interleave(repeats))
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
        ValueError: for a mask that hides more than padding (and later tokens, in a decoder), documents that are packed
            in several rows, biases in a mask, more tokens than dense coefficients reach to, a state that was not kept, and
            tokens that are not those of the image.
    """
    (x, cache), attention = module.call, module.swapped
    module.call = None  # nothing of a call is kept
    query = query * (options["scaling"] * query.shape[-1] ** 0.5)
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if module.grid is not None:
        return _of_an_image(module, x, heads, attention_mask), None
    if not attention.causal:
        return _of_a_whole_text(module, x, heads, _encoder_mask(attention_mask, options.get(GIVEN))), None
    _check_length(attention, x.shape[1] if cache is None else cache.columns)
    positions, given = options.get("position_ids"), options.get(GIVEN)
    by_positions = "flash" in module.host_config._attn_implementation
    bounds = documents(attention_mask, x, options.get("position_ids") if by_positions else None)
    if cache is not None and cache.unread is not None:
        cache.state, cache.unread = _state_of(attention, cache.unread), None
    real = real_of_decoder(attention_mask, x, cache, given, positions) if bounds is None else None
    if cache is None or bounds is not None or (module.training and torch.is_grad_enabled()):
        if cache is not None:
            if cache.columns > x.shape[1]:
                raise ValueError("training and packed documents cannot continue a cache; begin without one")
            cache.kept = False
        rows = real_first(real, x, heads)
        return rows.restored(attention(rows.x, rows.visible, cu_seqlens=bounds, projections=rows.projections)), None
    if not cache.kept:
        raise ValueError("the cache was filled in training or with packed documents, which keep no state")
    if cache.state is not None and cache.kind != attention.config.kind:
        raise ValueError(f"the state is of attention kind {cache.kind!r}, not {attention.config.kind!r}")
    cache.kind = attention.config.kind
    if cache.state is None and torch.compiler.is_compiling():
        attention.require("state")
        rows = real_first(real, x, heads)
        cache.unread = Unread(x, heads[0], heads[1], heads[2], real)
        return rows.restored(attention(rows.x, rows.visible, projections=rows.projections)), None
    out, cache.state = _continued(attention, cache.state, x, heads, real)
    return out, None


def _continued(
    attention: Attention, state: Any, x: Tensor, heads: list[Tensor], real: Tensor | None
) -> tuple[Tensor, Any]:
    """Outputs of the next tokens, and the state after them.

    Raises:
        ValueError: for padding among several tokens in a graph, which cannot count them.
    """
    last = real
    if last is not None and torch.compiler.is_compiling():
        if x.shape[1] != 1:
            raise ValueError(
                "a compiled graph cannot continue a cache with several tokens of padded rows: compile the steps of one token"
            )
        check_values(lambda: last, "a compiled step of generation was given padding: run it without torch.compile")
        real = None
    rows = real_first(real, x, heads)
    counts = (x.shape[1],) * x.shape[0] if rows.counts is None else rows.counts
    out, state = attention.next_tokens(rows.x, state, counts, projections=rows.projections)
    return rows.restored(out), state


def _state_of(attention: Attention, unread: Unread) -> Any:
    """The state after tokens that a graph took in; their outputs are known."""
    x, q, k, v, real = unread
    if real is not None and torch.compiler.is_compiling():
        return _state_outside(attention, unread)
    return _continued(attention, None, x, [q, k, v], real)[1]


@torch.compiler.disable(reason="the first step after padded rows counts their tokens; run it without fullgraph")
def _state_outside(attention: Attention, unread: Unread) -> Any:
    return _state_of(attention, unread)


class Rows(NamedTuple):
    """Tokens of which the real ones come first in every row.

    Attributes:
        x: ``[B, N, dim]``.
        projections: those of the host, for :meth:`Attention.forward`.
        visible: ``[B, N]`` bool; None where all tokens are real.
        counts: real tokens of each row; None where all tokens are real, and in graphs, which cannot count them.
        inverse: ``[B, N]``, the way back; None where nothing moved.
    """

    x: Tensor
    projections: Projections
    visible: Tensor | None
    counts: tuple[int, ...] | None
    inverse: Tensor | None

    def restored(self, out: Tensor) -> Tensor:
        """Outputs in the order that the tokens came in."""
        return out if self.inverse is None else rows_in_order(out, self.inverse)


def real_first(mask: Tensor | None, x: Tensor, heads: list[Tensor]) -> Rows:
    """Tokens, and queries, keys and values ``[B, N, H, D]`` of them, with padding moved to the right."""
    if mask is None:
        q, k, v = heads
        return Rows(x, Projections(lambda _: (q, k, v), lambda out: out), None, None, None)
    order: Tensor | None
    if torch.compiler.is_compiling() or is_fake(mask):  # what is not read may be anything
        real, counts, order = mask, None, padding_last(mask)
    else:
        real, counts, order = real_tokens(mask, x)
    visible, inverse = real if counts is None or min(counts) < x.shape[1] else None, None
    if order is not None:
        x, inverse = rows_in_order(x, order), order.argsort(dim=1)
        heads = [rows_in_order(tensor.flatten(2), order).unflatten(2, tensor.shape[2:]) for tensor in heads]
        visible = real.gather(1, order)
    q, k, v = heads
    return Rows(x, Projections(lambda _: (q, k, v), lambda out: out), visible, counts, inverse)


def _encoder_mask(attention_mask: Any, given: tuple[Any] | None) -> Any:
    """The mask that an encoder was called with where that is known, else the one that transformers made of it."""
    if given is None or (given[0] is not None and given[0].dim() != 2):
        return attention_mask
    return given[0]


def _of_a_whole_text(module: Any, x: Tensor, heads: list[Tensor], attention_mask: Any) -> Tensor:
    """Every token sees all; blocks are counted from a row's first real token."""
    rows = real_first(padding_mask(attention_mask, x), x, heads)
    size = module.swapped.config.block_size if module.swapped.uses_blocks else x.shape[1]
    layout = fit(module, module.swapped, BlockLayout((x.shape[1],), block_size=size), x.device)
    return rows.restored(module.swapped(rows.x, rows.visible, projections=rows.projections, layout=layout))


def _of_an_image(module: Any, x: Tensor, heads: list[Tensor], attention_mask: Any) -> Tensor:
    """Every token sees all; blocks are those of the present image."""
    layout = module.grid.layout(module.blocks, x.shape[1])
    check_nothing_hidden(attention_mask)
    q, k, v = heads
    host = Projections(lambda _: (q, k, v), lambda out: out, in_raster=True)
    out: Tensor = module.swapped(x, projections=host, layout=fit(module, module.swapped, layout, x.device))
    return out


def _check_length(attention: Attention, tokens: int) -> None:
    limit = attention.max_tokens
    if limit is not None and tokens > limit:
        raise ValueError(
            f"{tokens} tokens are more than the {limit} that dense coefficients were made for (max_position_embeddings); "
            'swap with mixing="exponential", which takes any number'
        )


ALL_ATTENTION_FUNCTIONS.register(NAME, swapped_attention)
