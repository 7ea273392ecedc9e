"""Training, validation and sampling of a Wan transformer whose attention is replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.generative.codecs import ClipCodec
from lightning_mhla.generative.distillation import DistillationConfig
from lightning_mhla.generative.flow import FlowConfig
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.captioned.module import CaptionedDiffusion
from mhla_tasks.captioned.text import TextConfig
from mhla_tasks.video.clips import to_frames
from mhla_tasks.video.model import TransformerConfig
from mhla_tasks.video.pretrained import WAN
from mhla_tasks.video.sampling import SamplingConfig
from mhla_tasks.video.writer import ClipWriter


class VideoDiffusion(CaptionedDiffusion):
    """A Wan transformer trained on captioned clips or their latents, and sampled by prompt.

    Args:
        attention: the attention that replaces the transformer's self-attention.
        transformer: shape of the transformer.
        layer_kinds: kinds of the layers, repeated to the depth: [keep, replace, replace] replaces two of three; [keep] none;
            null for attention.kind everywhere.
        flow: times and shift of flow matching, and caption dropout.
        text: encoder of the captions.
        vae: folder or hub name of a Wan pipeline or its VAE, for latents; null for pixels.
        train: trained parameters: all; attention (the replaced layers with their projections); new (those that replacing
            added); lora (those, and adapters of the projections).
        lora: rank and alpha of the adapters.
        distillation: from the model that is replaced.
        sampling: sampler options of predict and callbacks.
        pretrained: weights to start from, see mhla_tasks.captioned.host; not read where --ckpt_path brings weights.
        output: folder for the clips that predict draws; those that are there already are not drawn again. null for the
            run's own.
        training: optimizer, moving average of the weights, checkpointing and compilation.
    """

    host, samples, sample_key, text_option = WAN, "clips", "video", "text_dim"
    transformer_options, sampling_options = TransformerConfig, SamplingConfig
    codec_kind, writer_kind = ClipCodec, ClipWriter

    train_batch = ("latent|video", "text|caption")
    evaluation_batch = ("latent|video", "text|caption", "index")

    def __init__(
        self,
        attention: AttentionConfig,
        transformer: TransformerConfig = TransformerConfig(),
        layer_kinds: list[str] | None = None,
        flow: FlowConfig = FlowConfig(),
        text: TextConfig = TextConfig(),
        vae: str | None = None,
        train: TrainedPart = "all",
        lora: LoraOptions = LoraOptions(),
        distillation: DistillationConfig = DistillationConfig(),
        sampling: SamplingConfig = SamplingConfig(),
        pretrained: str | None = None,
        output: str | None = None,
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        super().__init__(
            attention, transformer, layer_kinds, flow, text, vae, train, lora, distillation, sampling, pretrained, output,
            training,
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
