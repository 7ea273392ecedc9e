"""Transformers text encoders with replaced attention, trained to match the original encoders."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_mhla import MHLA, AttentionConfig
from lightning_mhla.attention.mixing import DenseCoefficients
from lightning_mhla.swap import swapped_layers
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart
from lightning_mhla.training.encoders import EncoderDistillation, LinearizedEncoder, Pooling
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.language.lengths import longest_text
from mhla_tasks.language.tokenizer import PackedFiles, needed_vocab_size, pack_tokenizer, unpack_tokenizer
from mhla_tasks.language.vocabularies import check_vocabulary

BIDIRECTIONAL = AttentionConfig(
    kind="mhla_window",
    block_size=32,
    mixing="exponential",
    feature_map="learned",
    options={"sinks": 1, "far_init": -2.0},
)
"""Default replacement of softmax attention: the first token is a sink, distant tokens start with a low weight, and
exponential coefficients support texts of any length."""


class LinearizedTextEncoder(LinearizedEncoder):
    """Transformers text encoder with replaced attention, trained to match the original encoder.

    Args:
        pretrained: encoder to start from: a folder that transformers saved, a name on the Hugging Face Hub, or a checkpoint of
            this class. The folder of a run stands for its latest checkpoint. null requires --ckpt_path. The weights are not
            read if --ckpt_path supplies them.
        attention: options of the new attention.
        layer_kinds: list of keep and replace, one entry for each layer. A shorter list is repeated; the number of layers must
            be a multiple of its length. keep leaves a layer unchanged; replace gives it attention of the kind attention.kind.
            null replaces the attention of all layers.
        train: parameters that are trained after the first distillation.layer_steps steps. all trains all of them. attention
            trains the replaced attention layers, including their projections. new trains only the parameters that the
            replacement added. lora trains these and LoRA adapters of the projections.
        lora: rank, alpha and dropout of the LoRA adapters.
        distillation: teacher model, number of layer-matching steps, and weights of the terms of the loss.
        pooling: vector that serves as the embedding of a text. mean takes the mean of its token vectors, and first takes the
            vector of its first token.
        network: configuration of the encoder, which is read from pretrained; do not set it.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        FileNotFoundError: if there is no encoder at ``pretrained``.
        ValueError: if neither ``pretrained`` nor a checkpoint supplies the encoder, an option is invalid, or the attention of
            the encoder cannot be replaced as requested.
    """

    train_batch = ("tokens", "mask")
    evaluation_batch = ("tokens", "mask")

    def __init__(
        self,
        pretrained: str | None = None,
        attention: AttentionConfig = BIDIRECTIONAL,
        layer_kinds: list[str] | None = None,
        train: TrainedPart = "all",
        lora: LoraOptions = LoraOptions(),
        distillation: EncoderDistillation = EncoderDistillation(),
        pooling: Pooling = "mean",
        network: dict[str, Any] | None = None,
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        super().__init__(distillation, pooling, training)
        self.save_hyperparameters(ignore=["pretrained"])
        self.tokenizer: Any = None
        self._tokenizer_files: PackedFiles = {}
        self.assemble(pretrained, attention, layer_kinds, train, lora, network)

    @override
    def setup(self, stage: str) -> None:
        """Take the tokenizer from the data, so that checkpoints and exports include it.

        Raises:
            ValueError: if the encoder lacks tokens of the tokenizer, or the data allows longer texts than the encoder can read.
        """
        super().setup(stage)
        data = self.trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        tokenizer, length = getattr(data, "tokenizer", None), getattr(data, "length", 0)
        config = self.network.config
        if tokenizer is not None and (needed := needed_vocab_size(tokenizer)) > config.vocab_size:
            raise ValueError(
                f"the tokenizer needs vocab_size={needed}, the encoder has vocab_size={config.vocab_size}; use the encoder's "
                "own tokenizer (--data.tokenizer)"
            )
        limit = longest_text(self.network)
        if limit is not None and length > limit:
            raise ValueError(f"data.length={length} is above the {limit} tokens that the encoder allows")
        if tokenizer is not None:
            self.tokenizer, self._tokenizer_files = tokenizer, pack_tokenizer(tokenizer)
        if stage == "fit" and length:
            self._warn_of_untrained_blocks(length)

    def _warn_of_untrained_blocks(self, length: int) -> None:
        """Warn if dense mixing coefficients (one for each pair of blocks) cover longer texts than the training data has.

        The coefficients for the additional blocks stay untrained.

        Args:
            length: maximum number of tokens in a training text.
        """
        dense = [
            layer.layout
            for layer in swapped_layers(self.network).values()
            if isinstance(layer, MHLA) and isinstance(layer.mixing, DenseCoefficients)
        ]
        if dense and length < (tokens := dense[0].num_tokens):
            size = dense[0].block_size or tokens
            rank_zero_warn(
                f"dense mixing coefficients cover {dense[0].num_blocks} blocks ({tokens} tokens), but training texts have at "
                f"most {math.ceil(length / size)} blocks (data.length={length}); longer texts will use untrained coefficients. "
                "Prefer attention.mixing=exponential, which takes any length, or train on longer texts"
            )

    @override
    def start_from(self, pretrained: str) -> None:
        check_vocabulary(self.tokenizer, pretrained)
        super().start_from(pretrained)

    @override
    def encode(self, network: Any, *inputs: Tensor) -> Tensor:
        tokens, mask = inputs
        vectors: Tensor = network(input_ids=tokens, attention_mask=mask).last_hidden_state
        return vectors

    @override
    def read_inputs(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        return batch["tokens"], batch["mask"]

    @override
    def real_tokens(self, *inputs: Tensor) -> Tensor | None:
        return inputs[1].bool()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the files of the tokenizer to a checkpoint."""
        super().on_save_checkpoint(checkpoint)
        if self._tokenizer_files:
            checkpoint["tokenizer"] = self._tokenizer_files

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the tokenizer from a checkpoint, and all other state as :class:`TrainingModule` does."""
        super().on_load_checkpoint(checkpoint)
        if "tokenizer" in checkpoint:
            self.tokenizer, self._tokenizer_files = unpack_tokenizer(checkpoint["tokenizer"]), checkpoint["tokenizer"]
