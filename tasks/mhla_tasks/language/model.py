"""MHLA language model with an output head, as a causal language model of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from lightning_mhla import GenerationCache
from lightning_mhla.attention.rows import padding_last, rows_in_order
from lightning_mhla.attention.sequence import SequenceShare
from mhla_tasks.language.base_model import BackboneOptions, EmbeddedBackbone, MHLABlock, MHLAModel, check_options
from mhla_tasks.language.config import MHLAConfig
from mhla_tasks.language.lengths import warn_beyond_context, without_reminder
from mhla_tasks.language.loss import IGNORED, LOGITS, linear_cross_entropy, logits_cross_entropy, token_losses
from mhla_tasks.language.padding import check_tokens, following_tokens, in_graph
from mhla_tasks.language.state_cache import StateCache

__all__ = ["LanguageModelOutput", "MHLABlock", "MHLAForCausalLM"]


@dataclass
class LanguageModelOutput(ModelOutput):
    """Outputs of the forward pass of :class:`MHLAForCausalLM`.

    Attributes:
        loss: cross-entropy in nats: a scalar mean over the tokens, or ``[B, N]`` with ``loss_reduction="none"``; None without
            labels.
        logits: scores of the next token, ``[B, columns, V]``, for all N columns or those that ``logits_to_keep`` selects; None
            with ``skip_logits``, which saves their memory.
        past_key_values: generation state after these tokens; None without ``use_cache``.
        hidden_states: input of each layer, followed by the input of the output head, each ``[B, N, dim]``; None without
            ``output_hidden_states``.
        attentions: always None, because the model does not compute attention matrices.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: GenerationCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: None = None


class ForwardOptions(BackboneOptions, total=False):
    """Optional keyword arguments of the forward pass of :class:`MHLAForCausalLM`, in addition to the inherited ones.

    Attributes:
        shift_labels: target of each token, ``[B, N]`` int64, which is the token that follows it; an alternative to ``labels``.
        loss_reduction: ``"mean"`` (the default), or ``"none"`` for the loss of each token, ``[B, N]``.
        skip_logits: whether to omit the logits; None omits them if ``shift_labels`` is given instead of ``labels``.
        share: part of each sequence that this process holds under sequence parallelism; None without sequence parallelism.
    """

    shift_labels: Tensor | None
    loss_reduction: Literal["mean", "none"]
    skip_logits: bool | None
    share: SequenceShare | None


