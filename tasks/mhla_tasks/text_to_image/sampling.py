"""Images from a transformer, through diffusers' own SANA pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, SanaPipeline
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.generative.codecs import ImageCodec
from lightning_mhla.generative.flow import TIMESTEPS
from lightning_mhla.generative.images import to_pixels
from mhla_tasks.captioned.module import check_patches

Sampler = Literal["dpm", "euler"]

PIPELINE_SIDE = 32
"""Height and width that the pipeline checks, though it is given latents."""


@dataclass(frozen=True)
class SamplingConfig:
    """How images are drawn; the defaults are SanaPipeline's own.

    Args:
        sampler: dpm (flow DPM-Solver++, SANA's own) or euler.
        steps: evaluations of the network for an image (twice as many with guidance).
        guidance: scale of classifier-free guidance (arXiv 2207.12598); 1 for none.
        height: in pixels.
        width: in pixels.
        negative_prompt: prompt that guidance leads away from; empty as in training with caption_dropout.
    """

    sampler: Sampler = "dpm"
    steps: int = 20
    guidance: float = 4.5
    height: int = 512
    width: int = 512
    negative_prompt: str = ""

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name}={getattr(self, name)} must be at least 1")
        if not 1 <= self.steps <= TIMESTEPS:
            raise ValueError(f"sampling.steps={self.steps} must lie between 1 and {TIMESTEPS:,}")
        if self.guidance < 1:
            raise ValueError(f"sampling.guidance={self.guidance} must be at least 1 (none)")


def make_scheduler(sampler: Sampler, shift: float) -> Any:
    """The diffusers scheduler of a sampler; ``shift`` as in training."""
    if sampler == "euler":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TIMESTEPS, shift=shift)
    return DPMSolverMultistepScheduler(
        num_train_timesteps=TIMESTEPS, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def token_mask(text: Tensor) -> Tensor:
    """Which tokens of captions ``[B, L, D]`` count, ``[B, L]`` int64: rows of zeros are filling, but for the first."""
    mask = text.ne(0).any(-1)
    mask[:, 0] = True
    return mask.long()


def latent_shape(network: Any, codec: ImageCodec | None, config: SamplingConfig) -> tuple[int, ...]:
    """Channels, rows and columns of what is denoised.

    Raises:
        ValueError: for images that the autoencoder or the patches do not divide.
    """
    size = (config.height, config.width)
    grid = size if codec is None else codec.latent_size(*size)
    check_patches(grid, network.config.patch_size, "images" if codec is None else "latents")
    return (network.config.in_channels, *grid)


@torch.no_grad()
def draw_images(
    network: Any,
    codec: ImageCodec | None,
    config: SamplingConfig,
    shift: float,
    text: Tensor,
    negative: Tensor,
    indices: Sequence[int],
    seed: int,
) -> Tensor:
    """Images ``[B, C, H, W]`` uint8, each a function of weights, text, seed and its index.

    Args:
        network: in evaluation mode.
        codec: decodes latents; None where the network denoises pixels.
        config: see :class:`SamplingConfig`.
        shift: as the network was trained with.
        text: ``[B, L, D]`` on the network's device.
        negative: ``[L, D]``, what guidance leads away from.
        indices: number of each image, for its noise.
        seed: seed of all images.

    Raises:
        ValueError: for images of a size that cannot be.
    """
    generators = [sample_generator(seed, index) for index in indices]
    shape = (len(indices), *latent_shape(network, codec, config))
    pipeline = SanaPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=network,
        scheduler=make_scheduler(config.sampler, shift),
    )
    pipeline.set_progress_bar_config(disable=True)
    negatives = negative.expand_as(text)
    latents = pipeline(
        prompt=None,
        negative_prompt=None,
        prompt_embeds=text,
        prompt_attention_mask=token_mask(text),
        negative_prompt_embeds=negatives,
        negative_prompt_attention_mask=token_mask(negatives),
        latents=randn_tensor(shape, generator=generators, device=text.device, dtype=torch.float32),
        height=PIPELINE_SIDE,
        width=PIPELINE_SIDE,
        num_inference_steps=config.steps,
        guidance_scale=config.guidance,
        output_type="latent",
        use_resolution_binning=False,
    ).images
    return to_pixels(latents if codec is None else codec.decode(latents))
