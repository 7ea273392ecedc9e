"""The causal language model: transformers' interface on the shared backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from lightning_mhla import Backbone, Block, GenerationCache
from lightning_mhla.attention.features import LearnedFeatures
from lightning_mhla.attention.head_decay import HeadDecay, HeadScale
from lightning_mhla.attention.mixing import MixingCoefficients
from lightning_mhla.attention.rows import packed_bounds, real_tokens, rows_in_order
from lightning_mhla.attention.sequence import SequenceShare
from lightning_mhla.attention.short_conv import ShortConvolution
from lightning_mhla.attention.windowed import FarWeight
from mhla_tasks.language.config import MHLAConfig
from mhla_tasks.language.loss import IGNORED, linear_cross_entropy, token_losses
from mhla_tasks.language.padding import check_counts, check_tokens, following_tokens, row_positions

DRAWN = (MixingCoefficients, nn.RMSNorm, ShortConvolution, HeadDecay, HeadScale, LearnedFeatures, FarWeight)
"""Modules that draw their own weights."""


@dataclass
class LanguageModelOutput(ModelOutput):
    """Outputs of :class:`MHLAForCausalLM`.

    Attributes:
        loss: mean cross-entropy in nats per token, with labels.
        logits: ``[B, N, V]``; None with ``skip_logits``, so that those of a whole batch are never stored.
        past_key_values: the state after these tokens, with ``use_cache``.
        hidden_states: with ``output_hidden_states``: what goes into each layer, and what goes into the head.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: GenerationCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class MHLABlock(GradientCheckpointingLayer, Block):
    """A layer that transformers can recompute in the backward pass."""


class ForwardOptions(TypedDict, total=False):
    """Further arguments of :meth:`MHLAForCausalLM.forward`; Trainer would take some of them for columns of the data.

    Attributes:
        shift_labels: ``[B, N]``, the token that follows each one, in place of ``labels``; no logits are given with them.
        num_items_in_batch: divide the sum of the losses by it, not by the number of labels (gradient accumulation).
        loss_reduction: ``none`` gives the loss of each token, ``[B, N]``.
        skip_logits: whether to leave the logits out; None for exactly with ``shift_labels``.
        share: see :class:`lightning_mhla.attention.sequence.SequenceShare`.
        output_attentions: what peft passes on; there are none.
    """

    shift_labels: Tensor | None
    num_items_in_batch: Tensor | int | None
    loss_reduction: Literal["mean", "none"]
    skip_logits: bool | None
    share: SequenceShare | None
    output_attentions: bool | None