class MHLAForCausalLM(EmbeddedBackbone, GenerationMixin):
    """Causal language model that has any kind of attention and generates from a state instead of a key-value cache.

    Each row of a batch may have padding on the left, on the right or between its tokens; ``attention_mask`` marks the tokens
    that are not padding. The forward pass moves these tokens to the start of the row, so that the result is the same as without
    padding.

    Args:
        config: sizes and attention options.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}

    def __init__(self, config: MHLAConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    @property
    def base_model(self) -> MHLAModel:
        """The model without its output head; it shares the embedding and the backbone with this model."""
        return MHLAModel.sharing(self)

    def get_decoder(self, *args: Any, **kwargs: Any) -> MHLAModel:
        """Return the model without its output head; both models share their weights, and arguments are ignored."""
        return self.base_model

    def get_encoder(self, modality: str | None = None) -> MHLAForCausalLM:
        """Return this model itself, to tell the library peft that there is no separate encoder.

        peft calls this method for batches that use several adapters. ``modality`` is ignored.
        """
        return self

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer, which maps hidden states to logits."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer, which maps hidden states to logits, with ``new_embeddings``, an ``nn.Linear``."""
        assert isinstance(new_embeddings, nn.Linear)
        self.head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the default cache of transformers holds keys and values

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
        """Compute the logits of the next token and, if there are labels, the loss.

        Args:
            input_ids: token indices, ``[B, N]`` int64; None if ``inputs_embeds`` is given.
            attention_mask: mask of non-padding tokens, ``[B, columns]`` bool or int64, 0 for padding. With ``past_key_values``,
                it also covers the columns of earlier calls. None if there is no padding.
            position_ids: positions for rotary embeddings, ``[B, N]``; None counts the tokens of each row without padding. If
                there is neither padding nor a state, a token whose position is not above that of the previous token begins a
                new document, as with ``cu_seqlens``. An exported graph, which cannot depend on values, ignores such document
                starts.
            past_key_values: generation state to continue from, updated in place; None to start with the first token.
            inputs_embeds: embedded tokens, ``[B, N, dim]``; None if ``input_ids`` is given.
            labels: token indices, ``[B, N]`` int64, in the same columns as the tokens. The target of each token is the label in
                the next column; ``-100`` is ignored. None to compute no loss, unless ``kwargs`` has ``shift_labels``.
            use_cache: whether to return the state after these tokens. None follows the configuration, but returns no state in
                training, with labels, for packed documents, and in a compiled or exported graph. With gradient checkpointing in
                training, there is never a state.
            output_hidden_states: whether to return the input of each layer and of the output head; None follows the
                configuration.
            return_dict: whether to return a :class:`LanguageModelOutput` (None or True) or a tuple (False).
            logits_to_keep: number of columns at the end to compute logits for, or indices of the columns; 0 for all columns.
            cu_seqlens: index of the first token of each of S packed documents, followed by the number of tokens, ``[S + 1]``;
                None if each row is one document, or if ``position_ids`` or ``kwargs`` mark the documents.
            kwargs: additional arguments; see :class:`ForwardOptions`.

        Returns:
            Loss, logits ``[B, columns, V]``, generation state and hidden states. Those that do not apply are None; the tuple
            omits them.

        Raises:
            ValueError: if the inputs contradict each other, for example if both ``attention_mask`` and ``cu_seqlens`` are
                given.
            TypeError: if a keyword argument is unknown.
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
        logits = None if skip else self.head(hidden[:, last])
        every = logits if isinstance(logits_to_keep, int) and not logits_to_keep else None
        output = LanguageModelOutput(
            loss=None if shift_labels is None else self._loss(hidden, every, shift_labels, kwargs),
            logits=logits,
            past_key_values=tokens.cache,
            hidden_states=tokens.states,
        )
        return output.to_tuple() if return_dict is False else output

    def _loss(self, hidden: Tensor, logits: Tensor | None, shift_labels: Tensor, options: ForwardOptions) -> Tensor:
        """Compute the cross-entropy of the target tokens in nats: a scalar, or ``[B, N]`` with ``loss_reduction="none"``.

        Args:
            hidden: input of the output head, ``[B, N, dim]``.
            logits: output of the head, ``[B, N, V]``; None if it was not computed for all tokens. If it is None, large, float16
                or part of a compiled graph, the loss is computed from ``hidden``, without the logits of all tokens in memory.
                If the head has an adapter from the peft library, all logits are always used.
            shift_labels: target of each token, ``[B, N]`` int64; -100 is ignored.
            options: keyword arguments of the forward pass.
        """
        mean = options.get("loss_reduction", "mean") == "mean"
        plain = type(self.head) is nn.Linear  # peft's adapter adds to the product with the weight
        # A second product with the head costs time, and the softmax of many logits and its gradient cost memory. In float16,
        # gradients that are divided by the number of tokens before they are rounded could underflow.
        if plain and logits is not None and (in_graph() or logits.numel() > LOGITS or logits.dtype == torch.float16):
            logits = None
        rows, targets = (hidden if logits is None else logits).flatten(0, 1), shift_labels.flatten()
        # Skip ignored tokens only where they can be counted: on a device, the count would have to wait for the device, and a
        # graph cannot depend on it.
        can_count = mean and targets.device.type == "cpu" and not in_graph()
        if can_count and (counts := targets != IGNORED).sum() < len(targets) // 2:
            rows, targets = rows[counts], targets[counts]
        if plain and logits is None:
            compute = linear_cross_entropy if mean else token_losses
            loss = compute(rows, self.head.weight, targets)
        else:
            scores = (self.head(rows) if logits is None else rows).float()
            if mean:
                loss = logits_cross_entropy(scores, targets)
            else:
                loss = nn.functional.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="none")
        items = options.get("num_items_in_batch")
        if mean and items is not None:  # transformers' Trainer adds up the losses of the accumulated batches
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
        """Select the inputs of a generation step: the tokens after those in the state, or all tokens if there is no state.

        The arguments are those of transformers' method of this name.

        Returns:
            Keyword arguments of the forward pass.

        Raises:
            ValueError: if the generation state ``past_key_values`` has seen all tokens of ``input_ids``.
        """
        if past_key_values is not None and next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"the state has seen {past_key_values.columns} tokens, but input_ids holds {input_ids.shape[1]}; give all "
                "tokens, including those that the state has seen, and at least one more"
            )
        kwargs.pop("tokenizer", None)  # generate() would pass it to forward(), which rejects unknown arguments
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
        """Generate tokens as transformers does, after checking the prompts and moving their padding to the left.

        Args:
            inputs: token indices of the prompts, ``[B, N]`` int64; None if ``options`` has ``input_ids`` or ``inputs_embeds``.
            args: further positional arguments of transformers' ``generate``.
            options: keyword arguments of transformers' ``generate``.

        Returns:
            The result of transformers' ``generate``: by default, prompts and new tokens, ``[B, length]`` int64.

        Raises:
            ValueError: if a prompt is empty, a token is not in the vocabulary, or prompt and new tokens together exceed the
                sequence length that the mixing coefficients cover.
        """
        prompt = options.pop("input_ids", None) if inputs is None else inputs
        mask, embedded = options.get("attention_mask"), options.get("inputs_embeds")
        longest, columns = 0 if embedded is None else embedded.shape[1], 0
        if prompt is not None:
            check_tokens(prompt, self.config.vocab_size)
            columns = prompt.shape[1]
            longest = columns if mask is None else int(mask.sum(1).max())
            self._check_length(longest, columns, options)
        if mask is not None and not bool(mask[:, -1].all()):  # new tokens must follow the last real token of each row
            order = padding_last(~mask.bool())
            options["attention_mask"] = mask.gather(1, order)
            prompt = prompt if prompt is None else prompt.gather(1, order)
            if embedded is not None:
                options["inputs_embeds"] = rows_in_order(embedded, order)
            if options.get("position_ids") is not None:
                options["position_ids"] = options["position_ids"].expand(mask.shape).gather(1, order)
        with without_reminder():
            output = super().generate(prompt, *args, **options)
        sequences = output if isinstance(output, Tensor) else output.sequences
        warn_beyond_context(self, longest + sequences.shape[1] - columns - 1)  # the last new token is not an input
        return output

    def _check_length(self, longest: int, columns: int, options: dict[str, Any]) -> None:
        """Raise ValueError if prompt and new tokens together exceed the length that the mixing coefficients cover.

        Args:
            longest: number of tokens in the longest prompt, without padding.
            columns: number of columns of the prompts, with padding, which count toward ``max_length``.
            options: arguments of :meth:`generate`.
        """
        limit = self.backbone.max_tokens
        if limit is None:
            return
        config = options.get("generation_config") or self.generation_config
        new = options.get("max_new_tokens") or (None if options.get("max_length") else config.max_new_tokens)
        if new is None:
            new = max((options.get("max_length") or config.max_length or 0) - columns, 1)
        if longest + new - 1 > limit:  # the last new token is not an input
            raise ValueError(
                f"a prompt of {longest} tokens and {new} new ones are more than the {limit} that the mixing "
                f"coefficients cover; shorten them, or call model.extend({longest + new}) first"
            )
