"""Training, validation and sampling of a SANA transformer whose attention is replaced."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.generative.codecs import ImageCodec
from lightning_mhla.generative.distillation import DistillationConfig
from lightning_mhla.generative.flow import FlowConfig
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.training.compilation import CompileOptions
from lightning_mhla.training.optim import OptimizerConfig
from mhla_tasks.captioned.module import CaptionedDiffusion, check_patches
from mhla_tasks.captioned.requests import RequestedSamples
from mhla_tasks.captioned.text import TextConfig, make_encoder
from mhla_tasks.text_to_image.model import TransformerConfig, build_transformer
from mhla_tasks.text_to_image.pretrained import load_weights, read_transformer
from mhla_tasks.text_to_image.sampling import SamplingConfig, draw_images, latent_shape, token_mask
from mhla_tasks.text_to_image.writer import ImageWriter

SANA_TEXT = TextConfig(length=300, instruction="sana")
SANA_FLOW = FlowConfig(shift=3.0)


class TextToImage(CaptionedDiffusion):
    """A SANA transformer trained on captioned images or their latents, and sampled by prompt.

    Args:
        attention: the attention that replaces the transformer's self-attention, which is linear.
        transformer: shape of the transformer.
        layer_kinds: kinds of the layers, repeated to the depth: [keep, replace] replaces every second one; [keep] none;
            null for attention.kind everywhere.
        flow: times and shift of flow matching, and caption dropout.
        text: encoder of the captions.
        vae: folder or hub name of a SANA pipeline or its autoencoder, for latents; null for pixels.
        train: trained parameters: all; attention (the replaced layers with their projections); new (those that replacing
            added); lora (those, and adapters of the projections).
        lora: rank and alpha of the adapters.
        distillation: from the model that is replaced.
        checkpointing: recompute blocks in the backward pass, to save memory.
        compile: compile the network, block by block (:func:`torch.compile`).
        compile_options: options of torch.compile; see :class:`lightning_mhla.training.compilation.CompileOptions`.
        sampling: sampler options of predict and callbacks.
        pretrained: weights to start from, see mhla_tasks.text_to_image.pretrained; not read where --ckpt_path brings weights.
        output: folder for the images that predict draws; those that are there already are not drawn again. null for the
            run's own.
        optimizer: AdamW or CAME, and its schedule.
        ema_decay: decay of the moving average of the weights that validation and images use; null for none.
    """

    samples, sample_key, text_option = "images", "image", "caption_channels"

    train_batch = ("latent|image", "text|caption")
    evaluation_batch = ("latent|image", "text|caption", "index")
    predict_batch = ("caption", "file", "index", "seed")

    def __init__(
        self,
        attention: AttentionConfig,
        transformer: TransformerConfig = TransformerConfig(),
        layer_kinds: list[str] | None = None,
        flow: FlowConfig = SANA_FLOW,
        text: TextConfig = SANA_TEXT,
        vae: str | None = None,
        train: TrainedPart = "all",
        lora: LoraOptions = LoraOptions(),
        distillation: DistillationConfig = DistillationConfig(),
        checkpointing: bool = False,
        compile: bool = False,
        compile_options: CompileOptions | None = None,
        sampling: SamplingConfig = SamplingConfig(),
        pretrained: str | None = None,
        output: str | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(),
        ema_decay: float | None = None,
    ) -> None:
        attention = as_dataclass(AttentionConfig, attention)
        transformer = as_dataclass(TransformerConfig, transformer)
        text = as_dataclass(TextConfig, text)
        optimizer = as_dataclass(OptimizerConfig, optimizer)
        compile_options = as_dataclass(CompileOptions, compile_options or {}) if compile else None
        super().__init__(optimizer, ema_decay, compile_options)
        self.save_hyperparameters(ignore=["pretrained", "output"])
        keep_plain(self)
        self._shape = transformer
        self.set_up(
            build_transformer(transformer, attention, layer_kinds),
            make_encoder(text, transformer.caption_channels),
            None if vae is None else ImageCodec(vae),
            as_dataclass(FlowConfig, flow),
            train,
            as_dataclass(LoraOptions, lora),
            as_dataclass(DistillationConfig, distillation),
            checkpointing,
            as_dataclass(SamplingConfig, sampling),
            pretrained,
            ImageWriter(output),
        )

    @staticmethod
    @override
    def velocity(network: Any, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        return network(
            noisy, encoder_hidden_states=text, timestep=times, encoder_attention_mask=token_mask(text)
        ).sample

    @override
    def load_pretrained(self, path: str) -> None:
        load_weights(self.network, path)

    @override
    def build_teacher(self, path: str) -> Any:
        return read_transformer(self._shape, path)

    def on_fit_start(self) -> None:
        """Find out whether the model takes all sizes of the data; then see :meth:`CaptionedDiffusion.on_fit_start`.

        Raises:
            ValueError: for a size that patches or autoencoder do not divide.
        """
        for size in getattr(self.trainer.datamodule, "sizes", ()):  # type: ignore[attr-defined]  # set by fit
            latent = size if self.codec is None else self.codec.latent_size(*size)
            check_patches(latent, self.network.config.patch_size, "images or latents")
        super().on_fit_start()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return (3, self.sampling.height, self.sampling.width)

    @override
    def check_drawable(self, sampling: Any = None) -> None:
        channels = self.network.config.out_channels
        if self.codec is None and channels not in (1, 3):
            raise ValueError(
                f"images of {channels} channels are latents; name the autoencoder that decodes them: "
                "--model.vae=FOLDER_OR_NAME"
            )
        latent_shape(self.network, self.codec, sampling or self.sampling)
        if self.codec is not None:
            self.codec.model(self.device)
        self.captions.tokens("", self.device)

    @override
    def draw(self, prompts: list[str], indices: list[int], seed: int, sampling: Any = None) -> Tensor:
        """Images ``[B, C, H, W]`` uint8; see :func:`mhla_tasks.text_to_image.sampling.draw_images`."""
        chosen = sampling or self.sampling
        text = self.captions.encode(prompts, self.device)
        negative = self.captions.encode([chosen.negative_prompt], self.device, instructed=False)[0]
        return draw_images(self.network, self.codec, chosen, self.flow.shift, text, negative, indices, seed)

    @property
    def prompts(self) -> list[str]:
        """Prompts that metrics of samples are balanced over: those of the data."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        return [prompt for _, prompt in RequestedSamples(data.prompts, data.known_prompts, "png").prompts]

    @property
    def num_conditions(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    def draw_numbered(self, indices: list[int], seed: int, sampling: Any) -> Tensor:
        """Images ``[b, C, H, W]`` uint8 by number: sample i has prompt i modulo their number, and noise of its own."""
        prompts = self.prompts
        return self.draw([prompts[index % len(prompts)] for index in indices], indices, seed, sampling)

    def describe_sampling(self, sampling: Any) -> dict[str, Any]:
        """Options that a metric of samples depends on."""
        options = asdict(sampling)
        return {"sampling_steps": options.pop("steps"), **options, "shift": self.flow.shift}

    @torch.no_grad()
    def draw_prompts(self, prompts: list[str], seed: int) -> Tensor:
        """An image ``[n, C, H, W]`` uint8 on the CPU for each of ``prompts``, thirty-two at a time."""
        parts = [range(start, min(start + 32, len(prompts))) for start in range(0, len(prompts), 32)]
        return torch.cat([self.draw([prompts[i] for i in part], list(part), seed).cpu() for part in parts])
