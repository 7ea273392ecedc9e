"""The causal language model: transformers' interface on the shared backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from lightning_mhla import GenerationCache
from lightning_mhla.attention.rows import padding_last, rows_in_order
from lightning_mhla.attention.sequence import SequenceShare
from mhla_tasks.language.base_model import BackboneOptions, EmbeddedBackbone, MHLABlock, MHLAModel, check_options
from mhla_tasks.language.config import MHLAConfig
from mhla_tasks.language.loss import IGNORED, linear_cross_entropy, token_losses
from mhla_tasks.language.padding import check_tokens, following_tokens, in_graph
from mhla_tasks.language.state_cache import StateCache

__all__ = ["LanguageModelOutput", "MHLABlock", "MHLAForCausalLM"]


@dataclass
class LanguageModelOutput(ModelOutput):
    """Outputs of :class:`MHLAForCausalLM`.

    Attributes:
        loss: mean cross-entropy in nats per token, with labels.
        logits: ``[B, N, V]``; None with ``skip_logits``, so that those of a whole batch are never stored.
        past_key_values: the state after these tokens, with ``use_cache``.
        hidden_states: with ``output_hidden_states``: what goes into each layer, and what goes into the head.
        attentions: None; the model keeps no attention matrices.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: GenerationCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: None = None


class ForwardOptions(BackboneOptions, total=False):
    """Further arguments of :meth:`MHLAForCausalLM.forward`.

    Attributes:
        shift_labels: ``[B, N]``, the token that follows each one, in place of ``labels``; no logits are given with them.
        loss_reduction: ``none`` gives the loss of each token, ``[B, N]``.
        skip_logits: whether to leave the logits out; None for exactly with ``shift_labels``.
        share: see :class:`lightning_mhla.attention.sequence.SequenceShare`.
    """

    shift_labels: Tensor | None
    loss_reduction: Literal["mean", "none"]
    skip_logits: bool | None
    share: SequenceShare | None


class MHLAForCausalLM(EmbeddedBackbone, GenerationMixin):
    """Language model with mhla, linear or softmax attention; generates with a state in place of a key-value cache.

    Rows of a batch may be padded at their left or right, or anywhere: ``attention_mask`` says what is real, and every row
    is moved to its first real token inside, so that it gives what it gives alone.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}

    def __init__(self, config: MHLAConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    @property
    def base_model(self) -> MHLAModel:
        """The model without its head: the same embedding and backbone, not copies of them."""
        return MHLAModel.sharing(self)

    def get_decoder(self, *args: Any, **kwargs: Any) -> MHLAModel:
        """The model without its head."""
        return self.base_model

    def get_encoder(self, modality: str | None = None) -> MHLAForCausalLM:
        """The model itself, which means that it has no encoder; peft asks for it when adapters are mixed in a batch."""
        return self

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
            position_ids: ``[B, N]``, what rotary turns by; None counts the real tokens of each row. Without padding and
                state, positions that start again begin a document of its own (as ``cu_seqlens``), except in an exported
                graph, which cannot depend on their values.
            past_key_values: the state to continue from; these tokens change it in place.
            inputs_embeds: ``[B, N, dim]`` in place of ``input_ids``.
            labels: ``[B, N]`` int64, aligned with the tokens; those of the next token count, ``-100`` is left out.
            use_cache: give the state after these tokens back. None: as the configuration says, but not while training,
                with labels, for packed documents, or in a compiled or exported graph. Gradient checkpointing gives none.
            output_hidden_states: give what goes into each layer, and into the head.
            return_dict: False for a tuple.
            logits_to_keep: number of last columns, or indices of columns, to compute logits of; 0 for all.
            cu_seqlens: ``[S + 1]``, first token of each document packed in the one row, and N.
            kwargs: see :class:`ForwardOptions`.

        Raises:
            ValueError: for inputs that do not fit together.
            TypeError: for an argument that does not exist.
        """
        check_options(kwargs, ForwardOptions)
        shift_labels, share = kwargs.get("shift_labels"), kwargs.get("share")
        if share is not None and (shift_labels is None or attention_mask is not None):
            raise ValueError("with share, give shift_labels (the next token may be another process's), and no padding")
        if use_cache is None and (labels is not None or shift_labels is not None):
            use_cache = False
        tokens = self.read(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache, output_hidden_states,
            cu_seqlens, share, kwargs,
        )  # fmt: skip
        hidden = tokens.hidden
        if labels is not None and shift_labels is None:
            shift_labels = following_tokens(labels, tokens.real)
        skip = kwargs.get("skip_logits")
        if skip is None:
            skip = labels is None and shift_labels is not None
        last = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = LanguageModelOutput(
            loss=None if shift_labels is None else self._loss(hidden, shift_labels, kwargs),
            logits=None if skip else self.head(hidden[:, last]),
            past_key_values=tokens.cache,
            hidden_states=tokens.states,
        )
        return output.to_tuple() if return_dict is False else output

    def _loss(self, hidden: Tensor, shift_labels: Tensor, options: ForwardOptions) -> Tensor:
        """Mean cross-entropy, or that of each token; without the logits of a whole batch unless adapters need them."""
        mean = options.get("loss_reduction", "mean") == "mean"
        rows, targets = hidden.flatten(0, 1), shift_labels.flatten()
        # Elsewhere the device would have to be waited for, and a graph cannot depend on the number.
        known = mean and targets.device.type == "cpu" and not in_graph()
        if known and (counts := targets != IGNORED).sum() < len(targets) // 2:
            rows, targets = rows[counts], targets[counts]
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
        kwargs.pop("tokenizer", None)  # generate() hands it on to forward(), where it has no use
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
            model_kwargs["past_key_values"] = StateCache(self.config.depth)

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
            order = padding_last(~mask.bool())
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
