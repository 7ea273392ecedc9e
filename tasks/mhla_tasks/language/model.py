"""The causal language model: transformers' interface on the shared backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from lightning_mhla import Backbone, GenerationCache
from lightning_mhla.sequence import SequenceShare
from mhla_tasks.language.config import MHLAConfig
from mhla_tasks.language.loss import IGNORED, linear_cross_entropy, token_losses


@dataclass
class LanguageModelOutput(ModelOutput):
    """What :class:`MHLAForCausalLM` gives.

    Attributes:
        loss: mean cross-entropy in nats per token, with labels.
        logits: ``[B, N, V]``; None with labels, so that those of a whole batch are never stored.
        cache_params: the state after these tokens, with ``use_cache``.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache_params: GenerationCache | None = None


class MHLAForCausalLM(PreTrainedModel, GenerationMixin):
    """Language model with mhla, linear or softmax attention; generates with a state in place of a key-value cache.

    Rows of a batch may be padded at their left or right, or anywhere: ``attention_mask`` says what is real, and every row
    is moved to its first real token inside, so that it gives what it gives alone.
    """

    config_class = MHLAConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    _is_stateful = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["mixing"]
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
            key_value_heads=config.key_value_heads,
            key_width=config.key_width,
            value_width=config.value_width,
        )
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

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
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        cache_params: GenerationCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        logits_to_keep: int = 0,
        loss_reduction: Literal["mean", "none"] = "mean",
        return_dict: bool | None = None,
        share: SequenceShare | None = None,
    ) -> LanguageModelOutput | tuple[Any, ...]:
        """Logits of the next token, or the loss where there are labels.

        Args:
            input_ids: ``[B, N]`` int64. With ``cache_params``, the tokens that follow.
            attention_mask: ``[B, N]``, or ``[B, total]`` whose last N columns count: 0 marks padding. None for no padding.
            inputs_embeds: ``[B, N, dim]`` in place of ``input_ids``.
            labels: ``[B, N]``, the tokens themselves (they are shifted inside); -100 does not count.
            shift_labels: ``[B, N]``, what each token should be followed by, in place of ``labels``.
            cache_params: state of earlier tokens; it goes on in place.
            use_cache: whether a state is made and given back.
            cu_seqlens: ``[S + 1]``: sequences packed into the one row (B = 1), first token of each and N at the end.
            logits_to_keep: give the logits of so many last real tokens of each row; 0 for all tokens.
            loss_reduction: ``"mean"`` of the tokens that count, or ``"none"``: ``[B, N]``, without a gradient.
            return_dict: False for a tuple.
            share: for training and its validation: ``input_ids`` are this process's tokens of longer sequences, and
                ``shift_labels`` what they should be followed by; the loss is of these tokens.

        Raises:
            ValueError: for an empty prompt, an unknown token, or more tokens than the mixing reaches to.
        """
        if share is not None and (shift_labels is None or attention_mask is not None):
            raise ValueError("with share, give shift_labels (the next token may be another process's), and no padding")
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError("attention_mask pads rows and cu_seqlens packs one; give one of the two")
        x = self._embed(input_ids, inputs_embeds)
        real, order = _real_tokens(attention_mask, x)
        if order is not None:
            x = _rows(x, order)
        if labels is not None and shift_labels is None:
            shift_labels = _following(labels, real)
        counts = (x.shape[1],) * x.shape[0] if order is None else tuple(real.sum(1).tolist())
        cache = cache_params
        if cache is None and use_cache and shift_labels is None:
            cache = GenerationCache(self.config.depth)
        hidden = self._read(x, counts, cache, cu_seqlens, share)
        if logits_to_keep and shift_labels is None:
            hidden = _last_rows(hidden, counts, logits_to_keep)
        elif order is not None:
            hidden = _rows(hidden, order.argsort(1))
        if shift_labels is None:
            output = LanguageModelOutput(logits=self.head(hidden), cache_params=cache)
        else:
            compute = linear_cross_entropy if loss_reduction == "mean" else token_losses
            loss = compute(hidden.flatten(0, 1), self.head.weight, shift_labels.flatten())
            loss = loss if loss_reduction == "mean" else loss.view(shift_labels.shape)
            output = LanguageModelOutput(loss=loss, cache_params=cache)
        return output.to_tuple() if return_dict is False else output

    def _read(
        self,
        x: Tensor,
        counts: Sequence[int],
        cache: GenerationCache | None,
        cu_seqlens: Sequence[int] | Tensor | None,
        share: SequenceShare | None,
    ) -> Tensor:
        """What goes into the head, of rows whose ``counts`` real tokens come first; the state goes on with them."""
        _check_counts(cache, counts)
        if cache is None:
            return self.backbone(x, cu_seqlens=cu_seqlens, share=share)
        if cu_seqlens is not None:
            raise ValueError("packed sequences (cu_seqlens) have no common state; leave cu_seqlens or use_cache out")
        return self.backbone.next_tokens(x, cache, counts)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache_params: GenerationCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = True,
        **_: Any,
    ) -> dict[str, Any]:
        """The prompt first, then what the state has not seen; without ``use_cache`` always everything."""
        common = {"attention_mask": attention_mask, "use_cache": use_cache, "logits_to_keep": 1}
        if cache_params is not None:
            new = input_ids[:, -1:] if inputs_embeds is not None else input_ids[:, cache_params.columns :]
            if new.shape[1] == 0:
                raise ValueError(
                    f"the state is of {cache_params.columns} tokens, but input_ids holds {input_ids.shape[1]}; give all "
                    "of them, those that the state has seen included, and at least one more"
                )
            return {"input_ids": new, "cache_params": cache_params, **common}
        if inputs_embeds is not None:
            return {"inputs_embeds": inputs_embeds, **common}
        return {"input_ids": input_ids, **common}

    def generate(self, inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
        """See transformers. Prompts are checked before anything is computed, and padded rows come back padded left.

        Raises:
            ValueError: for an empty prompt, an unknown token, or more tokens than the mixing reaches to.
        """
        prompt = inputs if inputs is not None else options.get("input_ids")
        if prompt is not None:
            _check_tokens(prompt, self.config.vocab_size)
            mask = options.get("attention_mask")
            longest = prompt.shape[1] if mask is None else int(mask.sum(1).max())
            self._check_length(longest, prompt.shape[1], options)
            if mask is not None and not bool(mask[:, -1].all()):
                order = mask.bool().to(torch.int8).argsort(dim=1, stable=True)
                prompt, options["attention_mask"] = prompt.gather(1, order), mask.gather(1, order)
            options.pop("input_ids", None)
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
            _check_tokens(input_ids, self.config.vocab_size)
        return self.embedding(input_ids)


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(f"the prompt is empty: tokens have shape {list(tokens.shape)}; give at least one token")
    least, most = (int(x) for x in tokens.aminmax())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise ValueError(
            f"token {wrong} is not in the vocabulary of {vocabulary}; the text was encoded with the tokenizer of another "
            "model"
        )


def _check_counts(cache: GenerationCache | None, counts: Sequence[int]) -> None:
    lengths = cache.lengths if cache is not None and cache.lengths else (0,) * len(counts)
    if len(lengths) != len(counts):
        raise ValueError(f"the state is of {len(lengths)} rows, but there are {len(counts)}")
    empty = [row for row, (before, count) in enumerate(zip(lengths, counts, strict=True)) if before + count == 0]
    if empty:
        raise ValueError(f"the prompt of row {empty[0]} is empty: its attention_mask is 0 everywhere")


def _real_tokens(attention_mask: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """``[B, N]`` bool, and the order that puts each row's real tokens first; None where nothing moves."""
    if attention_mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device), None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != x.shape[0] or attention_mask.shape[1] < x.shape[1]:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} does not fit tokens {list(x.shape[:2])}")
    real = attention_mask[:, -x.shape[1] :].bool()
    if bool(real.all()):
        return real, None
    return real, (~real).to(torch.int8).argsort(dim=1, stable=True)


def _rows(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def _last_rows(hidden: Tensor, counts: Sequence[int], number: int) -> Tensor:
    """The last ``number`` tokens of rows whose ``counts`` real ones come first."""
    if len(set(counts)) == 1:
        return hidden[:, max(0, counts[0] - number) : counts[0]]
    last = torch.tensor(counts, device=hidden.device)[:, None] - number + torch.arange(number, device=hidden.device)
    return _rows(hidden, last.clamp(min=0))


def _following(labels: Tensor, real: Tensor) -> Tensor:
    """The token after each, where both are real."""
    following, counts = labels[:, 1:], real[:, 1:] & real[:, :-1]
    return nn.functional.pad(following.masked_fill(~counts, IGNORED), (0, 1), value=IGNORED)


AutoConfig.register("mhla", MHLAConfig)
AutoModelForCausalLM.register(MHLAConfig, MHLAForCausalLM)
