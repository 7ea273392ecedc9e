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
from mhla_tasks.video.model import WanTransformerConfig
from mhla_tasks.video.pretrained import WAN
from mhla_tasks.video.sampling import WanSamplingConfig
from mhla_tasks.video.writer import ClipWriter


class VideoDiffusion(CaptionedDiffusion):
    """Text-to-video model: a Wan transformer with replaced attention, trained on captioned clips or their latents.

    Arguments that are not listed here are those of :class:`mhla_tasks.captioned.module.CaptionedDiffusion`.

    Args:
        layer_kinds: kinds of the layers; the list repeats until all layers have one. [keep, replace, replace] replaces the
            attention of two layers out of three, [keep] replaces none; null to replace all.
        vae: folder or hub name of a Wan pipeline or its VAE, for latents; null for pixels.
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
