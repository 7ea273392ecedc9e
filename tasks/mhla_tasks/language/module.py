"""LightningModule for causal language models trained from scratch, either MHLA models or transformers models."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.attention import attention_per_layer
from lightning_mhla.checkpoints.pretrained import adopt, read_pretrained
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.language.causal import CausalLanguageModel
from mhla_tasks.language.config import MHLAConfig, default_attention, plain_attention
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.networks import build_network
from mhla_tasks.language.prompts import GenerationOptions
from mhla_tasks.language.vocabularies import pretrained_tokenizer, vocabulary_conflict

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of an MHLA language model.

    Args:
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        key_value_heads: number of heads of keys and values, a divisor of heads; null for as many as heads.
        key_width: width of a key in one head; null for dim / heads.
        value_width: width of a value in one head; null for dim / heads.
        mlp_width: inner width of the SwiGLU MLP.
        tie_embeddings: whether input and output embeddings share one matrix.
        initializer_range: standard deviation of the initial weights.

    Raises:
        ValueError: if a size is below 1, or ``initializer_range`` is negative.
    """

    dim: int = 1024
    depth: int = 24
    heads: int = 4
    key_value_heads: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    mlp_width: int = 2816
    tie_embeddings: bool = True
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        widths = {"key_value_heads": self.key_value_heads, "key_width": self.key_width, "value_width": self.value_width}
        widths |= {"dim": self.dim, "depth": self.depth, "heads": self.heads, "mlp_width": self.mlp_width}
        check_range("shape.", least=1, **widths)
        check_range("shape.", least=0, initializer_range=self.initializer_range)


class LanguageModel(CausalLanguageModel):
    """Lightning module that trains a causal language model, either MHLA or from transformers, to predict the next token.

    Args:
        attention: options of the attention layers.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length. With [mhla, mhla, softmax], every third layer has softmax attention. null uses attention.kind in all layers.
        vocab_size: number of tokens in the vocabulary, at least that of the tokenizer.
        context: number of tokens in a training sample.
        shape: widths, depth and heads.
        network: transformers configuration of a different causal language model to build instead of the MHLA backbone, as
            {class_path: transformers.LlamaConfig, init_args: {...}}. shape is then not used, and attention and layer_kinds must
            not be set. null for the MHLA backbone.
        generation: options for continuing prompts with the predict command.
        pretrained: checkpoint, run folder (for its latest checkpoint) or exported folder whose weights training starts from,
            with any context and vocabulary; null for random weights. It is not read if --ckpt_path supplies the weights.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if ``network`` is combined with ``attention`` or ``layer_kinds``, or an option is invalid.
    """

    def __init__(
        self,
        attention: AttentionConfig = default_attention(),  # noqa: B008  options are immutable
        layer_kinds: list[str] | None = None,
        vocab_size: int = 32_000,
        context: int = 2048,
        shape: DecoderShape = DecoderShape(),
        network: dict[str, Any] | None = None,
        generation: GenerationOptions = GenerationOptions(),
        pretrained: str | None = None,
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        super().__init__(training)
        generation = as_dataclass(GenerationOptions, generation)
        shape = as_dataclass(DecoderShape, shape, "shape")
        self.save_hyperparameters(ignore=["pretrained"])
        keep_plain(self)
        self._pretrained = pretrained
        if network is not None:
            if layer_kinds is not None or plain_attention(attention) != plain_attention(default_attention()):
                raise ValueError("network brings its own attention: leave out attention and layer_kinds, or network")
            self.take(build_network(network, vocab_size), context, generation)
            return
        layers: Any = attention
        if layer_kinds is not None:
            layers = attention_per_layer(as_dataclass(AttentionConfig, attention), layer_kinds, shape.depth)
        sizes = asdict(shape)
        ours = MHLAForCausalLM(
            MHLAConfig(
                vocab_size=vocab_size,
                context=context,
                attention=layers,
                tie_word_embeddings=sizes.pop("tie_embeddings"),
                **sizes,
            )
        )
        size = ours.backbone.layout.block_size or 0
        if size > context:
            log.warning(
                "block_size=%d is above context=%d: a sample is one block, and mixing does nothing", size, context
            )
        self.take(ours, context, generation)

    @override
    def start_from(self, pretrained: str) -> None:
        # Embedding and output layer depend on the vocabulary, which may differ from that of the weights.
        ends = (self.network.get_input_embeddings(), self.network.get_output_embeddings())
        modules = list(self.network.named_modules())
        embedding, head = (next(f"{name}." for name, module in modules if module is end) for end in ends)
        source = read_pretrained(pretrained)
        weights = dict(source.weights)
        if source.options.get("tie_word_embeddings") and f"{embedding}weight" in weights:
            # An exported folder holds a shared matrix once.
            weights.setdefault(f"{head}weight", weights[f"{embedding}weight"])
        original = None if self.tokenizer is None else pretrained_tokenizer(pretrained)
        if original is not None and (conflict := vocabulary_conflict(original, self.tokenizer)):
            log.warning(
                "%s was trained with a different tokenizer than that of the data (%s): the embedding and the head start from "
                "new values", pretrained, conflict,
            )  # fmt: skip
            weights = {name: weight for name, weight in weights.items() if not name.startswith((embedding, head))}
        adopt(self.network, replace(source, weights=weights), pretrained, heads=(embedding, head))
