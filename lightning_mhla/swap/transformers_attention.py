"""Attention function that lets transformers models compute MHLA or another replacement, and the cache for its state.

Importing this module requires transformers. The function is registered in transformers' attention interface as
``lightning_mhla``. Each attention module that should use it gets its own copy of the model configuration, in which
``_attn_implementation`` has this name. The interface passes only queries, keys and values. A forward pre-hook therefore stores
the input of the module, which output gates need, and the cache.
"""

# Longer than other modules because the attention function and its cache layer depend on each other.

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
from lightning_mhla.swap.masks import check_values, has_no_values
from lightning_mhla.swap.transformers_masks import (
    GIVEN,
    check_nothing_hidden,
    documents,
    padding_mask,
    real_of_decoder,
)

NAME = "lightning_mhla"
"""Name of the attention function in transformers' registry. The name of the function for cross-attention begins with it."""


class AttentionCall(NamedTuple):
    """Input and cache of one call of an attention module, stored until the attention function runs.

    Attributes:
        x: input of the module, ``[B, N, C]`` for B rows of N tokens of width C.
        cache: cache layer with the recurrent state before these tokens; None without a cache.
    """

    x: Tensor
    cache: StateLayer | None


def install(module: Any, attention: Attention, grid: TokenGrid | None = None) -> None:
    """Make a transformers attention module compute a different attention with its existing projections, in place.

    Args:
        module: transformers attention module.
        attention: the new attention, without projections.
        grid: hook that records the token grid of the current image; None for text.
    """
    # A copy, because all modules of the model share one configuration.
    module.config = copy.copy(module.config)
    module.config._attn_implementation = NAME
    module.swapped, module.grid, module.blocks, module.fitted = attention, grid, attention.layout.block_grid, None
    module.register_forward_pre_hook(_keep_call, with_kwargs=True)


def refuse_weights(model: Any, args: Any, options: dict[str, Any]) -> None:
    """Forward pre-hook that rejects ``output_attentions``, because replaced layers do not compute attention weights.

    Args:
        model: transformers model that is called.
        args: positional arguments of the call; ignored.
        options: keyword arguments of the call.

    Raises:
        ValueError: if attention weights are requested, unless every replaced layer currently computes its original attention.
    """
    requested = options.get("output_attentions")
    if not (requested or (requested is None and getattr(model.config, "output_attentions", False))):
        return
    replaced = [module.config._attn_implementation for module in model.modules() if hasattr(module, "swapped")]
    if any(name is not None and name.startswith(NAME) for name in replaced):
        raise ValueError("output_attentions: replaced layers have no attention weights to return")


def _keep_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if module.config._attn_implementation != NAME:  # the module computes its original attention
        return
    if kwargs.get("cache") is not None:
        raise ValueError("swapped attention has no paged keys and values: use generate, not continuous batching")
    x = args[0] if args else kwargs["hidden_states"]
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))  # GPT-NeoX has another name for it
    module.call = AttentionCall(x, None if cache is None else state_layer(cache, module.layer_idx))


