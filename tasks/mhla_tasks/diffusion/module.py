"""Training, validation and sampling of a class-to-image diffusion transformer."""

from __future__ import annotations

from typing import Any

import torch
from lightning import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.generative.codecs import LatentCodec
from lightning_mhla.generative.images import OutputFormat, SampleWriter, to_pixels
from lightning_mhla.generative.module import GenerativeModule, sample_noise
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.training.classes import NamesClasses, known_classes
from lightning_mhla.training.compilation import CompileOptions
from lightning_mhla.training.optim import OptimizerConfig
from mhla_tasks.diffusion.dig import DiGConfig
from mhla_tasks.diffusion.model import DiT, Size
from mhla_tasks.diffusion.pretrained import load_pretrained
from mhla_tasks.diffusion.process import ProcessConfig, make_process
from mhla_tasks.diffusion.sampling import SamplingConfig, check_labels, check_sampling, draw_samples


class ClassToImage(NamesClasses, GenerativeModule):
    """A DiT trained on labelled images or latents, and sampled by class.

    Args:
        attention: the attention layer.
        num_classes: number of classes; null for those of the data, on the command line.
        sample_size: side of what is denoised, or height and width: of the image in pixels, or of its latent.
        channels: number of channels of what is denoised: 4 for latents of Stable Diffusion's VAE.
        layer_kinds: kinds of the layers where they differ, repeated to the depth: [mhla, mhla, softmax] gives every third
            layer softmax; null for attention.kind everywhere.
        size: DiT's S, B, L or XL; null to give dim, depth and heads.
        dim: width of the tokens.
        depth: number of blocks.
        heads: attention heads.
        dig: makes the network a DiG, of DiG's sizes; null for a DiT. mlp_ratio is then left out.
        patch_size: side of a token, in pixels of what is denoised.
        mlp_ratio: inner width of the MLP over the tokens'.
        frequency_shift: shift of the timestep's frequencies: 0 as DiT was trained, 1 as diffusers computes them.
        mlp_norm_eps: epsilon of the norm before the MLP: 1e-6 as DiT was trained, 1e-5 in diffusers.
        checkpointing: recompute blocks in the backward pass, to save memory.
        compile: compile the network, block by block (:func:`torch.compile`).
        compile_options: options of torch.compile; see :class:`lightning_mhla.training.compilation.CompileOptions`.
        process: objective and noise schedule.
        sampling: default sampler options of predict and callbacks.
        vae: folder or hub name of a diffusers AutoencoderKL, for latents; null for pixels.
        pretrained: weights to start from, see mhla_tasks.diffusion.pretrained; not read where --ckpt_path brings weights.
        output: format of predict: png (a file for each sample) or npz (one file, as ADM's evaluator reads it).
        optimizer: AdamW or CAME, and its schedule.
        ema_decay: decay of the moving average of the weights that validation and samples use; null for none.
    """

    network: DiT
    train_batch = ("latent|image", "label")
    evaluation_batch = ("latent|image", "label", "index")
    predict_batch = ("label", "index", "seed")

    def __init__(
        self,
        attention: AttentionConfig,
        num_classes: int | None,
        sample_size: int | list[int],
        channels: int,
        layer_kinds: list[str] | None = None,
        size: Size | None = None,
        dim: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        dig: DiGConfig | None = None,
        patch_size: int = 2,
        mlp_ratio: float = 4.0,
        frequency_shift: float = 0.0,
        mlp_norm_eps: float = 1e-6,
        checkpointing: bool = False,
        compile: bool = False,
        compile_options: CompileOptions | None = None,
        process: ProcessConfig = ProcessConfig(),
        sampling: SamplingConfig = SamplingConfig(),
        vae: str | None = None,
        pretrained: str | None = None,
        output: OutputFormat = "png",
        optimizer: OptimizerConfig = OptimizerConfig(),
        ema_decay: float | None = None,
    ) -> None:
        num_classes = known_classes(num_classes)
        attention = as_dataclass(AttentionConfig, attention)
        process = as_dataclass(ProcessConfig, process)
        sampling = as_dataclass(SamplingConfig, sampling)
        optimizer = as_dataclass(OptimizerConfig, optimizer)
        compile_options = as_dataclass(CompileOptions, compile_options or {}) if compile else None
        super().__init__(optimizer, ema_decay, compile_options)
        self.save_hyperparameters(ignore=["pretrained", "output"])
        keep_plain(self)
        self.sampling, self.output = sampling, output
        self.process = make_process(process)
        check_sampling(self.process, sampling)
        self.network = DiT(
            sample_size,
            channels,
            num_classes,
            attention,
            layer_kinds=layer_kinds,
            size=size,
            dim=dim,
            depth=depth,
            heads=heads,
            dig=None if dig is None else as_dataclass(DiGConfig, dig),
            patch_size=patch_size,
            out_channels=channels * (2 if process.learns_sigma else 1),
            mlp_ratio=mlp_ratio,
            frequency_shift=frequency_shift,
            mlp_norm_eps=mlp_norm_eps,
            checkpointing=checkpointing,
        )
        self._pretrained = pretrained
        self.codec = None if vae is None else LatentCodec(vae)

    @override
    def layers(self) -> list[nn.Module]:
        return list(self.network.backbone.blocks)

    def configure_model(self) -> None:
        """Take over published weights; then see :meth:`GenerativeModule.configure_model`."""
        if self._pretrained is not None:
            load_pretrained(self.network, self._pretrained)
            self._pretrained = None
        super().configure_model()

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [SampleWriter(self.output)]

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """The network's prediction; see :meth:`DiT.forward`."""
        return self.network(x, times, labels)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The process's loss at random timesteps."""
        clean = self._clean(batch)
        times = self.process.draw_times(len(clean), None, clean.device)
        labels = self.process.drop_labels(batch["label"], self.network.num_classes)
        loss = self.process.losses(self.network, clean, torch.randn_like(clean), times, labels).mean()
        return self.log_loss(loss, len(clean))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Pixels, labels and indices of the samples that count."""
        pixels = self.draw(batch["label"], batch["index"].tolist(), int(batch["seed"][0]), self.sampling)
        drawn = {"pixels": pixels, "label": batch["label"], "index": batch["index"]}
        return {name: values[batch["valid"]] for name, values in drawn.items()}

    def draw(self, labels: Tensor, indices: list[int], seed: int, sampling: SamplingConfig) -> Tensor:
        """Samples as 8-bit pixels ``[B, C, S, S]``; see :func:`mhla_tasks.diffusion.sampling.draw_samples`."""
        samples = draw_samples(self.network, self.process, sampling, labels, indices, seed)
        return to_pixels(samples if self.codec is None else self.codec.decode(samples))

    @property
    def num_conditions(self) -> int:
        """Number of classes; see :class:`lightning_mhla.generative.drawing.ImageGenerator`."""
        return self.network.num_classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of drawn images."""
        return (self.network.channels, *self.network.sides) if self.codec is None else (3, 64, 64)

    def draw_numbered(self, indices: list[int], seed: int, sampling: SamplingConfig | None) -> Tensor:
        """Draw sample i of class i modulo the number of classes."""
        labels = torch.tensor(indices, device=self.device) % self.num_conditions
        return self.draw(labels, indices, seed, sampling or self.sampling)

    def describe_sampling(self, sampling: SamplingConfig | None) -> dict[str, Any]:
        """Sampler, steps and guidance, as evaluations record them."""
        used = sampling or self.sampling
        sampler = used.sampler or self.process.samplers[0]
        return {"sampler": sampler, "sampling_steps": used.steps, "guidance": used.guidance}

    def check_drawable(self, sampling: SamplingConfig | None = None) -> None:
        """Find out before training whether samples can be drawn and become images.

        Raises:
            ValueError: for latents without a VAE, or sampling that the process cannot do.
        """
        check_sampling(self.process, sampling or self.sampling)
        if self.codec is None and self.network.channels not in (1, 3):
            raise ValueError(
                f"samples of {self.network.channels} channels are latents; name the VAE that decodes them: "
                "--model.vae=FOLDER_OR_NAME"
            )
        if self.codec is not None:
            self.codec.model(torch.device("cpu"))

    @override
    def on_predict_start(self) -> None:
        self.check_drawable()

    @override
    def sample_losses(self, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        clean = self._clean(batch, generators)
        times = torch.cat([self.process.draw_times(1, generator, torch.device("cpu")) for generator in generators])
        noise = sample_noise(clean, generators)
        return self.process.losses(self.network, clean, noise, times.to(clean.device), batch["label"])

    def _clean(self, batch: dict[str, Any], generators: list[torch.Generator] | None = None) -> Tensor:
        """The clean samples of a batch: latents as they come or encoded (with noise of ``generators``, one each), or pixels.

        Raises:
            ValueError: for images of another size than the model's, or without the VAE that they need; for a label that the
            model does not know.
        """
        clean = batch["latent"] if "latent" in batch else batch["image"]
        expected = (self.network.channels, *self.network.sides)
        if "image" in batch and self.codec is not None:
            drawn = (
                None if generators is None else [torch.randn(expected, generator=generator) for generator in generators]
            )
            clean = self.codec.encode(clean, None if drawn is None else torch.stack(drawn).to(clean.device))
        if clean.shape[1:] != expected:
            what = "latents" if "latent" in batch or self.codec is not None else "images"
            raise ValueError(
                f"{what} of channels and sides {tuple(clean.shape[1:])} for a model of {expected}; set "
                "--model.sample_size and channels, or vae for images that become latents"
            )
        check_labels(batch["label"].tolist(), self.network.num_classes)
        return clean
