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
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.training.compilation import CompileOptions
from lightning_mhla.training.optim import OptimizerConfig
from mhla_tasks.captioned.module import CaptionedDiffusion
from mhla_tasks.captioned.text import TextConfig, make_encoder
from mhla_tasks.video.model import TransformerConfig, build_transformer
from mhla_tasks.video.pretrained import load_weights, read_transformer
from mhla_tasks.video.sampling import SamplingConfig, draw_clips, latent_shape
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
        checkpointing: recompute blocks in the backward pass, to save memory.
        compile: compile the network, block by block (:func:`torch.compile`).
        compile_options: options of torch.compile; see :class:`lightning_mhla.training.compilation.CompileOptions`.
        sampling: sampler options of predict and callbacks.
        pretrained: weights to start from, see mhla_tasks.video.pretrained; not read where --ckpt_path brings weights.
        output: folder for the clips that predict draws; those that are there already are not drawn again. null for the
            run's own.
        optimizer: AdamW or CAME, and its schedule.
        ema_decay: decay of the moving average of the weights that validation and clips use; null for none.
    """

    samples, sample_key, text_option = "clips", "video", "text_dim"

    train_batch = ("latent|video", "text|caption")
    evaluation_batch = ("latent|video", "text|caption", "index")
    predict_batch = ("caption", "file", "index", "seed")

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
            make_encoder(text, transformer.text_dim),
            None if vae is None else ClipCodec(vae),
            as_dataclass(FlowConfig, flow),
            train,
            as_dataclass(LoraOptions, lora),
            as_dataclass(DistillationConfig, distillation),
            checkpointing,
            as_dataclass(SamplingConfig, sampling),
            pretrained,
            ClipWriter(output),
        )

    @staticmethod
    @override
    def velocity(network: Any, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        return network(noisy, times, text).sample

    @override
    def load_pretrained(self, path: str) -> None:
        load_weights(self.network, path)

    @override
    def build_teacher(self, path: str) -> Any:
        return read_transformer(self._shape, path)

    @override
    def check_drawable(self, sampling: Any = None) -> None:
        channels = self.network.config.out_channels
        if self.codec is None and channels not in (1, 3):
            raise ValueError(
                f"clips of {channels} channels are latents; name the VAE that decodes them: --model.vae=FOLDER_OR_NAME"
            )
        latent_shape(self.network, self.codec, sampling or self.sampling)
        if self.codec is not None:
            self.codec.model(self.device)
        self.captions.tokens("", self.device)

    @override
    def draw(self, prompts: list[str], indices: list[int], seed: int, sampling: Any = None) -> Tensor:
        """Clips ``[B, F, C, H, W]`` uint8; see :func:`mhla_tasks.video.sampling.draw_clips`."""
        chosen = sampling or self.sampling
        text = self.captions.encode(prompts, self.device)
        negative = self.captions.encode([chosen.negative_prompt], self.device, instructed=False)[0]
        return draw_clips(self.network, self.codec, chosen, self.flow.shift, text, negative, indices, seed)