class Unread(NamedTuple):
    """Tokens that a cache layer has counted but that its recurrent state does not include yet.

    The letters in the shapes are: B rows, N tokens, width C; H query heads, Hkv key-value heads, key width Dk, value width Dv.

    Attributes:
        x: inputs of the attention module, ``[B, N, C]``.
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, Hkv, Dk]``.
        v: values, ``[B, N, Hkv, Dv]``.
        real: ``[B, N]`` bool, False for padding; None if no token is padding.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor | None

    def select(self, rows: Tensor) -> Unread:
        """Return the tokens of the given rows of the batch.

        Args:
            rows: row indices, 1D int64; an index may occur more than once.
        """
        index = rows.to(self.x.device)
        x, q, k, v = (tensor.index_select(0, index) for tensor in (self.x, self.q, self.k, self.v))
        return Unread(x, q, k, v, None if self.real is None else self.real.index_select(0, index))


class StateLayer(CacheLayerMixin):
    """Layer of a transformers cache that holds a recurrent state of linear attention in place of keys and values.

    Attributes:
        state: recurrent state after all cached tokens; None at the start.
        columns: number of cached tokens in each row, including padding.
        kept: whether a state is available for the cached tokens. False after training or packed documents, for which no state
            is computed.
        kind: attention kind that computed the state; None at the start.
        unread: tokens that are not part of the state yet; None if there are none. Compiled graphs that start a sequence store
            tokens here, because they cannot count the padding of each row. The next call adds these tokens to the state.
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
        """Do nothing, because a recurrent state needs no memory before the first tokens."""

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count new tokens, and return their keys and values unchanged; the attention function later updates the state.

        Args:
            key_states: keys of the new tokens, ``[B, H, N, D]`` for B rows of N tokens and H heads of width D.
            value_states: values of the new tokens, ``[B, H, N, D]``.
            args: further positional arguments that transformers passes; ignored.
            kwargs: further keyword arguments that transformers passes; ignored.
        """
        self.columns += key_states.shape[-2]
        return key_states, value_states

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Number of columns of the mask, and index of the first of them.
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
        """Keep only the given rows of the cached batch, in the given order.

        Args:
            indices: row indices, 1D int64; an index may occur more than once.
        """
        if self.unread is not None:
            self.unread = self.unread.select(indices)
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the cached batch ``repeats`` times; copies of the same row are adjacent."""
        if self.unread is not None:
            rows = torch.arange(len(self.unread.x), device=self.unread.x.device)
            self.unread = self.unread.select(rows.repeat_interleave(repeats))
        if self.state is not None:
            self.state = self.state.select(torch.arange(len(self.state.lengths)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Reject the removal of tokens, because a recurrent state cannot forget its last tokens.

        Raises:
            ValueError: if ``tokens_to_remove`` is not 0.
        """
        if tokens_to_remove:
            raise ValueError(
                "a state cannot forget its last tokens: assisted generation and contrastive search need a softmax model"
            )


def state_layer(cache: Cache, index: int) -> StateLayer:
    """Return the cache layer with the recurrent state of an attention module; create it if the cache has none yet.

    Args:
        cache: transformers cache. If its layer with this number is an empty key-value layer, that layer is replaced.
        index: number of the attention layer.

    Raises:
        ValueError: if the cache is not a ``DynamicCache``, or its layer already holds keys and values.
    """
    # a DynamicCache creates its layers on first use, so that of this module may not be there yet
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
            "the cache holds keys and values of different attention (of another model, or of prefix tuning); start with an "
            "empty cache"
        )
    cache.layers[index] = state = StateLayer()
    return state


def swapped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute the replacement attention of a module from its queries, keys and values, as a transformers attention function.

    The letters in the shapes are: B rows, N tokens, H query heads, Hkv key-value heads, key width Dk, value width Dv.
    ``columns`` is the number of cached tokens plus N.

    Args:
        module: transformers attention module that :func:`install` changed.
        query: queries, after the rotary embedding if the model has one, ``[B, H, N, Dk]``.
        key: keys, after the rotary embedding if the model has one, ``[B, Hkv, N, Dk]``. Unlike in softmax attention, keys of
            cached tokens are not included.
        value: values of the same tokens, ``[B, Hkv, N, Dv]``.
        attention_mask: mask ``[B, columns]``, nonzero or True for visible tokens; or mask ``[B, 1, N, columns]`` of pairs of
            queries and keys. The latter is either bool, True where a query may attend to a key, or added to the scores, with 0
            for visible keys and at most -1000 for hidden ones. None without a mask.
        options: further arguments that transformers passes. Three are used: ``scaling``, the factor on the scores;
            ``position_ids``, the positions of the tokens; and ``given_mask``, a one-item tuple that holds the
            ``attention_mask`` passed to the model, or None.

    Returns:
        Outputs ``[B, N, H, Dv]``, and None in place of attention weights.

    Raises:
        ValueError: if the mask adds biases to scores, or hides anything except padding and, in a decoder, later tokens. Also if
            documents are packed in a batch of several rows, a text is too long for dense mixing coefficients, the cache has no
            state to continue, or the tokens do not match the grid of the current image.
    """
    out = _attend(module, query, key, value, attention_mask, options)
    return out.unflatten(-1, (query.shape[1], -1)), None


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Compute the output of :func:`swapped_attention` with all heads concatenated, ``[B, N, H * Dv]``.

    The arguments are the same, except that ``options`` is a dict.
    """
    (x, cache), attention = module.call, module.swapped
    module.call = None  # a stored call would keep its activations in memory
    # the factor is 1 for the usual scaling by the root of the key width; models with a different scaling keep theirs
    query = query * (options["scaling"] * query.shape[-1] ** 0.5)
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if module.grid is not None:
        return _attend_image(module, x, heads, attention_mask)
    if not attention.causal:
        return _attend_text(module, x, heads, _encoder_mask(attention_mask, options.get(GIVEN)))
    # `update` has already counted these tokens, because transformers calls it before the attention function.
    _check_length(attention, x.shape[1] if cache is None else cache.columns)
    positions, original_mask = options.get("position_ids"), options.get(GIVEN)
    # Flash attention gets no mask, so that only the positions show packed documents.
    by_positions = "flash" in module.host_config._attn_implementation
    bounds = documents(attention_mask, x, positions if by_positions else None)
    if cache is not None and cache.unread is not None:
        cache.state, cache.unread = _state_of(attention, cache.unread), None
    real = real_of_decoder(attention_mask, x, cache, original_mask, positions) if bounds is None else None
    # nothing continues after training or packed documents, so that no state is computed for them
    if cache is None or bounds is not None or (module.training and torch.is_grad_enabled()):
        if cache is not None:
            if cache.columns > x.shape[1]:
                raise ValueError("training and packed documents cannot continue a cache; start without one")
            cache.kept = False
        rows = real_first(real, x, heads)
        return rows.restored(attention(rows.x, rows.visible, cu_seqlens=bounds, projections=rows.projections))
    if not cache.kept:
        raise ValueError("the cache was filled in training or with packed documents, which keep no state")
    if cache.state is not None and cache.kind != attention.config.kind:
        raise ValueError(f"the state is of attention kind {cache.kind!r}, not {attention.config.kind!r}")
    cache.kind = attention.config.kind
    if cache.state is None and torch.compiler.is_compiling():
        attention.require("state")
        rows = real_first(real, x, heads)
        cache.unread = Unread(x, heads[0], heads[1], heads[2], real)
        return rows.restored(attention(rows.x, rows.visible, projections=rows.projections))
    out, cache.state = _continued(attention, cache.state, x, heads, real)
    return out


def _continued(
    attention: Attention, state: Any, x: Tensor, heads: list[Tensor], real: Tensor | None
) -> tuple[Tensor, Any]:
    """Compute the attention output for the next tokens of a sequence, and update the recurrent state.

    Args:
        attention: the new attention.
        state: recurrent state before these tokens; None at the start.
        x: inputs of the attention module, ``[B, N, C]`` for B rows of N tokens of width C.
        heads: queries, ``[B, N, H, D]`` for H heads of width D; and keys and values, ``[B, N, Hkv, D]`` each, where Hkv is the
            number of key-value heads.
        real: ``[B, N]`` bool, False for padding; None if no token is padding.

    Returns:
        Outputs ``[B, N, H * D]``, and the recurrent state after these tokens.

    Raises:
        ValueError: if a compiled graph is called with a mask for more than one token, since it cannot count padding tokens.
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
    """Compute the recurrent state after the first tokens of a sequence, for which a compiled graph computed no state.

    Args:
        attention: the new attention.
        unread: the first tokens, with their queries, keys, values and padding mask.
    """
    x, q, k, v, real = unread
    if real is not None and torch.compiler.is_compiling():
        return _state_outside(attention, unread)
    return _continued(attention, None, x, [q, k, v], real)[1]


@torch.compiler.disable(reason="the first step after padded rows counts their tokens; run it without fullgraph")
def _state_outside(attention: Attention, unread: Unread) -> Any:
    return _state_of(attention, unread)


class Rows(NamedTuple):
    """Batch of token rows in which the padding of each row was moved to its end.

    Attributes:
        x: inputs of the attention module, ``[B, N, C]`` for B rows of N tokens of width C.
        projections: queries, keys and values of these tokens, as an argument of :meth:`Attention.forward`.
        visible: ``[B, N]`` bool, False for padding; None if no token is padding.
        counts: number of tokens in each row that are not padding; None if no token is padding, or if a compiled graph cannot
            count them.
        inverse: int64 indices ``[B, N]`` that restore the original order of each row's tokens; None if no token was moved.
    """

    x: Tensor
    projections: Projections
    visible: Tensor | None
    counts: tuple[int, ...] | None
    inverse: Tensor | None

    def restored(self, out: Tensor) -> Tensor:
        """Return a tensor ``[B, N, ...]`` with the tokens of each row in their original order."""
        return out if self.inverse is None else rows_in_order(out, self.inverse)


def real_first(mask: Tensor | None, x: Tensor, heads: list[Tensor]) -> Rows:
    """Move the padding of each row to its end, in the input tokens and in their queries, keys and values.

    Args:
        mask: ``[B, N]`` bool, False for padding; None if no token is padding.
        x: inputs of the attention module, ``[B, N, C]`` for B rows of N tokens of width C.
        heads: queries, ``[B, N, H, D]`` for H heads of width D; and keys and values, ``[B, N, Hkv, D]`` each, where Hkv is the
            number of key-value heads.

    Returns:
        The reordered batch, with the number of tokens of each row that are not padding. This number is None without a mask, and
        if the mask's values cannot be read, as in compiled graphs.
    """
    if mask is None:
        q, k, v = heads
        return Rows(x, Projections(lambda _: (q, k, v), lambda out: out), None, None, None)
    order: Tensor | None
    if has_no_values(mask):  # padding may be anywhere
        real, counts, order = mask, None, padding_last(mask)
    else:
        real, counts, order = real_tokens(mask, x)
    visible, inverse = real if counts is None or any(count < x.shape[1] for count in counts) else None, None
    if order is not None:
        x, inverse = rows_in_order(x, order), order.argsort(dim=1)
        heads = [rows_in_order(tensor.flatten(2), order).unflatten(2, tensor.shape[2:]) for tensor in heads]
        visible = real.gather(1, order)
    q, k, v = heads
    return Rows(x, Projections(lambda _: (q, k, v), lambda out: out), visible, counts, inverse)


def _encoder_mask(attention_mask: Any, original_mask: tuple[Any] | None) -> Any:
    """Choose the mask that shows which input tokens of a text encoder are padding.

    The function prefers the ``attention_mask`` that the model was called with. If this mask is not known, or does not have the
    shape ``[B, N]`` (rows, tokens), the function uses the mask that transformers derived from it.

    Args:
        attention_mask: mask that transformers passes to the attention module, in one of the forms that
            :func:`swapped_attention` accepts.
        original_mask: one-item tuple that holds the ``attention_mask`` that the model was called with, or None if it was called
            without one. None in place of the tuple if the argument is not known.

    Returns:
        The chosen mask; None if the model was called without a mask.
    """
    if original_mask is None or (original_mask[0] is not None and original_mask[0].dim() != 2):
        return attention_mask
    return original_mask[0]


def _attend_text(module: Any, x: Tensor, heads: list[Tensor], attention_mask: Any) -> Tensor:
    """Compute attention in a text encoder, in which every token attends to all others.

    The first block of a row begins at its first token that is not padding.

    Args:
        module: transformers attention module.
        x: inputs of the attention module, ``[B, N, C]`` for B rows of N tokens of width C.
        heads: queries, keys and values, ``[B, N, H, D]`` each for H heads of width D.
        attention_mask: mask ``[B, N]``, nonzero or True for tokens that are not padding; or mask ``[B, 1, N, N]`` of pairs of
            queries and keys. The latter is either bool, True where a query may attend to a key, or added to the scores, with 0
            for visible keys and at most -1000 for hidden ones. None without padding.

    Returns:
        Outputs ``[B, N, H * D]``.
    """
    rows = real_first(padding_mask(attention_mask, x), x, heads)
    size = module.swapped.config.block_size if module.swapped.uses_blocks else x.shape[1]
    layout = fit(module, module.swapped, BlockLayout((x.shape[1],), block_size=size), x.device)
    return rows.restored(module.swapped(rows.x, rows.visible, projections=rows.projections, layout=layout))


def _attend_image(module: Any, x: Tensor, heads: list[Tensor], attention_mask: Any) -> Tensor:
    """Compute attention in an image encoder, in which every patch attends to all others.

    Args:
        module: transformers attention module.
        x: inputs of the attention module, ``[B, N, C]`` for B images of N tokens of width C.
        heads: queries, keys and values, ``[B, N, H, D]`` each for H heads of width D.
        attention_mask: mask ``[B, 1, N, N]`` that hides no token: either bool and True everywhere, or added to the scores and 0
            everywhere. None without a mask.

    Returns:
        Outputs ``[B, N, H * D]``.
    """
    layout = module.grid.layout(module.blocks, x.shape[1], module.swapped.mixes_prefix)
    check_nothing_hidden(attention_mask)
    q, k, v = heads
    # The heads are projected already, in raster order. A kind with blocks permutes them instead of projecting in block order.
    host = Projections(lambda _: (q, k, v), lambda out: out, in_raster=True)
    return module.swapped(x, projections=host, layout=fit(module, module.swapped, layout, x.device))


def _check_length(attention: Attention, tokens: int) -> None:
    limit = attention.max_tokens
    if limit is not None and tokens > limit:
        raise ValueError(
            f"{tokens} tokens exceed the {limit} that the dense coefficients support (max_position_embeddings); "
            'swap with mixing="exponential", which supports any number'
        )


ALL_ATTENTION_FUNCTIONS.register(NAME, swapped_attention)
