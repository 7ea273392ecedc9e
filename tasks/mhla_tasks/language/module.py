"""Causal language models trained from scratch: our backbone with any kind of attention, or a network of transformers."""

from __future__ import annotations

import logging
from typing import Any

from lightning_mhla import AttentionConfig
from lightning_mhla.attention import attention_per_layer
from lightning_mhla.checkpoints.pretrained import adopt, read_pretrained
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.training.compilation import CompileOptions
from lightning_mhla.training.optim import OptimizerConfig
from mhla_tasks.language.causal import CausalLanguageModel
from mhla_tasks.language.config import MHLAConfig, default_attention, plain_attention
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.networks import build_network
from mhla_tasks.language.prompts import GenerationOptions

log = logging.getLogger(__name__)


class LanguageModel(CausalLanguageModel):
    """A causal language model trained to predict the next token.

    Args:
        attention: options of the attention layers.
        layer_kinds: attention kinds of the layers if they differ, repeated to the depth: [mhla, mhla, softmax] makes every
            third layer softmax; null uses attention.kind in all layers.
        vocab_size: number of tokens in the vocabulary, at least that of the tokenizer.
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        key_value_heads: number of heads of keys and values, a divisor of heads; null for heads.
        key_width: width of a key in one head; null for dim / heads.
        value_width: width of a value in one head; null for dim / heads.
        mlp_width: inner width of the SwiGLU.
        context: number of tokens in a training sample.
        tie_embeddings: whether input and output embeddings share one matrix.
        initializer_range: standard deviation of the initial weights.
        checkpointing: recompute layers in the backward pass, to save memory.
        compile: compile the network, block by block (:func:`torch.compile`).
        compile_options: options of torch.compile; see :class:`lightning_mhla.training.compilation.CompileOptions`.
        optimizer: AdamW or CAME, and its schedule.
        ema_decay: decay of the moving average of the weights that validation and predictions use; null for none.
        generation: options of predict for continuations.
        pretrained: run, checkpoint or exported folder whose weights training starts from, with any context and vocabulary;
            not read if --ckpt_path supplies the weights.
        network: configuration of transformers that builds a different causal language model instead of the MHLA backbone, as
            {class_path: transformers.LlamaConfig, init_args: {...}}. The options from attention to mlp_width, tie_embeddings
            and initializer_range are then not used; attention and layer_kinds are errors.
    """

    def __init__(
        self,
        attention: AttentionConfig = default_attention(),  # noqa: B008  options are immutable
        layer_kinds: list[str] | None = None,
        vocab_size: int = 32_000,
        dim: int = 1024,
        depth: int = 24,
        heads: int = 4,
        key_value_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        mlp_width: int = 2816,
        context: int = 2048,
        tie_embeddings: bool = True,
        initializer_range: float = 0.02,
        checkpointing: bool = False,
        compile: bool = False,
        compile_options: CompileOptions | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(),
        ema_decay: float | None = None,
        generation: GenerationOptions = GenerationOptions(),
        pretrained: str | None = None,
        network: dict[str, Any] | None = None,
    ) -> None:
        optimizer = as_dataclass(OptimizerConfig, optimizer)
        generation = as_dataclass(GenerationOptions, generation)
        compile_options = as_dataclass(CompileOptions, compile_options or {}) if compile else None
        super().__init__(optimizer, ema_decay, compile_options)
        self.save_hyperparameters(ignore=["pretrained"])
        keep_plain(self)
        self._pretrained = pretrained
        if network is not None:
            if layer_kinds is not None or plain_attention(attention) != plain_attention(default_attention()):
                raise ValueError("network brings its own attention: leave out attention and layer_kinds, or network")
            self.take(build_network(network, vocab_size), context, generation, checkpointing)
            return
        ours = MHLAForCausalLM(
            MHLAConfig(
                vocab_size=vocab_size,
                dim=dim,
                depth=depth,
                heads=heads,
                key_value_heads=key_value_heads,
                key_width=key_width,
                value_width=value_width,
                mlp_width=mlp_width,
                context=context,
                attention=_for_layers(attention, layer_kinds, depth),
                tie_word_embeddings=tie_embeddings,
                initializer_range=initializer_range,
            )
        )
        size = ours.backbone.layout.block_size or 0
        if size > context:
            log.warning(
                "block_size=%d is above context=%d: a sample is one block, and mixing does nothing", size, context
            )
        self.take(ours, context, generation, checkpointing)

    def configure_model(self) -> None:
        """Load the weights of ``pretrained``, then prepare the model as :meth:`TrainingModule.configure_model` does."""
        if self._pretrained is not None:
            # Embedding and output layer depend on the vocabulary, which may differ from that of the weights.
            ends = (self.network.get_input_embeddings(), self.network.get_output_embeddings())
            heads = [f"{name}." for name, module in self.network.named_modules() if any(module is end for end in ends)]
            adopt(self.network, read_pretrained(self._pretrained), self._pretrained, heads=heads)
            self._pretrained = None
        super().configure_model()


def _for_layers(attention: Any, kinds: list[str] | None, depth: int) -> Any:
    if kinds is None:
        return plain_attention(attention)
    options = plain_attention(attention)
    assert isinstance(options, dict)
    return plain_attention(attention_per_layer(AttentionConfig(**options), kinds, depth))
