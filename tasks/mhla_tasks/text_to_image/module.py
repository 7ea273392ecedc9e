"""Training, validation and sampling of a SANA transformer whose attention is replaced."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.generative.codecs import ImageCodec
from lightning_mhla.generative.distillation import DistillationConfig
from lightning_mhla.generative.flow import FlowConfig
from lightning_mhla.generative.images import to_pixels
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.captioned.module import CaptionedDiffusion
from mhla_tasks.captioned.requests import RequestedSamples
from mhla_tasks.captioned.sampling import check_patches
from mhla_tasks.captioned.text import TextConfig
from mhla_tasks.text_to_image.model import SanaTransformerConfig
from mhla_tasks.text_to_image.pretrained import SANA
from mhla_tasks.text_to_image.sampling import SanaSamplingConfig
from mhla_tasks.text_to_image.writer import ImageWriter

SANA_TEXT = TextConfig(length=300, instruction="sana")
SANA_FLOW = FlowConfig(shift=3.0)


class TextToImage(CaptionedDiffusion):
    """Text-to-image model: a SANA transformer with replaced attention, trained on captioned images or their latents.

    Arguments that are not listed here are those of :class:`mhla_tasks.captioned.module.CaptionedDiffusion`.

    Args:
        layer_kinds: kinds of the layers; the list repeats until all layers have one. [keep, replace] replaces the attention of
            every second layer, [keep] replaces none; null to replace all.
        vae: folder or hub name of a SANA pipeline or its autoencoder, for latents; null for pixels.
    """

    host, samples, sample_key, text_option = SANA, "images", "image", "caption_channels"
    transformer_options, sampling_options = SanaTransformerConfig, SanaSamplingConfig
    codec_kind, writer_kind = ImageCodec, ImageWriter

    train_batch = ("latent|image", "text|caption")
    evaluation_batch = ("latent|image", "text|caption", "index")

    def __init__(
        self,
        attention: AttentionConfig,
        transformer: SanaTransformerConfig = SanaTransformerConfig(),
        layer_kinds: list[str] | None = None,
        flow: FlowConfig = SANA_FLOW,
        text: TextConfig = SANA_TEXT,
        vae: str | None = None,
        train: TrainedPart = "all",
        lora: LoraOptions = LoraOptions(),
        distillation: DistillationConfig = DistillationConfig(),
        sampling: SanaSamplingConfig = SanaSamplingConfig(),
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
        return network(
            noisy, encoder_hidden_states=text, timestep=times, encoder_attention_mask=token_mask(text)
        ).sample

    @staticmethod
    @override
    def caption_arguments(text: Tensor, negative: Tensor) -> dict[str, Tensor]:
        return {
            "prompt_embeds": text,
            "prompt_attention_mask": token_mask(text),
            "negative_prompt_embeds": negative,
            "negative_prompt_attention_mask": token_mask(negative),
        }

    @staticmethod
    @override
    def to_bytes(samples: Tensor) -> Tensor:
        return to_pixels(samples)

    def on_fit_start(self) -> None:
        """Check the image sizes of the data, then continue as :meth:`CaptionedDiffusion.on_fit_start` does.

        Raises:
            ValueError: if an image size does not fit the autoencoder's downsampling factor or the patch size.
        """
        for size in getattr(self.trainer.datamodule, "sizes", ()):  # type: ignore[attr-defined]  # set by fit
            latent = size if self.codec is None else self.codec.latent_size(*size)
            check_patches(latent, self.network.config.patch_size, "images or latents")
        super().on_fit_start()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a drawn image, in pixels."""
        return (3, self.sampling.height, self.sampling.width)

    @property
    def prompts(self) -> list[str]:
        """Prompts of the data module. Metrics of drawn images distribute the images evenly over these prompts."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        return [prompt for _, prompt in RequestedSamples(data.prompts, data.known_prompts, "png").prompts]

    @property
    def num_conditions(self) -> int:
        """Number of conditions that samples can be drawn for: the number of prompts."""
        return len(self.prompts)

    def draw_numbered(self, indices: list[int], seed: int, sampling: Any) -> Tensor:
        """Draw the images with the given indices; image i has prompt i modulo the number of prompts.

        Returns:
            Images ``[B, C, H, W]`` uint8.
        """
        prompts = self.prompts
        return self.draw([prompts[index % len(prompts)] for index in indices], indices, seed, sampling)

    def describe_sampling(self, sampling: Any) -> dict[str, Any]:
        """Return the sampler options and the timestep shift, which are recorded with metrics of drawn images."""
        options = asdict(sampling)
        return {"sampling_steps": options.pop("steps"), **options, "shift": self.flow.shift}


def token_mask(text: Tensor) -> Tensor:
    """Compute the mask of non-padding tokens in embedded captions.

    Args:
        text: embedded captions ``[B, L, D]``, padded with rows of zeros.

    Returns:
        Mask ``[B, L]`` int64: 0 for padding, 1 for tokens. The first token of each caption always has 1.
    """
    mask = text.ne(0).any(-1)
    mask[:, 0] = True
    return mask.long()
