"""Base of the modules that train a swapped transformer of diffusers on captioned samples, by flow matching."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from lightning import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.generative.codecs import FrozenVAE
from lightning_mhla.generative.distillation import DistillationConfig, VelocityHost
from lightning_mhla.generative.flow import FlowConfig, draw_flow_times, flow_point
from lightning_mhla.generative.module import GenerativeModule, sample_noise
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart, choose_trained
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.training.linearize import Linearization
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.captioned.host import Host, build_transformer, load_weights, read_transformer
from mhla_tasks.captioned.requests import SampleFolder
from mhla_tasks.captioned.sampling import check_patches, denoise, latent_shape
from mhla_tasks.captioned.text import TextConfig, make_encoder

AT_ONCE = 32
"""Number of samples that are drawn at once."""


class CaptionedDiffusion(GenerativeModule):
    """Base class of captioned flow matching models: a diffusers transformer whose self-attention is replaced.

    A subclass names the classes of the transformer, the autoencoder and the callback that writes samples, and implements the
    calls of the transformer and the pipeline.

    Args:
        attention: attention that replaces the transformer's self-attention.
        transformer: shape of the transformer.
        layer_kinds: kinds of the layers; the list repeats until all layers have one. keep leaves a layer unchanged, replace
            gives it attention.kind; null to replace all.
        flow: distribution and shift of the training timesteps, and caption dropout.
        text: encoder of the captions.
        vae: folder or hub name of a pipeline or its autoencoder, for latents; null for pixels.
        train: trained parameters: all; attention (the replaced layers with their projections); new (those that the replacement
            added); lora (those, and adapters of the projections).
        lora: rank and alpha of the adapters.
        distillation: distillation from the model with its original attention.
        sampling: sampler options of the predict command and of callbacks.
        pretrained: weights to start from, see mhla_tasks.captioned.host; ignored if --ckpt_path supplies the weights.
        output: folder for the samples that the predict command draws; samples that exist there are not drawn again. null for
            the folder of the run.
        training: optimizer, moving average of the weights, checkpointing and compilation.

    Raises:
        ValueError: if sampling uses guidance but the model is trained without caption dropout.
    """

    output_names = ("proj_out", "scale_shift_table")

    predict_batch = ("caption", "file", "index", "seed")

    host: ClassVar[Host]
    """Description of the transformer."""

    transformer_options: ClassVar[type]
    """Dataclass of the transformer's options."""

    sampling_options: ClassVar[type]
    """Dataclass of the sampler options."""

    codec_kind: ClassVar[type[FrozenVAE]]
    """Class of the autoencoder between samples and what the network denoises."""

    writer_kind: ClassVar[type[SampleFolder]]
    """Class of the callback that writes what predict draws."""

    samples: ClassVar[str]
    """Word for samples in error messages."""

    sample_key: ClassVar[str]
    """Key of the samples in a batch. Encoded samples have the key ``latent``."""

    text_option: ClassVar[str]
    """Option of the transformer that sets the width of caption embeddings."""

    network: Any
    codec: Any

    def __init__(
        self,
        attention: AttentionConfig,
        transformer: Any,
        layer_kinds: list[str] | None,
        flow: FlowConfig,
        text: TextConfig,
        vae: str | None,
        train: TrainedPart,
        lora: LoraOptions,
        distillation: DistillationConfig,
        sampling: Any,
        pretrained: str | None,
        output: str | None,
        training: TrainingOptions,
    ) -> None:
        super().__init__(training)
        self.save_hyperparameters(ignore=["pretrained", "output"])
        keep_plain(self)
        self.flow = as_dataclass(FlowConfig, flow)
        self.sampling: Any = as_dataclass(self.sampling_options, sampling)
        if self.sampling.guidance != 1 and not self.flow.caption_dropout:
            raise ValueError(
                f"sampling.guidance={self.sampling.guidance} needs training without captions: flow.caption_dropout"
            )
        self.shape: Any = as_dataclass(self.transformer_options, transformer)
        self.captions = make_encoder(as_dataclass(TextConfig, text), getattr(self.shape, self.text_option))
        self.codec = None if vae is None else self.codec_kind(vae)
        self.network = build_transformer(self.host, self.shape, as_dataclass(AttentionConfig, attention), layer_kinds)
        choose_trained(self.network, train, as_dataclass(LoraOptions, lora))
        if self.training_options.checkpointing:
            self.network.enable_gradient_checkpointing()
        self.pretrained = pretrained
        self._writer = self.writer_kind(output)
        self._started = False
        self.distillation = as_dataclass(DistillationConfig, distillation)
        self.linearization = Linearization(self.distillation, VelocityHost(self.velocity))
        self._empty: Tensor | None = None

    @staticmethod
    @abstractmethod
    def velocity(network: Any, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """Predict the velocity (noise minus data) of noisy samples.

        Args:
            network: transformer.
            noisy: noisy samples ``[B, C, ...]``.
            times: timesteps ``[B]`` from 0 (data) to 1000 (noise).
            text: embedded captions ``[B, L, D]``.

        Returns:
            Velocity with the shape of ``noisy``.
        """

    @staticmethod
    @abstractmethod
    def caption_arguments(text: Tensor, negative: Tensor) -> dict[str, Tensor]:
        """Return the keyword arguments of the diffusers pipeline for embedded captions and negative captions ``[B, L, D]``."""

    @staticmethod
    @abstractmethod
    def to_bytes(samples: Tensor) -> Tensor:
        """Convert samples in -1 .. 1 to uint8 pixels.

        Images keep their shape ``[B, C, H, W]``. Clips ``[B, C, F, H, W]`` become ``[B, F, C, H, W]``.
        """

    def check_drawable(self, sampling: Any = None) -> None:
        """Load the text encoder and the autoencoder, and check that samples can be drawn.

        Args:
            sampling: sampler options; None for those of the module.

        Raises:
            ValueError: if an autoencoder is required but not named, or the size of the samples does not fit the patches.
            FileNotFoundError: if the text encoder or the autoencoder does not exist.
        """
        channels = self.network.config.out_channels
        if self.codec is None and channels not in (1, 3):
            raise ValueError(
                f"{self.samples} of {channels} channels are latents; name the autoencoder that decodes them: "
                "--model.vae=FOLDER_OR_NAME"
            )
        latent_shape(self.network, self.codec, sampling or self.sampling, self.samples)
        if self.codec is not None:
            self.codec.model(self.device)
        self.captions.tokens("", self.device)

    def draw(self, prompts: list[str], indices: list[int], seed: int, sampling: Any = None) -> Tensor:
        """Draw samples, each of which depends only on the weights, its prompt, the seed and its index.

        Args:
            prompts: prompt of each of the B samples.
            indices: index of each sample, which determines its noise.
            seed: seed of all samples.
            sampling: sampler options; None for those of the module.

        Returns:
            Images ``[B, C, H, W]`` or clips ``[B, F, C, H, W]``, uint8.

        Raises:
            ValueError: if the size of the samples is not a multiple of the patch size.
        """
        chosen = sampling or self.sampling
        shape = latent_shape(self.network, self.codec, chosen, self.samples)
        text = self.captions.encode(prompts, self.device)
        negative = self.captions.encode([chosen.negative_prompt], self.device, instructed=False)[0]
        captions = self.caption_arguments(text, negative.expand_as(text))
        drawn = denoise(self.host, self.network, shape, chosen, self.flow.shift, captions, indices, seed)
        return self.to_bytes(drawn if self.codec is None else self.codec.decode(drawn))

    def draw_prompts(self, prompts: list[str], seed: int) -> Tensor:
        """Draw a sample for each prompt, a few at a time to limit memory.

        Args:
            prompts: prompts of the n samples.
            seed: seed of all samples.

        Returns:
            Images ``[n, C, H, W]`` or clips ``[n, F, C, H, W]``, uint8 on the CPU.
        """
        parts = [range(start, min(start + AT_ONCE, len(prompts))) for start in range(0, len(prompts), AT_ONCE)]
        return torch.cat([self.draw([prompts[i] for i in part], list(part), seed).cpu() for part in parts])

    @override
    def layers(self) -> list[nn.Module]:
        return list(getattr(self.network, "blocks", None) or self.network.transformer_blocks)

    def configure_model(self) -> None:
        """Load the ``pretrained`` weights, if any, then continue as :meth:`GenerativeModule.configure_model` does."""
        if self.pretrained is not None and not self._started:
            load_weights(self.network, self.pretrained, self.host)
        self._started = True
        super().configure_model()

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [self._writer]

    def on_fit_start(self) -> None:
        """Load the teacher of the distillation, if there is one, and embed the empty caption if captions are dropped."""
        self.linearization.start(self, lambda path: read_transformer(path, self.host, self.shape))
        self._check_encoded_captions()
        if self.flow.caption_dropout:
            self.empty_caption()

    def on_predict_start(self) -> None:
        """Load the text encoder and the autoencoder, so that the measured time of the first batch does not include loading."""
        self.check_drawable()

    def rest(self) -> None:
        """Move the text encoder and the autoencoder to the CPU, to free GPU memory for training."""
        self.captions.rest()
        if self.codec is not None:
            self.codec.rest()

    def _check_encoded_captions(self) -> None:
        """Check that captions embedded in the data have the same length and instruction as the model's prompts.

        Raises:
            ValueError: if the number of tokens or the instruction differs, or the model does not have a text encoder.
        """
        length = getattr(self.trainer.datamodule, "text_length", None)  # type: ignore[attr-defined]
        if length is None:
            return
        if self.captions.config.encoder is None:
            raise ValueError(
                "the data's captions are encoded, and without text.encoder prompts would be encoded otherwise; name the "
                "pipeline that encoded them: --model.text.encoder=FOLDER_OR_NAME"
            )
        if length != self.captions.config.length:
            raise ValueError(
                f"captions have {length} tokens in the data (text_length) and {self.captions.config.length} in the model "
                "(text.length); set them alike"
            )
        instruction = getattr(self.trainer.datamodule, "instruction", self.captions.config.instruction)  # type: ignore[attr-defined]
        if instruction != self.captions.config.instruction:
            raise ValueError(
                f"captions were encoded with instruction {instruction!r:.40}, and prompts would be with "
                f"{self.captions.config.instruction!r:.40}; set --model.text.instruction to that of the data"
            )

    def forward(self, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """Predict the velocity of noisy samples in float32; see :meth:`velocity` for the arguments."""
        return self.velocity(self.network, noisy, times, text).float()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute the loss of flow matching or distillation for one batch, at random timesteps."""
        clean, text = self.clean(batch), self.encode_captions(batch)
        if self.flow.caption_dropout:
            dropped = torch.rand(len(text), device=text.device) < self.flow.caption_dropout
            text = torch.where(dropped[:, None, None], self.empty_caption(), text)
        times = draw_flow_times(self.flow.times, self.flow.shift, len(clean), None, clean.device)
        noisy, velocity = flow_point(clean, torch.randn_like(clean), times)
        if self.linearization.matches_layers(self):
            return self.linearization.layer_loss(self, noisy, times, text)
        predicted = self(noisy, times, text)
        loss = (predicted - velocity).square().mean()
        return self.linearization.distilled_loss(self, loss, predicted, noisy, times, text)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Draw the requested samples of a batch, except those that already have a file.

        Returns:
            ``pixels``, the drawn samples as uint8, and ``rows``, a dict for each of them: ``file`` (file name), ``prompt``,
            ``index``, ``seed``, ``seconds`` (drawing time) and ``at_once`` (number of samples drawn together).
        """
        counted = batch["valid"].nonzero()[:, 0].tolist()
        rows: list[dict[str, Any]] = [
            {
                "file": batch["file"][slot],
                "prompt": batch["caption"][slot],
                "index": int(batch["index"][slot]),
                "seed": int(batch["seed"][slot]),
            }
            for slot in counted
        ]
        missing = self._writer.missing(rows)
        rows, slots = [rows[number] for number in missing], [counted[number] for number in missing]
        if shards_weights(self.trainer):  # processes gather weights from each other: all draw equally often
            slots = list(range(len(batch["index"])))
        elif not slots:
            return {"pixels": [], "rows": []}
        start = time.perf_counter()
        indices = [int(batch["index"][slot]) for slot in slots]
        pixels = self.draw([batch["caption"][slot] for slot in slots], indices, int(batch["seed"][0]))
        if pixels.is_cuda:
            torch.cuda.synchronize()
        took = {"seconds": (time.perf_counter() - start) / len(slots), "at_once": len(slots)}
        positions = [indices.index(row["index"]) for row in rows]
        return {"pixels": pixels[positions], "rows": [{**row, **took} for row in rows]}

    def clean(self, batch: dict[str, Any]) -> Tensor:
        """Return the clean samples ``[B, C, ...]`` of a batch, to which noise is added.

        They are the latents of the batch, if it has any; otherwise its pixels, encoded if the model has an autoencoder.

        Raises:
            ValueError: if the model has a different number of channels, or the size is not a multiple of the patch size.
        """
        encoded = "latent" in batch
        clean: Tensor = batch["latent"] if encoded else batch[self.sample_key]
        if not encoded and self.codec is not None:
            clean = self.codec.encode(clean)
        config, what = self.network.config, self.samples
        if clean.shape[1] != config.in_channels:
            raise ValueError(
                f"{what} of {clean.shape[1]} channels for a transformer of {config.in_channels}; set "
                f"--model.transformer.in_channels and out_channels, or vae for {what} that become latents"
            )
        check_patches(clean.shape[2:], config.patch_size, f"{what} or latents")
        return clean

    def encode_captions(self, batch: dict[str, Any]) -> Tensor:
        """Return the embeddings ``[B, L, D]`` of a batch's captions, encoding captions that are text.

        Raises:
            ValueError: if the data hold embeddings of a width that the transformer does not accept.
        """
        if "text" not in batch:
            return self.captions.encode(batch["caption"], self.device)
        text: Tensor = batch["text"]
        if text.shape[-1] != self.captions.width:
            raise ValueError(
                f"captions are encoded in width {text.shape[-1]}, the transformer takes {self.captions.width}; set "
                f"--model.transformer.{self.text_option}"
            )
        return text

    def empty_caption(self) -> Tensor:
        """Return the embeddings ``[1, L, D]`` of the empty caption, read from the data if these contain embedded captions."""
        if self._empty is None:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
            tokens = data.empty_caption() if hasattr(data, "empty_caption") else None
            if tokens is None:
                self._empty = self.captions.encode([""], self.device)
            else:
                self._empty = torch.zeros(1, data.text_length, tokens.shape[-1], device=self.device)
                self._empty[0, : len(tokens)] = tokens[: data.text_length]
        return self._empty.to(self.device)

    @override
    def sample_losses(self, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """Compute the flow matching loss of each sample, ``[B]``. The sample's generator draws its timestep and noise."""
        cpu = torch.device("cpu")
        clean, text = self.clean(batch), self.encode_captions(batch)
        times = torch.cat(
            [draw_flow_times(self.flow.times, self.flow.shift, 1, generator, cpu) for generator in generators]
        )
        times = times.to(clean.device)
        noisy, velocity = flow_point(clean, sample_noise(clean, generators), times)
        return (self(noisy, times, text) - velocity).square().flatten(1).mean(1)
