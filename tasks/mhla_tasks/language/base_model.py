"""MHLA language model without an output head, and the classes that it shares with the other MHLA language models.

The models have the interface of Hugging Face transformers, and run on :class:`lightning_mhla.Backbone`.
"""

# Longer than other modules because the arguments of the forward pass are documented in it.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from lightning_mhla import Backbone, Block, GenerationCache
from lightning_mhla.attention.base import Attention
from lightning_mhla.attention.features import LearnedFeatures
from lightning_mhla.attention.head_decay import HeadDecay, HeadScale
from lightning_mhla.attention.mixing import MixingCoefficients
from lightning_mhla.attention.rows import padding_last, places_padding_last, real_mask, real_tokens, rows_in_order
from lightning_mhla.attention.sequence import SequenceShare
from lightning_mhla.attention.short_conv import ShortConvolution
from lightning_mhla.attention.windowed import FarWeight
from mhla_tasks.language.config import MHLAConfig
from mhla_tasks.language.padding import (
    check_counts,
    check_length,
    check_tokens,
    document_bounds,
    in_graph,
    row_positions,
)
from mhla_tasks.language.state_cache import StateCache, check_cache

DRAWN = (MixingCoefficients, nn.RMSNorm, ShortConvolution, HeadDecay, HeadScale, LearnedFeatures, FarWeight)
"""Modules that initialize their own weights."""


class MHLABlock(GradientCheckpointingLayer, Block):
    """Transformer layer of the MHLA language models, with support for transformers' gradient checkpointing.

    With gradient checkpointing, the backward pass recomputes the activations of the layer instead of storing them.
    """


class BackboneOptions(TypedDict, total=False):
    """Optional keyword arguments that the forward pass of every MHLA language model accepts.

    The signature of the forward pass does not name them, because transformers' Trainer would treat some of them as columns of
    the data set.

    Attributes:
        cu_seq_lens_q: index of the first token of each of S packed documents, followed by the number of tokens, ``[S + 1]``.
            transformers' ``DataCollatorWithFlattening`` uses this name for the argument ``cu_seqlens`` of the forward pass.
        cu_seq_lens_k: the same values as ``cu_seq_lens_q``. Give both or neither.
        max_length_q: ignored. ``DataCollatorWithFlattening`` sets it to the length of the longest document.
        max_length_k: ignored, like ``max_length_q``.
        seq_idx: index of the packed document that each token belongs to, ``[B, N]``; an alternative to ``cu_seq_lens_q``.
        token_type_ids: ignored. Some tokenizers return it.
        num_items_in_batch: number of labels in all batches over which gradients are accumulated. If given, a model that
            computes a loss returns the sum of the token losses divided by this number; otherwise it returns their mean.
        output_attentions: must be False or None, because the model does not compute attention matrices.
    """

    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | Tensor | None
    max_length_k: int | Tensor | None
    seq_idx: Tensor | None
    token_type_ids: Tensor | None
    num_items_in_batch: Tensor | int | None
    output_attentions: bool | None


class HiddenTokens(NamedTuple):
    """Output of the backbone for a batch: hidden states, padding mask and generation state.

    Attributes:
        hidden: hidden states after the last norm, ``[B, N, dim]``.
        real: mask that is True for tokens and False for padding, ``[B, N]`` bool; None if no attention mask was given.
        cache: generation state after the last token, from which a later call can continue; None if it was not requested.
        states: input of each layer, followed by ``hidden``, each ``[B, N, dim]``; None if these were not requested.
    """

    hidden: Tensor
    real: Tensor | None
    cache: GenerationCache | None
    states: tuple[Tensor, ...] | None


class MHLAPreTrainedModel(PreTrainedModel):
    """Base class of all MHLA language models, with the settings that transformers needs to build, save and train them.

    Each row of a batch may have padding on the left, on the right or between its tokens; ``attention_mask`` marks the tokens
    that are not padding. The forward pass moves these tokens to the start of the row, so that the result is the same as without
    padding.
    """

    config_class = MHLAConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules: ClassVar[list[str]] = ["MHLABlock"]
    config: MHLAConfig

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing, because every saved model already records its classes for transformers' auto classes."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, DRAWN):
            module.reset_parameters()

    def post_init(self) -> None:
        """Finish the construction as transformers does, and keep the mixing coefficients in float32 in a model of any dtype."""
        if any(isinstance(module, MixingCoefficients) for module in self.modules()):
            self._keep_in_fp32_modules_strict = {"mixing"}
        super().post_init()


