"""Training module of a class-to-image diffusion transformer: training, validation and sampling."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.diffusion.dig import DiGConfig
from mhla_tasks.diffusion.model import DiT, Size
from mhla_tasks.diffusion.pretrained import load_pretrained
from mhla_tasks.diffusion.process import ProcessConfig, make_process
from mhla_tasks.diffusion.sampling import DiTSamplingConfig, check_labels, check_sampling, draw_samples


@dataclass(frozen=True)
class DiTShape:
    """Shape of a diffusion transformer.

    Args:
        dim: width of the tokens. Give dim, depth and heads if the model's size is null.
        depth: number of blocks.
        heads: number of attention heads.
        patch_size: side of the square patch that becomes one token, in pixels of the sample.
        mlp_ratio: inner width of the MLP divided by the width of the tokens.
        frequency_shift: shift of the timestep's frequencies: 0 as DiT was trained, 1 as diffusers computes them.
        mlp_norm_eps: epsilon of the norm before the MLP: 1e-6 as DiT was trained, 1e-5 in diffusers.
    """

    dim: int | None = None
    depth: int | None = None
    heads: int | None = None
    patch_size: int = 2
    mlp_ratio: float = 4.0
    frequency_shift: float = 0.0
    mlp_norm_eps: float = 1e-6


class ClassToImage(NamesClasses, GenerativeModule):
    """Class-conditional image generator: a DiT trained on labeled images or latents, and sampled by class.

    Args:
        attention: attention layer.
        num_classes: number of classes; null on the command line to use the classes that the data names.
        sample_size: side, or height and width, of the samples: images in pixels, or latents in latent pixels.
        channels: number of channels of the samples: 4 for latents of Stable Diffusion's VAE.
        layer_kinds: kinds of the layers if they differ, repeated to the depth: with [mhla, mhla, softmax], every third layer
            is softmax; null for attention.kind everywhere.
        size: S, B, L or XL, as in DiT; null to use dim, depth and heads of shape.
        shape: shape of the transformer.
        dig: options of a DiG; null for a DiT. For a DiG, size is a size of DiG, and shape.mlp_ratio must be left out.
        process: objective and noise schedule.
        sampling: default sampler options of the predict command and of callbacks.
        vae: folder or hub name of a diffusers AutoencoderKL, for latents; null for pixels.
        pretrained: path of the weights to start from, see mhla_tasks.diffusion.pretrained; ignored if --ckpt_path supplies the
            weights.
        output: output format of the predict command: png (one file per sample) or npz (one file, which ADM's evaluator reads).
        training: optimizer, moving average of the weights, checkpointing and compilation.
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
        shape: DiTShape = DiTShape(),
        dig: DiGConfig | None = None,
        process: ProcessConfig = ProcessConfig(),
        sampling: DiTSamplingConfig = DiTSamplingConfig(),
        vae: str | None = None,
        pretrained: str | None = None,
        output: OutputFormat = "png",
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        num_classes = known_classes(num_classes)
        attention = as_dataclass(AttentionConfig, attention)
        process = as_dataclass(ProcessConfig, process)
        sampling = as_dataclass(DiTSamplingConfig, sampling)
        super().__init__(training)
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
            dig=None if dig is None else as_dataclass(DiGConfig, dig),
            out_channels=channels * (2 if process.learns_sigma else 1),
            checkpointing=self.training_options.checkpointing,
            **asdict(as_dataclass(DiTShape, shape, "shape")),
        )
        self._pretrained = pretrained
        self.codec = None if vae is None else LatentCodec(vae)

    @override
    def layers(self) -> list[nn.Module]:
        return list(self.network.backbone.blocks)

    def configure_model(self) -> None:
        """Load the ``pretrained`` weights, if any, then continue as :meth:`GenerativeModule.configure_model` does."""
        if self._pretrained is not None:
            load_pretrained(self.network, self._pretrained)
            self._pretrained = None  # Lightning calls this hook again for each stage; trained weights must stay
        super().configure_model()

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [SampleWriter(self.output)]

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Predict noise or velocity from noisy samples; see :meth:`DiT.forward`."""
        return self.network(x, times, labels)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute the mean denoising loss of one batch, at random timesteps and with some labels dropped."""
        clean = self._clean(batch)
        times = self.process.draw_times(len(clean), None, clean.device)
        labels = self.process.drop_labels(batch["label"], self.network.num_classes)
        loss = self.process.losses(self.network, clean, torch.randn_like(clean), times, labels).mean()
        return self.log_loss(loss, len(clean))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Draw the samples that a batch requests.

        Returns:
            ``pixels`` ``[n, C, S, S]`` uint8, ``label`` ``[n]`` and ``index`` ``[n]``, without entries that only pad the batch.
        """
        pixels = self.draw(batch["label"], batch["index"].tolist(), int(batch["seed"][0]), self.sampling)
        drawn = {"pixels": pixels, "label": batch["label"], "index": batch["index"]}
        return {name: values[batch["valid"]] for name, values in drawn.items()}

    def draw(self, labels: Tensor, indices: list[int], seed: int, sampling: DiTSamplingConfig) -> Tensor:
        """Draw samples as uint8 pixels ``[B, C, S, S]``; see :func:`mhla_tasks.diffusion.sampling.draw_samples`."""
        samples = draw_samples(self.network, self.process, sampling, labels, indices, seed)
        return to_pixels(samples if self.codec is None else self.codec.decode(samples))

    @property
    def num_conditions(self) -> int:
        """Number of conditions that samples can be drawn for: the number of classes."""
        return self.network.num_classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of drawn images; (3, 64, 64) as a placeholder if a VAE decodes them."""
        return (self.network.channels, *self.network.sides) if self.codec is None else (3, 64, 64)

    def draw_numbered(self, indices: list[int], seed: int, sampling: DiTSamplingConfig | None) -> Tensor:
        """Draw samples as uint8 pixels ``[B, C, S, S]``; the sample with index i has class i modulo the number of classes."""
        labels = torch.tensor(indices, device=self.device) % self.num_conditions
        return self.draw(labels, indices, seed, sampling or self.sampling)

    def describe_sampling(self, sampling: DiTSamplingConfig | None) -> dict[str, Any]:
        """Return the sampler options that are recorded with metrics: ``sampler``, ``sampling_steps`` and ``guidance``."""
        used = sampling or self.sampling
        sampler = used.sampler or self.process.samplers[0]
        return {"sampler": sampler, "sampling_steps": used.steps, "guidance": used.guidance}

    def check_drawable(self, sampling: DiTSamplingConfig | None = None) -> None:
        """Check that samples can be drawn and converted to images, before time is spent on training or sampling.

        Raises:
            ValueError: if latents have no VAE, or the process does not support the sampling options.
            FileNotFoundError: if the VAE does not exist.
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
        # Drawn on the CPU, so that every device gives the same times.
        times = torch.cat([self.process.draw_times(1, generator, torch.device("cpu")) for generator in generators])
        noise = sample_noise(clean, generators)
        return self.process.losses(self.network, clean, noise, times.to(clean.device), batch["label"])

    def _clean(self, batch: dict[str, Any], generators: list[torch.Generator] | None = None) -> Tensor:
        """Return the clean samples ``[B, C, H, W]`` of a batch, to which noise is added.

        They are the latents of the batch, if it has any; otherwise its images, encoded if the model has a VAE.

        Args:
            batch: batch of the data module.
            generators: generators with which latents are drawn from the VAE's posterior, one for each sample; None for the
                global generator.

        Raises:
            ValueError: if the samples have a different size from the model's, or the model does not have a label's class.
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