class MHLAForCausalLM(PreTrainedModel, GenerationMixin):
    """Language model with mhla, linear or softmax attention; generates with a state in place of a key-value cache.

    Rows of a batch may be padded at their left or right, or anywhere: ``attention_mask`` says what is real, and every row
    is moved to its first real token inside, so that it gives what it gives alone.
    """

    config_class = MHLAConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules: ClassVar[list[str]] = ["MHLABlock"]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}
    config: MHLAConfig

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
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if any(isinstance(module, MixingCoefficients) for module in self.modules()):
            self._keep_in_fp32_modules_strict = {"mixing"}
        self.post_init()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing; see :meth:`MHLAConfig.register_for_auto_class`."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, DRAWN):
            module.reset_parameters()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        assert isinstance(value, nn.Embedding)
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        assert isinstance(new_embeddings, nn.Linear)
        self.head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # transformers would put in a cache of keys and values

    def extend(self, tokens: int) -> None:
        """Take sequences of ``tokens`` tokens; dense mixing is continued by :func:`mhla_kernels.extend_mixing`."""
        self.backbone.extend(tokens)
        self.config.context = max(tokens, self.config.context)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> LanguageModelOutput | tuple[Any, ...]:
        """Logits of the next token, and the loss where there are labels.

        Args:
            input_ids: ``[B, N]``.
            attention_mask: ``[B, columns]``, 0 for padding on either side; with a state, of the columns that it has seen too.
            position_ids: ``[B, N]``, what rotary turns by; None counts the real tokens of each row. In one row without
                padding and state, positions that start again begin a document of its own (as ``cu_seqlens``).
            past_key_values: the state to continue from; these tokens change it in place.
            inputs_embeds: ``[B, N, dim]`` in place of ``input_ids``.
            labels: ``[B, N]`` int64, aligned with the tokens; those of the next token count, ``-100`` is left out.
            use_cache: give the state after these tokens back.
            output_hidden_states: give what goes into each layer, and into the head.
            return_dict: False for a tuple.
            logits_to_keep: number of last columns, or indices of columns, to compute logits of; 0 for all.
            cu_seqlens: ``[S + 1]``, first token of each document packed in the one row, and N.
            kwargs: see :class:`ForwardOptions`.

        Raises:
            ValueError: for inputs that do not fit together.
            TypeError: for an argument that does not exist.
        """
        if unknown := set(kwargs) - set(ForwardOptions.__annotations__):
            raise TypeError(f"forward() got unexpected arguments {sorted(unknown)}")
        if kwargs.get("output_attentions"):
            raise ValueError("the model keeps no attention matrices: leave output_attentions out")
        shift_labels, share = kwargs.get("shift_labels"), kwargs.get("share")
        if share is not None and (shift_labels is None or attention_mask is not None):
            raise ValueError("with share, give shift_labels (the next token may be another process's), and no padding")
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError("attention_mask pads rows and cu_seqlens packs one; give one of the two")
        x = self._embed(input_ids, inputs_embeds)
        if position_ids is not None and cu_seqlens is None and attention_mask is None and past_key_values is None:
            cu_seqlens = packed_bounds(position_ids, x)
            use_cache = use_cache and cu_seqlens is None
        real, counts, order = real_tokens(attention_mask, x)
        inside, inverse = (x, None) if order is None else (rows_in_order(x, order), order.argsort(1))
        positions = row_positions(position_ids, x, order)
        if labels is not None and shift_labels is None:
            shift_labels = following_tokens(labels, real)
        cache = past_key_values
        if cache is None and use_cache and shift_labels is None:
            cache = GenerationCache(self.config.depth)
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] | None = [] if keep else None
        hidden = self._read(inside, counts, cache, cu_seqlens, share, positions, states)
        hidden = hidden if inverse is None else rows_in_order(hidden, inverse)
        if states is not None:
            inner = states[1:-1] if inverse is None else [rows_in_order(state, inverse) for state in states[1:-1]]
            states = [x, *inner, hidden]
        skip = kwargs.get("skip_logits")
        if skip is None:
            skip = labels is None and shift_labels is not None
        last = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = LanguageModelOutput(
            loss=None if shift_labels is None else self._loss(hidden, shift_labels, kwargs),
            logits=None if skip else self.head(hidden[:, last]),
            past_key_values=cache,
            hidden_states=None if states is None else tuple(states),
        )
        return output.to_tuple() if return_dict is False else output

    def _loss(self, hidden: Tensor, shift_labels: Tensor, options: ForwardOptions) -> Tensor:
        """Mean cross-entropy, or that of each token; without the logits of a whole batch unless adapters need them."""
        mean = options.get("loss_reduction", "mean") == "mean"
        rows, targets = hidden.flatten(0, 1), shift_labels.flatten()
        if mean and targets.device.type == "cpu" and (counts := targets != IGNORED).sum() < len(targets) // 2:
            rows, targets = rows[counts], targets[counts]  # elsewhere the device would have to be waited for
        if type(self.head) is nn.Linear:
            compute = linear_cross_entropy if mean else token_losses
            loss = compute(rows, self.head.weight, targets)
        else:  # what peft put in its place adds to its weight
            reduction = "mean" if mean else "none"
            logits = self.head(rows).float()
            loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)
        items = options.get("num_items_in_batch")
        if mean and items is not None:
            loss = loss * (targets != IGNORED).sum() / items
        return loss if mean else loss.view(shift_labels.shape)

    def _read(
        self,
        x: Tensor,
        counts: Sequence[int],
        cache: GenerationCache | None,
        cu_seqlens: Sequence[int] | Tensor | None,
        share: SequenceShare | None,
        positions: Tensor | None,
        states: list[Tensor] | None,
    ) -> Tensor:
        """Inputs of the head for rows whose ``counts`` real tokens come first; the state takes them in."""
        check_counts(cache, counts)
        if cache is None:
            return self.backbone(x, cu_seqlens=cu_seqlens, share=share, positions=positions, states=states)
        if cu_seqlens is not None:
            raise ValueError("packed sequences (cu_seqlens) have no common state; leave cu_seqlens or use_cache out")
        return self.backbone.next_tokens(x, cache, counts, positions, states)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: GenerationCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The prompt first, then what the state has not seen; without ``use_cache`` always everything."""
        if past_key_values is not None and next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"the state is of {past_key_values.columns} tokens, but input_ids holds {input_ids.shape[1]}; give all "
                "of them, those that the state has seen included, and at least one more"
            )
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length,
            past_key_values,
            attention_mask,
            inputs_embeds,
            is_first_iteration,
            **kwargs,
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
    ) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = GenerationCache(self.config.depth)

    def generate(self, inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
        """See transformers. Prompts are checked before anything is computed, and padded rows come back padded left.

        Raises:
            ValueError: for an empty prompt, an unknown token, or more tokens than the mixing reaches to.
        """
        prompt = options.pop("input_ids", None) if inputs is None else inputs
        mask, embedded = options.get("attention_mask"), options.get("inputs_embeds")
        if prompt is not None:
            check_tokens(prompt, self.config.vocab_size)
            longest = prompt.shape[1] if mask is None else int(mask.sum(1).max())
            self._check_length(longest, prompt.shape[1], options)
        if mask is not None and not bool(mask[:, -1].all()):
            order = mask.bool().to(torch.int8).argsort(dim=1, stable=True)
            options["attention_mask"] = mask.gather(1, order)
            prompt = prompt if prompt is None else prompt.gather(1, order)
            if embedded is not None:
                options["inputs_embeds"] = rows_in_order(embedded, order)
            if options.get("position_ids") is not None:
                options["position_ids"] = options["position_ids"].expand(mask.shape).gather(1, order)
        return super().generate(prompt, *args, **options)

    def _check_length(self, longest: int, columns: int, options: dict[str, Any]) -> None:
        """``longest`` prompt, ``columns`` with its padding, which is what ``max_length`` counts from."""
        limit = self.backbone.max_tokens
        if limit is None:
            return
        config = options.get("generation_config") or self.generation_config
        new = options.get("max_new_tokens") or (None if options.get("max_length") else config.max_new_tokens)
        if new is None:
            new = max((options.get("max_length") or config.max_length or 0) - columns, 1)
        if longest + new - 1 > limit:  # nothing follows the last token
            raise ValueError(
                f"a prompt of {longest} tokens and {new} new ones are more than the {limit} that the mixing "
                f"coefficients reach to; shorten them, or call model.extend({longest + new}) first"
            )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is not None:
            return inputs_embeds
        assert input_ids is not None
        if input_ids.device.type == "cpu":  # elsewhere the check would wait for the device; generate() does it there
            check_tokens(input_ids, self.config.vocab_size)
        return self.embedding(input_ids)


AutoConfig.register("mhla", MHLAConfig)
AutoModelForCausalLM.register(MHLAConfig, MHLAForCausalLM)
