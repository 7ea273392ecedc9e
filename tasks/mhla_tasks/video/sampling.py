"""Clips from a transformer, through diffusers' own Wan pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.generative.codecs import ClipCodec
from lightning_mhla.generative.flow import TIMESTEPS
from mhla_tasks.captioned.module import check_patches
from mhla_tasks.video.clips import to_frames

Sampler = Literal["unipc", "euler"]

PIPELINE_SIDE = 16
"""Height and width that the pipeline checks, though it is given latents; one frame passes its check too."""


@dataclass(frozen=True)
class SamplingConfig:
    """How clips are drawn.

    Args:
        sampler: unipc (Wan's own) or euler.
        steps: evaluations of the network for a clip (twice as many with guidance).
        guidance: scale of classifier-free guidance (arXiv 2207.12598); 1 for none.
        frames: number of frames of a clip.
        height: in pixels.
        width: in pixels.
        fps: frames a second of the files.
        crf: x264's constant rate factor, 0 (no loss but of colour resolution) to 51.
        negative_prompt: prompt that guidance leads away from; empty as in training with caption_dropout.
    """

    sampler: Sampler = "unipc"
    steps: int = 50
    guidance: float = 5.0
    frames: int = 81
    height: int = 480
    width: int = 800
    fps: float = 16.0
    crf: float = 15.0
    negative_prompt: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "frames", "height", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name}={getattr(self, name)} must be at least 1")
        if not 1 <= self.steps <= TIMESTEPS:
            raise ValueError(f"sampling.steps={self.steps} must lie between 1 and {TIMESTEPS:,}")
        if self.guidance < 1 or self.fps <= 0:
            raise ValueError(f"sampling.guidance={self.guidance} must be at least 1 (none), fps={self.fps} above 0")
        if not 0 <= self.crf <= 51:
            raise ValueError(f"sampling.crf={self.crf} must lie between 0 and 51")


def make_scheduler(sampler: Sampler, shift: float) -> Any:
    """The diffusers scheduler of a sampler; ``shift`` as in training."""
    if sampler == "euler":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TIMESTEPS, shift=shift)
    return UniPCMultistepScheduler(
        num_train_timesteps=TIMESTEPS, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def latent_shape(network: WanTransformer3DModel, codec: ClipCodec | None, config: SamplingConfig) -> tuple[int, ...]:
    """Channels, frames, rows and columns of what is denoised.

    Raises:
        ValueError: for clips that the VAE or the patches do not divide.
    """
    size = (config.frames, config.height, config.width)
    if codec is not None:
        grid = codec.latent_size(*size)
        codec.check_size(size)
    else:
        grid = size
    check_patches(grid, network.config.patch_size, "clips" if codec is None else "latents")
    return (network.config.in_channels, *grid)


@torch.no_grad()
def draw_clips(
    network: WanTransformer3DModel,
    codec: ClipCodec | None,
    config: SamplingConfig,
    shift: float,
    text: Tensor,
    negative: Tensor,
    indices: Sequence[int],
    seed: int,
) -> Tensor:
    """Clips ``[B, F, C, H, W]`` uint8, each a function of weights, text, seed and its index.

    Args:
        network: in evaluation mode.
        codec: decodes latents; None where the network denoises pixels.
        config: see :class:`SamplingConfig`.
        shift: as the network was trained with.
        text: ``[B, L, D]`` on the network's device.
        negative: ``[L, D]``, what guidance leads away from.
        indices: number of each clip, for its noise.
        seed: seed of all clips.

    Raises:
        ValueError: for clips of a size that cannot be.
    """
    generators = [sample_generator(seed, index) for index in indices]
    shape = (len(indices), *latent_shape(network, codec, config))
    pipeline = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=network,
        scheduler=make_scheduler(config.sampler, shift),
    )
    pipeline.set_progress_bar_config(disable=True)
    latents = pipeline(
        prompt_embeds=text,
        negative_prompt_embeds=negative.expand_as(text),
        latents=randn_tensor(shape, generator=generators, device=text.device, dtype=torch.float32),
        height=PIPELINE_SIDE,
        width=PIPELINE_SIDE,
        num_frames=1,
        num_inference_steps=config.steps,
        guidance_scale=config.guidance,
        output_type="latent",
    ).frames
    return to_frames(latents if codec is None else codec.decode(latents))  # float32, whatever the precision
