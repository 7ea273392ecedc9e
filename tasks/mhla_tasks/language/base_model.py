"""Language model without a head, with transformers' interface on the shared backbone."""

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
    """Transformer layer that supports transformers' gradient checkpointing: the backward pass can recompute it."""


class BackboneOptions(TypedDict, total=False):
    """Additional keyword arguments of the forward pass of every MHLA language model.

    They are not named in the signature, because transformers' Trainer would treat some of them as columns of the data set.

    Attributes:
        cu_seq_lens_q: index of the first token of each of S packed documents, followed by the number of tokens,
            ``[S + 1]``. This is the name that ``DataCollatorWithFlattening`` of transformers uses for ``cu_seqlens``.
        cu_seq_lens_k: the same values as ``cu_seq_lens_q``.
        max_length_q: length of the longest document; ignored.
        max_length_k: length of the longest document; ignored.
        seq_idx: index of each token's document, ``[B, N]``, in place of ``cu_seqlens``.
        token_type_ids: token types that some tokenizers add; ignored.
        num_items_in_batch: number of labels in all batches whose gradients are accumulated. If given, the loss is the sum over
            the tokens divided by this number, instead of the mean.
        output_attentions: False or None; True is an error, because attention matrices are not available.
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
    """Hidden states of a batch and the generation state after it, returned by :meth:`EmbeddedBackbone.read`.

    Attributes:
        hidden: hidden states after the last norm, ``[B, N, dim]``.
        real: mask of non-padding tokens, ``[B, N]`` bool; None if no attention mask was given.
        cache: generation state after these tokens; None if it was not requested.
        states: input of each layer, followed by ``hidden``, each ``[B, N, dim]``; None if they were not requested.
    """

    hidden: Tensor
    real: Tensor | None
    cache: GenerationCache | None
    states: tuple[Tensor, ...] | None


class MHLAPreTrainedModel(PreTrainedModel):
    """Base class of all MHLA language models, with the settings that transformers needs to build, save and train them.

    Rows of a batch may have padding on the left, on the right or in between; ``attention_mask`` marks the real tokens. The
    forward pass moves the real tokens to the start of each row, so that a row gives the same result as without padding.
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
        """Do nothing, because a saved model already names its classes; see :meth:`MHLAConfig.register_for_auto_class`."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, DRAWN):
            module.reset_parameters()

    def post_init(self) -> None:
        """Finish the construction as transformers does, and mark mixing coefficients to stay in float32 in any model dtype."""
        if any(isinstance(module, MixingCoefficients) for module in self.modules()):
            self._keep_in_fp32_modules_strict = {"mixing"}
        super().post_init()


class EmbeddedBackbone(MHLAPreTrainedModel):
    """Base class with a token embedding and a backbone, for the MHLA language models with and without a head.

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
        """Replace the token embedding."""
        assert isinstance(value, nn.Embedding)
        self.embedding = value

    def extend(self, tokens: int) -> None:
        """Extend the model to longer sequences.

        Dense mixing coefficients are extrapolated by :func:`mhla_kernels.extend_mixing`.

        Args:
            tokens: number of tokens in the longest sequence.
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
        """Run embedding and backbone on a batch.

        Arguments that are not listed here are those of :meth:`MHLAForCausalLM.forward`.

        Args:
            share: part of each sequence that this process holds under sequence parallelism; None without it.
            options: additional arguments of the forward pass, some of which mark packed documents.

        Raises:
            ValueError: if the inputs contradict each other.
        """
        if options.get("output_attentions"):
            raise ValueError("the model keeps no attention matrices: leave output_attentions out")
        check_cache(past_key_values)
        x = self._embed(input_ids, inputs_embeds)
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
        """Run the backbone on packed documents.

        Args:
            x: embedded tokens, ``[B, N, dim]``.
            bounds: index of the first token of each document, followed by ``B * N``; indices count the tokens of all rows laid
                end to end.
            share: part of each sequence that this process holds under sequence parallelism; None without it.
            position_ids: positions of the tokens, ``[B, N]`` or ``[1, N]``; None to count from 0 in each document.
            states: list to which the input of each layer is added, ``[B, N, dim]``; None to omit them.

        Returns:
            Hidden states, ``[B, N, dim]``.
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
        """Count the real (non-padding) tokens of each row, and determine the order that puts them before the padding.

        The counts are needed to update a state and, on a CPU, to detect empty rows. Without a state, they are not computed on
        an accelerator, where reading them would wait for the device. They are not computed in a compiled graph either, which
        cannot depend on values.

        Args:
            attention_mask: mask of non-padding tokens, as in the forward pass; None if there is no padding.
            x: embedded tokens, ``[B, N, dim]``.
            cache: generation state to continue from; None to start from the first token.

        Returns:
            A tuple of two values:

            * Number of real tokens in each row; empty if not computed.
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
        """Return whether the forward pass returns a generation state.

        Args:
            use_cache: argument of the caller. None follows the configuration, but returns no state in training and in a
                compiled or exported graph.
            single: whether each row is a single sequence that one process holds completely, as a state requires.
        """
        if use_cache is not None:
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
    """Language model without a head; it returns hidden states.

    Its weights have the same names as in :class:`MHLAForCausalLM`, so that each class loads what the other saved.

    Args:
        config: sizes and attention options.
    """

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^head\.weight$"]

    def __init__(self, config: MHLAConfig) -> None:
        super().__init__(config)
        self.post_init()

    @classmethod
    def sharing(cls, model: EmbeddedBackbone) -> Self:
        """Build a model that shares the embedding and the backbone of ``model`` without copying them."""
        shared = cls.__new__(cls)
        PreTrainedModel.__init__(shared, model.config)
        shared.embedding, shared.backbone = model.embedding, model.backbone
        shared.training = model.training  # train() would set the shared modules' modes too
        return shared

    def get_decoder(self, *args: Any, **kwargs: Any) -> Self:
        """Return the model itself, which has no head to remove."""
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

        The arguments are those of :meth:`MHLAForCausalLM.forward`.

        Raises:
            ValueError: if the inputs contradict each other.
            TypeError: if an argument does not exist.
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
    """Raise TypeError if a keyword argument is not declared.

    Args:
        options: keyword arguments of a call, by name.
        names: TypedDict class that declares the accepted arguments.
    """
    if unknown := set(options) - set(names.__annotations__):
        raise TypeError(f"forward() got unexpected arguments {sorted(unknown)}")
