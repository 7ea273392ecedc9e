"""Base class of Lightning modules that train diffusers transformers with replaced attention on captioned samples."""

# Longer than other modules because it holds training, validation and sampling of two kinds of models: text-to-image and video.

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from lightning import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla import AttentionConfig, CrossAttentionConfig
from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.generative.codecs import FrozenVAE
from lightning_mhla.generative.distillation import DistillationConfig, VelocityHost
from lightning_mhla.generative.flow import FlowConfig, draw_flow_times, flow_point
from lightning_mhla.generative.module import GenerativeModule, sample_noise
from lightning_mhla.generative.solvers import check_steps
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart, choose_trained
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.training.linearize import DistilledLinearization
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.captioned.host import Host, build_transformer, load_weights, read_transformer
from mhla_tasks.captioned.requests import SampleFolder
from mhla_tasks.captioned.sampling import check_patches, denoise, latent_shape
from mhla_tasks.captioned.text import TextConfig, make_encoder

AT_ONCE = 32
"""Maximum number of samples that are drawn at once."""


class CaptionedDiffusion(GenerativeModule):
    """Base class of captioned flow matching models: a diffusers transformer whose self-attention is replaced.

    A subclass names the classes of the transformer, the autoencoder and the callback that writes samples. It implements the
    call of the transformer and the conversion of the pipeline's inputs and outputs.

    Args:
        attention: options of the attention that replaces the transformer's self-attention.
        transformer: options of the transformer, such as its width and its number of layers.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length. "keep" leaves the attention of a layer unchanged, and "replace" uses attention.kind. null replaces the
            attention of all layers.
        cross_attention: options of the attention that replaces the transformer's cross-attention to the caption in all layers,
            such as {block_grid: [4, 4], key_block_size: 8}; null keeps the original. Its kind is mhla, linear or softmax.
        flow: options of flow matching: distribution and shift of the training timesteps, and caption dropout.
        text: options of the caption encoder.
        vae: folder or Hugging Face Hub name of the autoencoder, or of a pipeline that contains it, if the transformer works on
            latents; null if it works on pixels.
        train: parameters to train: "all"; "attention" for the replaced attention layers with their projections; "new" for only
            the parameters that the replacement added; or "lora" for these parameters and low-rank adapters of the projections.
        lora: rank, alpha and dropout of the low-rank adapters.
        distillation: options of distillation from the same transformer with its original attention.
        sampling: sampler options of the predict command and of callbacks.
        pretrained: source of the initial weights: a run folder (its latest checkpoint), a training checkpoint, a weights file,
            a folder that save_pretrained wrote, or a Hugging Face Hub name. It is ignored if --ckpt_path supplies the weights.
        output: folder for the samples that the predict command draws; samples that exist there are not drawn again. null for
            the log folder.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if the attention of the transformer cannot be replaced as configured, or sampling uses guidance but the
            model is trained without caption dropout.
    """

    usage: ClassVar[dict[str, str]] = {
        "Draw from a caption": "lightning predict {run} --data.prompts.prompts='[CAPTION]'"
    }
    output_names = ("proj_out", "scale_shift_table")

    predict_batch = ("caption", "file", "index", "seed")

    host: ClassVar[Host]
    """Description of the transformer."""

    transformer_options: ClassVar[type]
    """Dataclass of the transformer's options."""

    sampling_options: ClassVar[type]
    """Dataclass of the sampler options."""

    codec_kind: ClassVar[type[FrozenVAE]]
    """Class of the autoencoder that encodes samples as latents, which the network denoises, and decodes latents."""

    writer_kind: ClassVar[type[SampleFolder]]
    """Class of the callback that writes the samples that the predict command draws."""

    samples: ClassVar[str]
    """Plural noun for the samples in error messages, such as ``images``."""

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
        cross_attention: CrossAttentionConfig | None,
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
        self._check_guidance(self.sampling)
        self.shape: Any = as_dataclass(self.transformer_options, transformer)
        self.captions = make_encoder(as_dataclass(TextConfig, text), getattr(self.shape, self.text_option))
        self.codec = None if vae is None else self.codec_kind(vae)
        cross = None if cross_attention is None else as_dataclass(CrossAttentionConfig, cross_attention)
        self.network = build_transformer(
            self.host, self.shape, as_dataclass(AttentionConfig, attention), layer_kinds, cross
        )
        choose_trained(self.network, train, as_dataclass(LoraOptions, lora, "lora"))
        if self.training_options.checkpointing:
            self.network.enable_gradient_checkpointing()
        self.pretrained = self._pretrained = pretrained
        self._writer = self.writer_kind(output)
        self.distillation = as_dataclass(DistillationConfig, distillation)
        self.linearization = DistilledLinearization(self.distillation, VelocityHost(self.velocity))
        self._empty: Tensor | None = None

    @staticmethod
    @abstractmethod
    def velocity(network: Any, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """Predict the velocity (noise minus data) of noisy samples.

        Args:
            network: transformer.
            noisy: noisy samples ``[B, C, ...]``.
            times: timesteps ``[B]`` from 0 (data) to 1000 (noise).
            text: embedded captions ``[B, L, D]``, where L is the number of tokens and D their width.

        Returns:
            Velocity with the shape of ``noisy``.
        """

    @staticmethod
    @abstractmethod
    def caption_arguments(text: Tensor, negative: Tensor) -> dict[str, Tensor]:
        """Convert embedded captions to keyword arguments of the diffusers pipeline.

        Args:
            text: embedded captions ``[B, L, D]``, where L is the number of tokens and D their width.
            negative: embedded negative captions, with the shape of ``text``.

        Returns:
            Keyword arguments by name, such as ``prompt_embeds``.
        """

    @staticmethod
    @abstractmethod
    def to_bytes(samples: Tensor) -> Tensor:
        """Convert samples with values in -1 .. 1 to uint8 pixels.

        Args:
            samples: images ``[B, C, H, W]`` or clips ``[B, C, F, H, W]`` with F frames.

        Returns:
            Images ``[B, C, H, W]`` or clips ``[B, F, C, H, W]``.
        """

    def check_drawable(self, sampling: Any = None) -> None:
        """Load the text encoder and the autoencoder, and check that samples can be drawn.

        Args:
            sampling: sampler options, an instance of :attr:`sampling_options`; None to use the module's own options.

        Raises:
            ValueError: if an autoencoder is required but not configured, or the sample size, the guidance or the number of
                steps is not supported.
            FileNotFoundError: if the text encoder or the autoencoder does not exist.
        """
        channels = self.network.config.out_channels
        if self.codec is None and channels not in (1, 3):
            raise ValueError(
                f"{self.samples} of {channels} channels are latents; name the autoencoder that decodes them: "
                "--model.vae=FOLDER_OR_NAME"
            )
        used = sampling or self.sampling
        self._check_guidance(used)
        check_steps(self.host.schedulers[used.sampler](self.flow.shift), used.sampler, used.steps)
        latent_shape(self.network, self.codec, used, self.samples)
        if self.codec is not None:
            self.codec.check_channels(channels)
            self.codec.model(self.device)
        self.captions.tokens("", self.device)

    def _check_guidance(self, sampling: Any) -> None:
        """Check that training drops some captions if the sampler options use guidance, which also predicts without captions.

        Args:
            sampling: sampler options, an instance of :attr:`sampling_options`.

        Raises:
            ValueError: if guidance is used, but ``flow.caption_dropout`` is 0.
        """
        if sampling.guidance != 1 and not self.flow.caption_dropout:
            raise ValueError(
                f"sampling.guidance={sampling.guidance} needs training without captions: flow.caption_dropout"
            )

    def draw(self, prompts: list[str], indices: list[int], seed: int, sampling: Any = None) -> Tensor:
        """Draw samples, each of which depends only on the weights, the sampler options, its prompt, the seed and its index.

        Args:
            prompts: prompt of each of the B samples.
            indices: index of each sample, which determines its noise.
            seed: random seed, the same for all samples.
            sampling: sampler options, an instance of :attr:`sampling_options`; None to use the module's own options.

        Returns:
            Images ``[B, C, H, W]`` or clips ``[B, F, C, H, W]`` with F frames, uint8.

        Raises:
            ValueError: if the size of the samples is not a multiple of the autoencoder's downsampling factor, or the size of
                the latents is not a multiple of the patch size.
        """
        chosen = sampling or self.sampling
        shape = latent_shape(self.network, self.codec, chosen, self.samples)
        text = self.captions.encode(prompts, self.device)
        negative = self.captions.encode([chosen.negative_prompt], self.device, instructed=False)[0]
        captions = self.caption_arguments(text, negative.expand_as(text))
        drawn = denoise(self.host, self.network, shape, chosen, self.flow.shift, captions, indices, seed)
        samples = drawn if self.codec is None else self.codec.decode(drawn)
        self.check_samples(samples)
        return self.to_bytes(samples)

    def draw_prompts(self, prompts: list[str], seed: int) -> Tensor:
        """Draw a sample for each prompt, at most 32 at a time to limit memory.

        The noise of a sample depends on the position of its prompt in the list.

        Args:
            prompts: prompts of the n samples.
            seed: random seed, the same for all samples.

        Returns:
            Images ``[n, C, H, W]`` or clips ``[n, F, C, H, W]`` with F frames, uint8 on the CPU.
        """
        parts = [range(start, min(start + AT_ONCE, len(prompts))) for start in range(0, len(prompts), AT_ONCE)]
        return torch.cat([self.draw([prompts[i] for i in part], list(part), seed).cpu() for part in parts])

    @override
    def layers(self) -> list[nn.Module]:
        return list(getattr(self.network, "blocks", None) or self.network.transformer_blocks)

    @override
    def start_from(self, pretrained: str) -> None:
        load_weights(self.network, pretrained, self.host)

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [self._writer]

    @override
    def encoding_models(self) -> dict[str, str]:
        vae = None if self.codec is None else self.codec.path
        models = {"model.vae": vae, "model.text.encoder": self.captions.config.encoder}
        return {option: path for option, path in models.items() if path is not None}

    def on_fit_start(self) -> None:
        """Load the teacher, check the embedded captions of the data, and read or compute the embedding of the empty caption.

        The teacher is loaded only if distillation is configured, and the embedding of the empty caption is needed only if
        training drops captions.

        Raises:
            ValueError: if the captions in the data were embedded in a different way than the model embeds prompts.
        """
        super().on_fit_start()
        dtype = next(self.network.parameters()).dtype  # not float32 with a precision such as bf16-true
        self.linearization.start(self, lambda path: read_transformer(path, self.host, self.shape).to(dtype))
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
        """Check that captions in the data, if already embedded, were embedded in the same way as the model embeds prompts.

        Raises:
            ValueError: if captions in the data are embedded, and the number of tokens or the instruction inserted before
                captions differs, or the model has no text encoder.
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
        """Predict the velocity (noise minus data) of noisy samples.

        Args:
            noisy: noisy samples ``[B, C, ...]``.
            times: timesteps ``[B]`` from 0 (data) to 1000 (noise).
            text: embedded captions ``[B, L, D]``, where L is the number of tokens and D their width.

        Returns:
            Velocity with the shape of ``noisy``, float32.
        """
        return self.velocity(self.network, noisy, times, text).float()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute and log the loss of one batch at random timesteps: flow matching, with distillation if it is configured.

        In the first ``distillation.layer_steps`` steps, the loss is instead the distance between the outputs of the replaced
        layers and those of the teacher's layers.

        Args:
            batch: batch with latents ``latent`` ``[B, C, ...]``, or with pixels under the key :attr:`sample_key`; and with
                embedded captions ``text`` ``[B, L, D]``, or with ``caption``, a list of B texts.
            batch_idx: index of the batch; not used.

        Returns:
            Scalar loss.
        """
        clean, text = self.clean(batch), self.encode_captions(batch)
        if self.flow.caption_dropout:
            dropped = torch.rand(len(text), device=text.device) < self.flow.caption_dropout
            # to the dtype of the captions, which precision bf16-true changes
            text = torch.where(dropped[:, None, None], self.empty_caption().to(text.dtype), text)
        times = draw_flow_times(self.flow.times, self.flow.shift, len(clean), None, clean.device)
        noisy, velocity = flow_point(clean, torch.randn_like(clean), times)
        if self.linearization.matches_layers(self):
            return self.linearization.layer_loss(self, noisy, times, text)
        predicted = self(noisy, times, text)
        loss = (predicted - velocity).square().mean()
        return self.linearization.distilled_loss(self, loss, predicted, noisy, times, text)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Draw the samples that a batch requests, except those whose files already exist.

        Args:
            batch: batch with ``caption`` (prompts), ``file`` (file names), ``index``, ``seed`` and ``valid`` ``[B]`` bool,
                which is False for entries that only pad the batch.
            batch_idx: index of the batch; not used.

        Returns:
            A dict with two entries for the n drawn samples:

            * ``pixels``: images ``[n, C, H, W]`` or clips ``[n, F, C, H, W]`` with F frames, uint8; empty if n is 0.
            * ``rows``: a dict for each sample with ``file`` (file name), ``prompt``, ``index``, ``seed``, ``seconds`` (mean
              drawing time per sample) and ``at_once`` (number of samples drawn together).
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
        # Otherwise the time would end when the kernels are launched, not when they are done.
        if pixels.is_cuda:
            torch.cuda.synchronize()
        took = {"seconds": (time.perf_counter() - start) / len(slots), "at_once": len(slots)}
        # With sharded weights, more samples may have been drawn than are missing.
        positions = [indices.index(row["index"]) for row in rows]
        return {"pixels": pixels[positions], "rows": [{**row, **took} for row in rows]}

    def clean(self, batch: dict[str, Any]) -> Tensor:
        """Return the clean samples ``[B, C, ...]`` of a batch, to which noise is added in training.

        The samples are the latents in the batch, if there are any. Otherwise they are its pixels, which the autoencoder encodes
        if the model has one.

        Args:
            batch: batch with latents ``latent`` ``[B, C, ...]``, or with pixels under the key :attr:`sample_key`.

        Raises:
            ValueError: if the number of channels differs from the input channels of the transformer, or the size is not a
                multiple of the transformer's patch size.
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
        """Return the caption embeddings of a batch, and compute them if the batch contains captions as text.

        Args:
            batch: batch with embeddings ``text`` ``[B, L, D]``, or with ``caption``, a list of B texts.

        Returns:
            Embeddings ``[B, L, D]``, where L is the number of tokens and D their width.

        Raises:
            ValueError: if the batch contains embeddings whose width the transformer does not accept.
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
        """Return the embeddings of the empty caption.

        The embeddings are read from the data if it contains embedded captions. Otherwise, the caption encoder computes them.

        Returns:
            Embeddings ``[1, L, D]``, where L is the number of tokens and D their width.
        """
        if self._empty is None:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
            if hasattr(data, "empty_caption"):
                tokens = data.empty_caption()
                self._empty = torch.zeros(1, data.text_length, tokens.shape[-1], device=self.device)
                self._empty[0, : len(tokens)] = tokens[: data.text_length]
            else:
                self._empty = self.captions.encode([""], self.device)
        return self._empty.to(self.device)

    @override
    def sample_losses(self, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """Compute the flow matching loss of each sample in a batch, at random timesteps.

        Args:
            batch: batch of B samples in the form that :meth:`training_step` accepts.
            generators: a random generator for each sample, which draws its timestep and its noise.

        Returns:
            Losses ``[B]``.
        """
        # Times are drawn on the CPU, so that every device gives the same ones.
        cpu = torch.device("cpu")
        clean, text = self.clean(batch), self.encode_captions(batch)
        times = torch.cat(
            [draw_flow_times(self.flow.times, self.flow.shift, 1, generator, cpu) for generator in generators]
        )
        times = times.to(clean.device)
        noisy, velocity = flow_point(clean, sample_noise(clean, generators), times)
        return (self(noisy, times, text) - velocity).square().flatten(1).mean(1)
