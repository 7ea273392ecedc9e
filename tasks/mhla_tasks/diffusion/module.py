"""Lightning module of a class-to-image diffusion transformer: training, validation and sampling."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

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
from lightning_mhla.system.ranges import check_range
from lightning_mhla.training.classes import NamesClasses, known_classes
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.diffusion.dig import DiGConfig
from mhla_tasks.diffusion.model import DiT, Size
from mhla_tasks.diffusion.pretrained import load_pretrained
from mhla_tasks.diffusion.process import ProcessConfig, make_process
from mhla_tasks.diffusion.sampling import DiTSamplingConfig, check_labels, check_sampling, draw_samples


@dataclass(frozen=True)
class DiTShape:
    """Shape of a diffusion transformer: depth, widths and patches, and two details in which implementations differ.

    Args:
        dim: width of the tokens. dim, depth and heads are required if the model's option size is null, and must be null
            otherwise.
        depth: number of blocks.
        heads: number of attention heads.
        patch_size: side of the square patch that becomes one token, in pixels of the sample.
        mlp_ratio: inner width of the MLP divided by the width of the tokens.
        frequency_shift: shift in the frequencies of the timestep embedding. DiT was trained with 0; diffusers' DiT uses 1.
        mlp_norm_eps: epsilon of the norm before the MLP. DiT was trained with 1e-6; diffusers' DiT uses 1e-5.

    Raises:
        ValueError: if a value is out of range.
    """

    dim: int | None = None
    depth: int | None = None
    heads: int | None = None
    patch_size: int = 2
    mlp_ratio: float = 4.0
    frequency_shift: float = 0.0
    mlp_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_range("shape.", least=1, dim=self.dim, depth=self.depth, heads=self.heads, patch_size=self.patch_size)
        check_range("shape.", above=0, mlp_ratio=self.mlp_ratio)
        check_range("shape.", least=0, mlp_norm_eps=self.mlp_norm_eps, frequency_shift=self.frequency_shift)


class ClassToImage(NamesClasses, GenerativeModule):
    """Class-conditional image generator: a DiT that is trained on labeled images or latents, and draws images of given classes.

    Args:
        attention: options of the attention layers.
        num_classes: number of classes; null on the command line to use the number of classes in the data.
        sample_size: side of the square samples, or their height and width, in pixels for images or in latent pixels for
            latents.
        channels: number of channels of the samples: 4 for latents of Stable Diffusion's VAE.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length. With [mhla, mhla, softmax], every third layer has softmax attention. null uses attention.kind in all layers.
        size: S, B, L or XL, as in DiT; null to use dim, depth and heads of shape.
        shape: shape of the transformer.
        dig: options of a DiG; null for a DiT. For a DiG, size selects one of DiG's sizes, and shape.mlp_ratio must be left out.
        process: training objective (ddpm or flow) with the distribution of the timesteps and the dropout of labels.
        sampling: default sampler options of the predict command and of callbacks.
        vae: folder or Hugging Face Hub name of a diffusers AutoencoderKL, if the model works on latents; null if it works on
            pixels.
        pretrained: source of the initial weights: a run folder (its latest checkpoint), a checkpoint, an exported folder, a
            file or folder with published DiT weights, or a Hugging Face Hub name. It is ignored if --ckpt_path supplies the
            weights.
        output: output format of the predict command: png (one file per sample) or npz (one file, which ADM's evaluator reads).
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if an option is invalid, options contradict each other, or the training objective does not support the
            sampler options.
    """

    network: DiT
    usage: ClassVar[dict[str, str]] = {
        "Draw images of the first class": "lightning predict {run} --data.samples.classes=[0]"
    }
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
            dig=dig,
            out_channels=channels * (2 if process.learns_sigma else 1),
            checkpointing=self.training_options.checkpointing,
            **asdict(as_dataclass(DiTShape, shape, "shape")),
        )
        self._pretrained = pretrained
        self.codec = None if vae is None else LatentCodec(vae)

    @override
    def layers(self) -> list[nn.Module]:
        return list(self.network.backbone.blocks)

    @override
    def start_from(self, pretrained: str) -> None:
        load_pretrained(self.network, pretrained)

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [SampleWriter(self.output)]

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Predict noise or velocity from noisy samples.

        Args:
            x: noisy samples ``[B, channels, height, width]``.
            times: timesteps ``[B]`` from 0 to 1000.
            labels: class labels ``[B]``, integers from 0 to K - 1 for K classes; K marks a sample without a class.

        Returns:
            Prediction ``[B, out_channels, height, width]``, where ``out_channels`` is twice ``channels`` if the variance is
            learned, and ``channels`` otherwise.
        """
        return self.network(x, times, labels)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute and log the mean loss of one batch, at random timesteps and with a random share of the labels dropped.

        Args:
            batch: batch with latents ``latent`` or images ``image``, ``[B, C, H, W]``, and ``label`` ``[B]`` int64.
            batch_idx: index of the batch; not used.

        Returns:
            Scalar loss.
        """
        clean = self._clean(batch)
        times = self.process.draw_times(len(clean), None, clean.device)
        labels = self.process.drop_labels(batch["label"], self.network.num_classes)
        loss = self.process.losses(self.network, clean, torch.randn_like(clean), times, labels).mean()
        return self.log_loss(loss, len(clean))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Draw the samples that a batch requests.

        Args:
            batch: batch with ``label``, ``index`` and ``seed``, ``[B]`` int64 each, and ``valid`` ``[B]`` bool, which is False
                for entries that only pad the batch.
            batch_idx: index of the batch; not used.

        Returns:
            A dict for the n entries that do not pad the batch: images ``pixels`` ``[n, C, H, W]`` uint8, and ``label`` and
            ``index``, ``[n]`` int64 each.
        """
        pixels = self.draw(batch["label"], batch["index"].tolist(), int(batch["seed"][0]), self.sampling)
        drawn = {"pixels": pixels, "label": batch["label"], "index": batch["index"]}
        return {name: values[batch["valid"]] for name, values in drawn.items()}

    def draw(self, labels: Tensor, indices: list[int], seed: int, sampling: DiTSamplingConfig) -> Tensor:
        """Draw samples, each of which depends only on the weights, the sampler options, its label, the seed and its index.

        Args:
            labels: class labels ``[B]`` int64 on the device of the module.
            indices: index of each sample, which determines its noise.
            seed: random seed, the same for all samples.
            sampling: sampler options.

        Returns:
            Images ``[B, C, H, W]`` uint8.

        Raises:
            ValueError: if a label is out of range, or the training objective does not support the sampler options.
        """
        samples = draw_samples(self.network, self.process, sampling, labels, indices, seed)
        images = samples if self.codec is None else self.codec.decode(samples)
        self.check_samples(images)
        return to_pixels(images)

    @property
    def num_conditions(self) -> int:
        """Number of different conditions for which samples can be drawn, which is the number of classes."""
        return self.network.num_classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of drawn images.

        If a VAE decodes the images, the value is always (3, 64, 64), a placeholder for the actual size.
        """
        return (self.network.channels, *self.network.sides) if self.codec is None else (3, 64, 64)

    def draw_numbered(self, indices: list[int], seed: int, sampling: DiTSamplingConfig | None) -> Tensor:
        """Draw the samples with the given indices. The class of sample i is i modulo the number of classes.

        Args:
            indices: index of each sample.
            seed: random seed, the same for all samples.
            sampling: sampler options; None to use the module's own options.

        Returns:
            Images ``[B, C, H, W]`` uint8.
        """
        labels = torch.tensor(indices, device=self.device) % self.num_conditions
        return self.draw(labels, indices, seed, sampling or self.sampling)

    def describe_sampling(self, sampling: DiTSamplingConfig | None) -> dict[str, Any]:
        """Return the sampler options to record with metrics of drawn images.

        Args:
            sampling: sampler options; None to use the module's own options.

        Returns:
            A dict with ``sampler`` (name), ``sampling_steps`` (number of steps) and ``guidance`` (scale).
        """
        used = sampling or self.sampling
        sampler = used.sampler or self.process.samplers[0]
        return {"sampler": sampler, "sampling_steps": used.steps, "guidance": used.guidance}

    @override
    def encoding_models(self) -> dict[str, str]:
        return {} if self.codec is None else {"model.vae": self.codec.path}

    def check_drawable(self, sampling: DiTSamplingConfig | None = None) -> None:
        """Check that samples can be drawn and converted to images, before time is spent on training or sampling.

        Args:
            sampling: sampler options; None to use the module's own options.

        Raises:
            ValueError: if the model generates latents but has no VAE, or its training objective does not support the sampler
                options.
            FileNotFoundError: if the VAE does not exist.
        """
        check_sampling(self.process, sampling or self.sampling)
        if self.codec is None and self.network.channels not in (1, 3):
            raise ValueError(
                f"samples of {self.network.channels} channels are latents; name the VAE that decodes them: "
                "--model.vae=FOLDER_OR_NAME"
            )
        if self.codec is not None:
            self.codec.check_channels(self.network.channels)

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
        """Return the clean samples ``[B, C, H, W]`` of a batch, to which noise is added in training.

        The samples are the latents in the batch, if there are any. Otherwise they are the images in the batch, which the VAE
        encodes if the model has one.

        Args:
            batch: batch with latents ``latent`` or images ``image``, ``[B, C, H, W]``, and ``label`` ``[B]`` int64.
            generators: a random generator for each sample, which draws its latent from the distribution that the VAE predicts;
                None for the global generator.

        Raises:
            ValueError: if the samples do not have the shape that the model expects, or a label is not one of its classes.
        """
        clean = batch["latent"] if "latent" in batch else batch["image"]
        expected = (self.network.channels, *self.network.sides)
        if "latent" not in batch and self.codec is not None:
            noise = None
            if generators is not None:
                drawn = [torch.randn(expected, generator=generator) for generator in generators]
                noise = torch.stack(drawn).to(clean.device)
            clean = self.codec.encode(clean, noise)
        if clean.shape[1:] != expected:
            what = "latents" if "latent" in batch or self.codec is not None else "images"
            raise ValueError(
                f"{what} of channels and sides {tuple(clean.shape[1:])} for a model of {expected}; set "
                "--model.sample_size and channels, or vae for images that become latents"
            )
        check_labels(batch["label"].tolist(), self.network.num_classes)
        return clean
