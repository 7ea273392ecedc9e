"""Flow matching of captioned samples by a transformer of diffusers whose attention is swapped: what image and video share."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from lightning import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.generative.codecs import FrozenVAE
from lightning_mhla.generative.distillation import DistillationConfig, VelocityHost
from lightning_mhla.generative.flow import FlowConfig, draw_flow_times, flow_point
from lightning_mhla.generative.module import GenerativeModule, sample_noise
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart, choose_trained
from lightning_mhla.training.linearize import Linearization
from mhla_tasks.captioned.requests import SampleFolder
from mhla_tasks.captioned.text import CaptionEncoder


class CaptionedDiffusion(GenerativeModule):
    """A swapped transformer that predicts the velocity of captioned samples; arguments as for :class:`TrainingModule`.

    A domain calls :meth:`set_up` at the end of its constructor, and says how its transformer is called, how samples are
    encoded and drawn, and where weights come from.
    """

    output_names = ("proj_out", "scale_shift_table")

    samples: str
    """Samples, in errors."""

    sample_key: str
    """Entry of a batch with samples that a codec encodes; encoded ones come as ``latent``."""

    text_option: str
    """Option of the transformer that is the width of a caption's embeddings."""

    network: Any
    codec: Any
    sampling: Any

    def set_up(
        self,
        network: Any,
        captions: CaptionEncoder,
        codec: FrozenVAE | None,
        flow: FlowConfig,
        train: TrainedPart,
        lora: LoraOptions,
        distillation: DistillationConfig,
        checkpointing: bool,
        sampling: Any,
        pretrained: str | None,
        writer: SampleFolder,
    ) -> None:
        """Take over the parts.

        Args:
            network: a transformer of diffusers after :func:`lightning_mhla.swap_attention`.
            captions: encoder of the captions.
            codec: between samples and what the network denoises; None for samples as they are.
            flow: times, shift and caption dropout.
            train: trained parameters, see :func:`choose_trained`.
            lora: rank and alpha of the adapters.
            distillation: from the model before the swap.
            checkpointing: recompute blocks in the backward pass.
            sampling: sampler options; its ``guidance`` must be 1 without caption dropout.
            pretrained: weights to start from, for :meth:`load_pretrained`; None for none.
            writer: writes what predict draws.

        Raises:
            ValueError: for guidance without caption dropout.
        """
        if sampling.guidance != 1 and not flow.caption_dropout:
            raise ValueError(
                f"sampling.guidance={sampling.guidance} needs training without captions: flow.caption_dropout"
            )
        self.flow, self.sampling, self.distillation = flow, sampling, distillation
        self.network = network
        choose_trained(network, train, lora)
        if checkpointing:
            network.enable_gradient_checkpointing()
        self.captions, self.codec, self.pretrained = captions, codec, pretrained
        self._writer = writer
        self._started = False
        self.linearization = Linearization(distillation, VelocityHost(self.velocity))
        self._empty: Tensor | None = None

    @staticmethod
    @abstractmethod
    def velocity(network: Any, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """What a transformer predicts for samples at ``times`` ``[B]`` with captions ``[B, L, D]``."""

    @abstractmethod
    def load_pretrained(self, path: str) -> None:
        """Give the network the weights at a path."""

    @abstractmethod
    def build_teacher(self, path: str) -> Any:
        """The transformer before the swap, with the weights at a path."""

    @abstractmethod
    def check_drawable(self, sampling: Any = None) -> None:
        """Find out at once whether samples can be drawn; ValueError or FileNotFoundError if not."""

    @abstractmethod
    def draw(self, prompts: list[str], indices: list[int], seed: int, sampling: Any = None) -> Tensor:
        """Samples ``[B, ...]`` uint8 of prompts, each a function of weights, prompt, seed and its index."""

    @override
    def layers(self) -> list[nn.Module]:
        return list(getattr(self.network, "blocks", None) or self.network.transformer_blocks)

    def configure_model(self) -> None:
        """Take over weights to start from; then see :meth:`GenerativeModule.configure_model`."""
        if self.pretrained is not None and not self._started:
            self.load_pretrained(self.pretrained)
        self._started = True
        super().configure_model()

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [self._writer]

    def on_fit_start(self) -> None:
        """Load the teacher, if there is one, and the empty caption."""
        self.linearization.start(self, self.build_teacher)
        self._check_encoded_captions()
        if self.flow.caption_dropout:
            self.empty_caption()

    def on_predict_start(self) -> None:
        """Load what samples are drawn with, before the clock starts."""
        self.check_drawable()

    def rest(self) -> None:
        """Leave the GPU to training: a text encoder may be larger than the model."""
        self.captions.rest()
        if self.codec is not None:
            self.codec.rest()

    def _check_encoded_captions(self) -> None:
        """Refuse captions that come encoded otherwise than prompts will be."""
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
        """Velocity ``[B, C, ...]`` float32 of samples or latents at ``times`` ``[B]``, text ``[B, L, D]``."""
        return self.velocity(self.network, noisy, times, text).float()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The loss at random timesteps: plain, or of distillation."""
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
        """``pixels`` of the samples that count and are not there yet, and ``rows``: prompt, file and seconds of each."""
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
        kept = [indices.index(row["index"]) for row in rows]
        return {"pixels": pixels[kept], "rows": [{**row, **took} for row in rows]}

    def clean(self, batch: dict[str, Any]) -> Tensor:
        """The clean samples of a batch, ``[B, C, ...]``: latents as they come or encoded, or pixels.

        Raises:
            ValueError: for samples of other channels than the model's, or that its patches do not divide.
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
        """Embeddings ``[B, L, D]`` of a batch's captions.

        Raises:
            ValueError: when they come encoded for another width.
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
        """Embeddings ``[1, L, D]`` of the empty caption, of the data where captions come encoded."""
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
        """Return the plain loss."""
        cpu = torch.device("cpu")
        clean, text = self.clean(batch), self.encode_captions(batch)
        times = torch.cat(
            [draw_flow_times(self.flow.times, self.flow.shift, 1, generator, cpu) for generator in generators]
        )
        times = times.to(clean.device)
        noisy, velocity = flow_point(clean, sample_noise(clean, generators), times)
        return (self(noisy, times, text) - velocity).square().flatten(1).mean(1)


def check_patches(size: Sequence[int], patch: int | Sequence[int], what: str) -> None:
    """Raise a ValueError unless patches divide the axes of a sample.

    Args:
        size: frames, rows and columns, or rows and columns.
        patch: side of a patch, or its size along each axis.
        what: description of the samples, for the error.
    """
    steps = [patch] * len(size) if isinstance(patch, int) else list(patch)
    if any(length % step for length, step in zip(size, steps, strict=True)):
        axes = "frames, rows and columns" if len(size) == 3 else "rows and columns"
        raise ValueError(f"{what} of {list(size)} {axes} do not divide into patches of {steps}")
