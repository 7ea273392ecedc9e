"""Lightning module that trains, validates and samples a SANA transformer whose attention is replaced."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_mhla import AttentionConfig, CrossAttentionConfig
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

    Args:
        attention: options of the attention that replaces the transformer's self-attention.
        transformer: options of the transformer, such as its width and its number of layers.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length. "keep" leaves the attention of a layer unchanged, and "replace" uses attention.kind. [keep, replace]
            replaces the attention of every second layer, and [keep] replaces none. null replaces the attention of all layers.
        cross_attention: options of the attention that replaces the transformer's cross-attention to the caption in all layers,
            such as {block_grid: [4, 4], key_block_size: 8}; null keeps the original. Its kind is mhla, linear or softmax.
        flow: options of flow matching: distribution and shift of the training timesteps, and caption dropout.
        text: options of the caption encoder.
        vae: folder or Hugging Face Hub name of SANA's autoencoder, or of a pipeline that contains it, if the transformer works
            on latents; null if it works on pixels.
        train: parameters to train: "all"; "attention" for the new attention layers with their projections; "new" for only
            the parameters that the replacement added; or "lora" for these parameters and low-rank adapters of the projections.
        lora: rank, alpha and dropout of the low-rank adapters.
        distillation: options of distillation from the same transformer with its original attention.
        sampling: sampler options of the predict command and of callbacks.
        pretrained: source of the initial weights: a training checkpoint, a weights file, a folder that save_pretrained wrote,
            or a Hugging Face Hub name. It is ignored if --ckpt_path supplies the weights.
        output: folder for the images that the predict command draws; images that exist there are not drawn again. null for the
            log folder.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if sampling uses guidance but the model is trained without caption dropout.
    """

    host, samples, sample_key, text_option = SANA, "images", "image", "caption_channels"
    condition = "prompt"
    transformer_options, sampling_options = SanaTransformerConfig, SanaSamplingConfig
    codec_kind, writer_kind = ImageCodec, ImageWriter

    train_batch = ("latent|image", "text|caption")
    evaluation_batch = ("latent|image", "text|caption", "index")

    def __init__(
        self,
        attention: AttentionConfig,
        transformer: SanaTransformerConfig = SanaTransformerConfig(),
        layer_kinds: list[str] | None = None,
        cross_attention: CrossAttentionConfig | None = None,
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
            attention, transformer, layer_kinds, cross_attention, flow, text, vae, train, lora, distillation, sampling,
            pretrained, output, training,
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
        """Check the image sizes of the data, and load what training needs.

        If distillation is configured, the teacher, which is the transformer with its original attention, is loaded. If training
        drops captions, the empty caption is embedded.

        Raises:
            ValueError: if an image size is not a multiple of the autoencoder's downsampling factor, or the size of its latents
                is not a multiple of the patch size.
        """
        for size in getattr(self.trainer.datamodule, "sizes", ()):  # type: ignore[attr-defined]  # set by fit
            latent = size if self.codec is None else self.codec.latent_size(*size)
            check_patches(latent, self.network.config.patch_size, "images or latents")
        super().on_fit_start()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Number of channels, and height and width in pixels, of a drawn image."""
        return (3, self.sampling.height, self.sampling.width)

    @property
    def prompts(self) -> list[str]:
        """Prompts of the data module, for which metrics such as FID draw images in turn."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        return [prompt for _, prompt in RequestedSamples(data.prompts, data.known_prompts, "png").prompts]

    @property
    def num_conditions(self) -> int:
        """Number of different conditions for which samples can be drawn, which is the number of prompts."""
        return len(self.prompts)

    def draw_numbered(self, indices: list[int], seed: int, sampling: Any) -> Tensor:
        """Draw the images with the given indices. Image i has the prompt with index i modulo the number of prompts.

        Args:
            indices: index of each image, which also determines its noise.
            seed: random seed, the same for all images.
            sampling: sampler options, a :class:`SanaSamplingConfig`; None to use the module's own options.

        Returns:
            Images ``[B, C, H, W]`` uint8.
        """
        prompts = self.prompts
        return self.draw([prompts[index % len(prompts)] for index in indices], indices, seed, sampling)

    def describe_sampling(self, sampling: Any) -> dict[str, Any]:
        """Return the options with which images are drawn, to be recorded together with metrics of the images.

        Args:
            sampling: sampler options, a :class:`SanaSamplingConfig`.

        Returns:
            A dict with ``sampling_steps``, the other sampler options by name, and ``shift``, the timestep shift.
        """
        options = asdict(sampling)
        return {"sampling_steps": options.pop("steps"), **options, "shift": self.flow.shift}


def token_mask(text: Tensor) -> Tensor:
    """Compute the mask of non-padding tokens in embedded captions.

    Args:
        text: embedded captions ``[B, L, D]`` of L tokens with D features, padded with rows of zeros.

    Returns:
        Mask ``[B, L]`` int64: 1 for tokens, 0 for padding. The first token of each caption always has 1.
    """
    mask = text.ne(0).any(-1)
    mask[:, 0] = True
    return mask.long()
