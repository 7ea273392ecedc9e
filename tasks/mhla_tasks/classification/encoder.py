"""Image encoders from transformers or timm whose attention is replaced, then trained to match the original encoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart
from lightning_mhla.training.encoders import EncoderDistillation, LinearizedEncoder, Pooling
from lightning_mhla.training.options import TrainingOptions

BIDIRECTIONAL = AttentionConfig(
    kind="mhla_window", block_grid=[4, 4], feature_map="learned", options={"far_init": -2.0}
)
"""Default replacement of softmax attention: 4 x 4 blocks for an image of any size, in which distant patches start with a low
weight."""


class LinearizedImageEncoder(LinearizedEncoder):
    """Image encoder from transformers or timm (DINOv2, ViT, ...) with new attention, trained to match the original encoder.

    The pooling and the classifier of a timm encoder are not trained, but are exported with the encoder.

    Args:
        pretrained: encoder to start from: a folder that transformers or timm saved, a name on the Hugging Face Hub,
            timm:ARCHITECTURE or timm:OWNER/NAME for a timm encoder, or a checkpoint or run folder (its latest checkpoint) of
            this class. The weights are not read if --ckpt_path supplies them.
        attention: options of the new attention.
        layer_kinds: list with an entry "keep" or "replace" for each layer; a shorter list is repeated. "keep" leaves a layer
            unchanged; "replace" gives it attention of the kind attention.kind. null replaces the attention of all layers.
        train: parameters to train after the first distillation.layer_steps steps: "all"; "attention" for the replaced attention
            layers with their projections; "new" for only the parameters that the replacement added; or "lora" for these
            parameters and LoRA adapters of the projections.
        lora: rank, alpha and dropout of the LoRA adapters.
        distillation: options of distillation: teacher model, number of steps that match each layer on its own, and weights of
            the terms of the loss.
        pooling: vector that serves as the embedding of an image: "first" for the vector of the class token, "mean" for the mean
            over the class token and all patches, or "head" for the vector that a timm encoder passes to its classifier.
        network: configuration of the encoder, which is read from pretrained; do not set it.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.
    """

    train_batch = ("image",)
    evaluation_batch = ("image",)

    def __init__(
        self,
        pretrained: str | None = None,
        attention: AttentionConfig = BIDIRECTIONAL,
        layer_kinds: list[str] | None = None,
        train: TrainedPart = "all",
        lora: LoraOptions = LoraOptions(),
        distillation: EncoderDistillation = EncoderDistillation(),
        pooling: Pooling = "first",
        network: dict[str, Any] | None = None,
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        super().__init__(distillation, pooling, training)
        self.save_hyperparameters(ignore=["pretrained"])
        self.assemble(pretrained, attention, layer_kinds, train, lora, network)

    @override
    def encode(self, network: Any, *inputs: Tensor) -> Tensor:
        return self.library.encode_images(network, inputs[0])

    @override
    def read_inputs(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        return (batch["image"],)

    @override
    def real_tokens(self, *inputs: Tensor) -> Tensor | None:
        return None
