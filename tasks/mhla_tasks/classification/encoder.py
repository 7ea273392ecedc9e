"""Image encoders of transformers and timm with replaced attention, trained to compute the original patch vectors."""

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
"""Default replacement of softmax attention: 4 x 4 blocks for an image of any size. Far patches start with a low weight."""


class LinearizedImageEncoder(LinearizedEncoder):
    """Image encoder of transformers or timm (DINOv2, ViT, ...) with new attention, trained to match the original.

    The pooling and the classifier of an encoder of timm are not trained, and are exported with it.

    Args:
        pretrained: encoder to start from: a folder of transformers or timm, a name on the Hugging Face Hub,
            timm:ARCHITECTURE or timm:OWNER/NAME for an encoder of timm, or a checkpoint or run folder of this class. Its
            weights are not read if --ckpt_path supplies them.
        attention: options of the new attention.
        layer_kinds: pattern of the layers, repeated to the depth. keep leaves a layer unchanged; replace gives it attention of
            the kind attention.kind. null replaces all layers.
        train: parameters that are trained after the first distillation.layer_steps steps. all trains all of them; attention,
            those of the replaced attention layers with their projections; new, only those that the replacement added; lora, the
            added ones and LoRA adapters of the projections.
        lora: rank and alpha of the adapters.
        distillation: teacher, and weights of the distances from it.
        pooling: vector that is the embedding of an image. first is the vector of the class token, mean the mean over the class
            token and all patches, head what an encoder of timm passes to its classifier.
        network: configuration of the encoder, which is read from pretrained; do not set it.
        training: optimizer, moving average of the weights, checkpointing and compilation.
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
