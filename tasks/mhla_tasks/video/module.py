"""Lightning module that trains, validates and samples a Wan transformer whose attention is replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_mhla import AttentionConfig, CrossAttentionConfig
from lightning_mhla.generative.codecs import ClipCodec
from lightning_mhla.generative.distillation import DistillationConfig
from lightning_mhla.generative.flow import FlowConfig
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.captioned.module import CaptionedDiffusion
from mhla_tasks.captioned.text import TextConfig
from mhla_tasks.video.clips import to_frames
from mhla_tasks.video.model import WanTransformerConfig
from mhla_tasks.video.pretrained import WAN
from mhla_tasks.video.sampling import WanSamplingConfig
from mhla_tasks.video.writer import ClipWriter


class VideoDiffusion(CaptionedDiffusion):
    """Text-to-video model: a Wan transformer with replaced attention, trained on captioned clips or their latents.

    Args:
        attention: options of the attention that replaces the transformer's self-attention.
        transformer: options of the transformer, such as its width and its number of layers.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length. "keep" leaves the attention of a layer unchanged, and "replace" uses attention.kind. [keep, replace,
            replace] replaces the attention of two layers out of three, and [keep] replaces none. null replaces the attention of
            all layers.
        cross_attention: options of the attention that replaces the transformer's cross-attention to the caption in all layers,
            such as {block_grid: [2, 4, 4], key_block_size: 8}; null keeps the original. Its kind is mhla, linear or softmax.
        flow: options of flow matching: distribution and shift of the training timesteps, and caption dropout.
        text: options of the caption encoder.
        vae: folder or Hugging Face Hub name of Wan's VAE, or of a pipeline that contains it, if the transformer works on
            latents; null if it works on pixels.
        train: parameters to train: "all"; "attention" for the replaced attention layers with their projections; "new" for only
            the parameters that the replacement added; or "lora" for these parameters and low-rank adapters of the projections.
        lora: rank, alpha and dropout of the low-rank adapters.
        distillation: options of distillation from the same transformer with its original attention.
        sampling: sampler options of the predict command and of callbacks.
        pretrained: source of the initial weights: a training checkpoint, a weights file, a folder that save_pretrained wrote,
            or a Hugging Face Hub name. It is ignored if --ckpt_path supplies the weights.
        output: folder for the clips that the predict command draws; clips that exist there are not drawn again. null for the
            log folder.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if sampling uses guidance but the model is trained without caption dropout.
    """

    host, samples, sample_key, text_option = WAN, "clips", "video", "text_dim"
    transformer_options, sampling_options = WanTransformerConfig, WanSamplingConfig
    codec_kind, writer_kind = ClipCodec, ClipWriter

    train_batch = ("latent|video", "text|caption")
    evaluation_batch = ("latent|video", "text|caption", "index")

    def __init__(
        self,
        attention: AttentionConfig,
        transformer: WanTransformerConfig = WanTransformerConfig(),
        layer_kinds: list[str] | None = None,
        cross_attention: CrossAttentionConfig | None = None,
        flow: FlowConfig = FlowConfig(),
        text: TextConfig = TextConfig(),
        vae: str | None = None,
        train: TrainedPart = "all",
        lora: LoraOptions = LoraOptions(),
        distillation: DistillationConfig = DistillationConfig(),
        sampling: WanSamplingConfig = WanSamplingConfig(),
        pretrained: str | None = None,
        output: str | None = None,
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        super().__init__(
            attention, transformer, layer_kinds, cross_attention, flow, text, vae, train, lora, distillation, sampling,
            pretrained, output, training,
        )  # fmt: skip

    @staticmethod
    @override
    def velocity(network: Any, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        return network(noisy, times, text).sample

    @staticmethod
    @override
    def caption_arguments(text: Tensor, negative: Tensor) -> dict[str, Tensor]:
        return {"prompt_embeds": text, "negative_prompt_embeds": negative}

    @staticmethod
    @override
    def to_bytes(samples: Tensor) -> Tensor:
        return to_frames(samples)  # float32, whatever the precision
