"""Training, validation and sampling of a Wan transformer whose attention is replaced."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.generative.adapters import LoraOptions, TrainedPart, choose_trained
from lightning_mhla.generative.codecs import ClipCodec
from lightning_mhla.generative.distillation import DistillationConfig, Teacher
from lightning_mhla.generative.flow import FlowConfig, draw_flow_times, flow_point
from lightning_mhla.generative.module import GenerativeModule, sample_noise
from lightning_mhla.generative.text import TextConfig, make_encoder
from lightning_mhla.swap import swapped_layers
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.lightning_private import ddp_options
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.training.compilation import CompileOptions
from lightning_mhla.training.optim import OptimizerConfig
from mhla_tasks.video.model import TransformerConfig, build_transformer
from mhla_tasks.video.pretrained import build_teacher, load_weights
from mhla_tasks.video.sampling import SamplingConfig, draw_clips, latent_shape
from mhla_tasks.video.writer import ClipWriter


class VideoDiffusion(GenerativeModule):
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
        optimizer: AdamW and its schedule.
        ema_decay: decay of the moving average of the weights that validation and clips use; null for none.
    """

    output_names = ("proj_out", "scale_shift_table")

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
        flow = as_dataclass(FlowConfig, flow)
        text = as_dataclass(TextConfig, text)
        lora = as_dataclass(LoraOptions, lora)
        distillation = as_dataclass(DistillationConfig, distillation)
        sampling = as_dataclass(SamplingConfig, sampling)
        optimizer = as_dataclass(OptimizerConfig, optimizer)
        compile_options = as_dataclass(CompileOptions, compile_options or {}) if compile else None
        super().__init__(optimizer, ema_decay, compile_options)
        self.save_hyperparameters(ignore=["pretrained", "output"])
        keep_plain(self)
        if sampling.guidance != 1 and not flow.caption_dropout:
            raise ValueError(
                f"sampling.guidance={sampling.guidance} needs training without captions: flow.caption_dropout"
            )
        self.flow, self.sampling, self.distillation = flow, sampling, distillation
        self.network: Any = build_transformer(transformer, attention, layer_kinds)
        choose_trained(self.network, train, lora)
        if checkpointing:
            self.network.enable_gradient_checkpointing()
        self.captions = make_encoder(text, transformer.text_dim)
        self.codec = None if vae is None else ClipCodec(vae)
        self._shape, self.pretrained = transformer, pretrained
        self._writer = ClipWriter(output)
        self._started = False
        self._teacher: Teacher | None = None
        self._empty: Tensor | None = None

    @override
    def layers(self) -> list[nn.Module]:
        return list(self.network.blocks)

    def configure_model(self) -> None:
        """Take over weights to start from; then see :meth:`GenerativeModule.configure_model`."""
        if self.pretrained is not None and not self._started:
            load_weights(self.network, self.pretrained)
        self._started = True
        super().configure_model()

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [self._writer]

    def on_fit_start(self) -> None:
        """Load the teacher, if there is one, and the empty caption."""
        path = self.distillation.teacher
        if self.distillation.layer_steps:
            self._check_layer_steps()
        if path is not None and self._teacher is None:
            self._teacher = build_teacher(self._shape, path)
        if self._teacher is not None:
            self._teacher.model.to(self.device)
        self._check_encoded_captions()
        if self.flow.caption_dropout:
            self.empty_caption()

    def on_predict_start(self) -> None:
        """Load what clips are drawn with, before the clock starts."""
        self.check_drawable()

    def check_drawable(self) -> None:
        """Find out at once whether clips can be drawn.

        Raises:
            ValueError: for latents without a VAE, or a size that cannot be.
            FileNotFoundError: for a VAE or text encoder that is not there.
        """
        channels = self.network.config.out_channels
        if self.codec is None and channels not in (1, 3):
            raise ValueError(
                f"clips of {channels} channels are latents; name the VAE that decodes them: "
                "--model.init_args.vae=FOLDER_OR_NAME"
            )
        latent_shape(self.network, self.codec, self.sampling)
        if self.codec is not None:
            self.codec.model(self.device)
        self.captions.tokens("", self.device)

    def _check_encoded_captions(self) -> None:
        """Refuse captions that come encoded otherwise than prompts will be."""
        length = getattr(self.trainer.datamodule, "text_length", None)  # type: ignore[attr-defined]
        if length is None:
            return
        if self.captions.config.encoder is None:
            raise ValueError(
                "the data's captions are encoded, and without text.encoder prompts would be encoded otherwise; name the "
                "pipeline that encoded them: --model.init_args.text.encoder=FOLDER_OR_NAME"
            )
        if length != self.captions.config.length:
            raise ValueError(
                f"captions have {length} tokens in the data (text_length) and {self.captions.config.length} in the model "
                "(text.length); cross-attention sees the filling too, so set them alike"
            )

    def _check_layer_steps(self) -> None:
        """Refuse strategies under which layers cannot be trained one by one."""
        strategy = self.trainer.strategy
        if not swapped_layers(self.network):
            raise ValueError("distillation.layer_steps matches replaced layers, and none is replaced; see layer_kinds")
        if shards_weights(self.trainer):
            raise ValueError(
                f"distillation.layer_steps calls layers by themselves, whose weights {type(strategy).__name__} shards with "
                "their blocks; match layers on one device or under DDP, and shard in a run that starts from its checkpoint"
            )
        unused = ddp_options(strategy).get("find_unused_parameters", False)
        if isinstance(strategy, DDPStrategy) and self.hparams["train"] == "all" and not unused:
            raise ValueError(
                "distillation.layer_steps leaves parameters outside the replaced layers without gradients: set "
                "--model.init_args.train=attention (or new, lora), or --trainer.strategy=ddp_find_unused_parameters_true"
            )

    def forward(self, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """Velocity ``[B, C, F, H, W]`` float32 of clips or latents at ``times`` ``[B]``, text ``[B, L, D]``."""
        return self.network(noisy, times, text).sample.float()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The loss at random timesteps: plain, or of distillation."""
        clean, text = self.clean(batch), self.encode_captions(batch)
        if self.flow.caption_dropout:
            dropped = torch.rand(len(text), device=text.device) < self.flow.caption_dropout
            text = torch.where(dropped[:, None, None], self.empty_caption(), text)
        times = draw_flow_times(self.flow.times, self.flow.shift, len(clean), None, clean.device)
        noisy, velocity = flow_point(clean, torch.randn_like(clean), times)
        if self._teacher is not None and self.trainer.global_step < self.distillation.layer_steps:
            loss = self._teacher.layer_loss(self.network, noisy, times, text)
            self.log("train/layer_distance", loss.detach(), batch_size=len(clean))
            return self.log_loss(loss, len(clean))
        predicted = self(noisy, times, text)
        loss = (predicted - velocity).square().mean()
        if self._teacher is not None:
            distance = (predicted - self._teacher.velocity(noisy, times, text)).square().mean()
            self.log("train/teacher_distance", distance.detach(), batch_size=len(clean))
            self.log("train/flow_loss", loss.detach(), batch_size=len(clean))
            loss = self.distillation.flow_weight * loss + self.distillation.velocity_weight * distance
        return self.log_loss(loss, len(clean))

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Frames of the clips that count and are not there yet, their prompts and files, and the seconds that each took."""
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
        written = {"fps": self.sampling.fps, "crf": self.sampling.crf}
        missing = self._writer.missing(rows)
        rows, slots = [rows[number] for number in missing], [counted[number] for number in missing]
        if shards_weights(self.trainer):  # processes gather weights from each other: all draw equally often
            slots = list(range(len(batch["index"])))
        elif not slots:
            return {"frames": [], "rows": [], **written}
        start = time.perf_counter()
        indices = [int(batch["index"][slot]) for slot in slots]
        frames = self.draw([batch["caption"][slot] for slot in slots], indices, int(batch["seed"][0]))
        if frames.is_cuda:
            torch.cuda.synchronize()
        took = {"seconds": (time.perf_counter() - start) / len(slots), "clips_at_once": len(slots)}
        kept = [indices.index(row["index"]) for row in rows]
        return {"frames": frames[kept], "rows": [{**row, **took} for row in rows], **written}

    def draw(self, prompts: list[str], indices: list[int], seed: int) -> Tensor:
        """Clips ``[B, F, C, H, W]`` uint8; see :func:`mhla_tasks.video.sampling.draw_clips`."""
        text = self.captions.encode(prompts, self.device)
        negative = self.captions.encode([self.sampling.negative_prompt], self.device)[0]
        return draw_clips(self.network, self.codec, self.sampling, self.flow.shift, text, negative, indices, seed)

    def clean(self, batch: dict[str, Any]) -> Tensor:
        """The clean samples of a batch, ``[B, C, F, H, W]``: latents as they come or encoded, or pixels.

        Raises:
            ValueError: for clips of other channels than the model's, or that its patches do not divide.
        """
        clean = batch["latent"] if "latent" in batch else batch["video"]
        if "video" in batch and self.codec is not None:
            clean = self.codec.encode(clean)
        config = self.network.config
        if clean.shape[1] != config.in_channels:
            raise ValueError(
                f"clips of {clean.shape[1]} channels for a transformer of {config.in_channels}; set "
                "--model.init_args.transformer.in_channels and out_channels, or vae for clips that become latents"
            )
        if any(length % step for length, step in zip(clean.shape[2:], config.patch_size, strict=True)):
            raise ValueError(
                f"clips or latents of {list(clean.shape[2:])} frames, rows and columns do not divide into patches of "
                f"{list(config.patch_size)}"
            )
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
                "--model.init_args.transformer.text_dim"
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