class EmbeddedBackbone(MHLAPreTrainedModel):
    """Base class of the MHLA models with and without an output head: a token embedding and a stack of transformer layers.

    Args:
        config: sizes and attention options.
    """

    def __init__(self, config: MHLAConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.backbone = Backbone(
            config.dim,
            config.depth,
            config.heads,
            (config.context,),
            config.layer_attention(),
            norm="rmsnorm",
            mlp="swiglu",
            mlp_ratio=config.mlp_width / config.dim,
            causal=True,
            bias=False,
            block=MHLABlock,
            key_value_heads=config.key_value_heads,
            key_width=config.key_width,
            value_width=config.value_width,
        )

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding with ``value``, which must be an ``nn.Embedding``."""
        assert isinstance(value, nn.Embedding)
        self.embedding = value

    def extend(self, tokens: int) -> None:
        """Extend the model to longer sequences, without changing its results for shorter ones.

        Dense mixing coefficients (one for each pair of blocks) are extrapolated to the additional blocks. The option
        ``context`` of the configuration is raised to ``tokens`` if it is smaller. The weights of a model that already supports
        ``tokens`` tokens are unchanged.

        Args:
            tokens: new maximum length of a sequence, in tokens.
        """
        self.backbone.extend(tokens)
        self.config.context = max(tokens, self.config.context)

    def read(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: GenerationCache | None,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        cu_seqlens: Sequence[int] | Tensor | None,
        share: SequenceShare | None,
        options: BackboneOptions,
    ) -> HiddenTokens:
        """Compute the hidden states of a batch, and the generation state after it if requested.

        Args:
            input_ids: token indices, ``[B, N]`` int64; None if ``inputs_embeds`` is given.
            inputs_embeds: embedded tokens, ``[B, N, dim]``; None if ``input_ids`` is given.
            attention_mask: mask of non-padding tokens, ``[B, columns]`` bool or int64, 0 for padding. With ``past_key_values``,
                it also covers the columns of earlier calls. None if there is no padding.
            position_ids: positions for rotary embeddings, ``[N]``, ``[1, N]`` or ``[B, N]``; None to count the tokens of each
                row, without padding. Positions that do not increase may also mark packed documents.
            past_key_values: generation state to continue from, updated in place; None to start with the first token.
            use_cache: whether to return the generation state; None to follow the configuration outside training.
            output_hidden_states: whether to return the input of each layer; None to follow the configuration.
            cu_seqlens: index of the first token of each of S packed documents, followed by the number of tokens, ``[S + 1]``;
                None if each row is one document, or if ``position_ids`` or ``options`` mark the documents.
            share: part of each sequence that this process holds under sequence parallelism; None without sequence parallelism.
            options: other keyword arguments of the forward pass, some of which also mark packed documents.

        Returns:
            Hidden states, padding mask, generation state and layer inputs.

        Raises:
            ValueError: if the inputs contradict each other, for example if both ``attention_mask`` and ``cu_seqlens`` are
                given.
        """
        attentions = options.get("output_attentions")
        if self.config.output_attentions if attentions is None else attentions:
            raise ValueError("the model keeps no attention matrices: leave output_attentions out")
        check_cache(past_key_values)
        x = self._embed(input_ids, inputs_embeds)
        # Otherwise positions may begin again for other reasons, such as padding, and do not mark packed documents.
        packs = attention_mask is None and past_key_values is None and share is None
        bounds = document_bounds(options, cu_seqlens, position_ids if packs else None, x)
        if bounds is not None and attention_mask is not None:
            raise ValueError("attention_mask pads rows and cu_seqlens packs one; give one of the two")
        if bounds is not None and (past_key_values is not None or use_cache):
            raise ValueError("packed sequences (cu_seqlens) have no common state; leave cu_seqlens or use_cache out")
        cache = past_key_values
        if cache is None and self._returns_state(use_cache, bounds is None and share is None):
            cache = StateCache(self.config.depth)
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] | None = [] if keep else None
        if bounds is not None:
            hidden = self._packed(x, bounds, share, position_ids, states)
            # The backbone's last entry precedes the final norm; transformers expects the normalized hidden states there.
            return HiddenTokens(hidden, None, None, None if states is None else (*states[:-1], hidden))
        real = None if attention_mask is None else real_mask(attention_mask, x)
        # A state must not absorb padding: the real tokens of each row come first, and the outputs go back to their columns.
        counts, order = self._order(attention_mask, x, cache)
        inside = x if order is None else rows_in_order(x, order)
        positions = row_positions(position_ids, x, order)
        if cache is None:
            hidden = self.backbone(inside, share=share, positions=positions, states=states)
        else:
            hidden = self.backbone.next_tokens(inside, cache, counts, positions, states)
        if order is not None:
            assert real is not None
            inverse = places_padding_last(real)
            hidden = rows_in_order(hidden, inverse)
            states = None if states is None else [rows_in_order(state, inverse) for state in states]
        return HiddenTokens(hidden, real, cache, None if states is None else (x, *states[1:-1], hidden))

    def _packed(
        self,
        x: Tensor,
        bounds: Sequence[int] | Tensor,
        share: SequenceShare | None,
        position_ids: Tensor | None,
        states: list[Tensor] | None,
    ) -> Tensor:
        """Run the backbone on packed documents, and return hidden states, ``[B, N, dim]``.

        Args:
            x: embedded tokens, ``[B, N, dim]``.
            bounds: index of the first token of each document, followed by ``B * N``. The indices count tokens in the
                concatenation of all rows.
            share: part of each sequence that this process holds under sequence parallelism; None without sequence parallelism.
            position_ids: positions of the tokens, ``[B, N]`` or ``[1, N]``; None to count from 0 in each document.
            states: list to which the input of each layer and the output of the last one are appended, ``[B, N, dim]`` each;
                None if these are not needed.
        """
        positions = None if position_ids is None else position_ids.expand(x.shape[:2]).flatten()
        row = x.flatten(0, 1)[None]
        hidden = self.backbone(row, cu_seqlens=bounds, share=share, positions=positions, states=states)
        if states is not None:
            states[:] = [state.view(x.shape) for state in states]
        return hidden.view(x.shape)

    def _order(
        self, attention_mask: Tensor | None, x: Tensor, cache: GenerationCache | None
    ) -> tuple[tuple[int, ...], Tensor | None]:
        """Count the non-padding tokens of each row, and find the order that puts them before the padding.

        The counts serve to update a generation state and to detect empty rows. Without a state, the tokens are
        counted only on a CPU and outside a compiled graph: on an accelerator, reading the counts would wait for the device, and
        a graph cannot depend on values.

        Args:
            attention_mask: mask of non-padding tokens, ``[B, columns]`` bool or int64, 0 for padding; None if there is no
                padding.
            x: embedded tokens, ``[B, N, dim]``.
            cache: generation state to continue from; None to start from the first token.

        Returns:
            A tuple of two values:

            * Number of non-padding tokens in each row; an empty tuple if they are not counted.
            * Indices of the tokens in the new order, ``[B, N]``; None to keep the order.
        """
        if cache is None and (in_graph() or x.device.type != "cpu"):
            return (), None if attention_mask is None else padding_last(real_mask(attention_mask, x))
        _, counts, order = real_tokens(attention_mask, x)
        check_counts(cache, counts)
        if cache is not None:
            check_length(cache, counts, self.backbone.max_tokens)
        return counts, order

    def _returns_state(self, use_cache: bool | None, single: bool) -> bool:
        """Decide whether the forward pass returns a generation state.

        Args:
            use_cache: value that the caller passed. True returns a state unless gradient checkpointing recomputes the layers in
                training. None follows the configuration, but returns no state in training, in a compiled or exported graph, or
                if a layer has attention that cannot continue from a state.
            single: whether each row is one sequence that this process holds completely; otherwise there is no state.
        """
        if use_cache is not None:
            # A recomputed layer would add the tokens to its state a second time.
            recomputes = self.training and any(block.gradient_checkpointing for block in self.backbone.layers)
            return use_cache and single and not recomputes
        if self.training or in_graph() or not single or not self.config.use_cache:
            return False
        return all(type(block.attn).continue_from is not Attention.continue_from for block in self.backbone.layers)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is not None:
            return inputs_embeds
        assert input_ids is not None
        # On an accelerator the check would wait for the device, so only generate() makes it; a graph cannot depend on values.
        if input_ids.device.type == "cpu" and not in_graph():
            check_tokens(input_ids, self.config.vocab_size)
        return self.embedding(input_ids)


class MHLAModel(EmbeddedBackbone):
    """MHLA language model that has no output head and returns hidden states instead of logits.

    Its weights have the same names as those of :class:`MHLAForCausalLM`, so that each of the two classes can load the weights
    that the other saved.

    Args:
        config: sizes and attention options.
    """

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^head\.weight$"]

    def __init__(self, config: MHLAConfig) -> None:
        super().__init__(config)
        self.post_init()

    @classmethod
    def sharing(cls, model: EmbeddedBackbone) -> Self:
        """Build a headless model from the embedding and the backbone of ``model``, which are shared instead of copied."""
        shared = cls.__new__(cls)
        PreTrainedModel.__init__(shared, model.config)
        shared.embedding, shared.backbone = model.embedding, model.backbone
        shared.training = model.training  # train() would also switch the mode of the shared modules
        return shared

    def get_decoder(self, *args: Any, **kwargs: Any) -> Self:
        """Return this model itself, because it has no output head to remove; arguments are ignored."""
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        **kwargs: Unpack[BackboneOptions],
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Compute the hidden states of a batch, ``[B, N, dim]``.

        Args:
            input_ids: token indices, ``[B, N]`` int64; None if ``inputs_embeds`` is given.
            attention_mask: mask of non-padding tokens, ``[B, columns]`` bool or int64, 0 for padding. With ``past_key_values``,
                it also covers the columns of earlier calls. None if there is no padding.
            position_ids: positions for rotary embeddings, ``[B, N]``; None to count the tokens of each row, without padding. If
                there is neither padding nor a state, a token whose position is not above that of the previous token begins a
                new document, as with ``cu_seqlens``.
            past_key_values: generation state to continue from, updated in place; None to start with the first token.
            inputs_embeds: embedded tokens, ``[B, N, dim]``; None if ``input_ids`` is given.
            use_cache: whether to return the state after these tokens. None follows the configuration, but returns no state in
                training, for packed documents, and in a compiled or exported graph. With gradient checkpointing in training,
                there is never a state.
            output_hidden_states: whether to return the input of each layer; None follows the configuration.
            return_dict: False to return a tuple, None or True to return an output object.
            cu_seqlens: index of the first token of each of S packed documents, followed by the number of tokens, ``[S + 1]``;
                None if each row is one document, or if ``position_ids`` or ``kwargs`` mark the documents.
            kwargs: additional arguments; see :class:`BackboneOptions`.

        Returns:
            Output object with the hidden states after the last norm, the generation state (None if ``use_cache`` returns none)
            and the inputs of the layers (None without ``output_hidden_states``). If ``return_dict`` is False, a tuple of the
            values that are not None.

        Raises:
            ValueError: if the inputs contradict each other, for example if both ``attention_mask`` and ``cu_seqlens`` are
                given.
            TypeError: if a keyword argument is unknown.
        """
        check_options(kwargs, BackboneOptions)
        tokens = self.read(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache, output_hidden_states,
            cu_seqlens, None, kwargs,
        )  # fmt: skip
        output = BaseModelOutputWithPast(
            last_hidden_state=tokens.hidden, past_key_values=tokens.cache, hidden_states=tokens.states
        )
        return output.to_tuple() if return_dict is False else output


def check_options(options: Any, names: Any) -> None:
    """Raise TypeError if a keyword argument of a forward pass is unknown.

    Args:
        options: keyword arguments of the forward pass, by name.
        names: TypedDict class whose fields are the accepted arguments.
    """
    if unknown := set(options) - set(names.__annotations__):
        raise TypeError(f"forward() got unexpected arguments {sorted(unknown)}")
