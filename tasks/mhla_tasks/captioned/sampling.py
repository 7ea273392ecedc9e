"""Drawing samples from a transformer with diffusers' own pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.generative.flow import TIMESTEPS
from mhla_tasks.captioned.host import Host


class Sampling(Protocol):
    """Sampler options that all hosts have."""

    @property
    def sampler(self) -> str:
        """Key of the host's schedulers."""

    @property
    def steps(self) -> int:
        """Number of network evaluations for a sample; guidance doubles it."""

    @property
    def guidance(self) -> float:
        """Scale of classifier-free guidance (arXiv 2207.12598); 1 for none."""

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width of a sample in pixels, preceded by the number of frames for clips."""


def check_sampling(sampling: Sampling) -> None:
    """Check the options that all hosts have.

    Raises:
        ValueError: naming the option and its value.
    """
    for name, length in zip(("frames", "height", "width")[-len(sampling.size) :], sampling.size, strict=True):
        if length < 1:
            raise ValueError(f"sampling.{name}={length} must be at least 1")
    if not 1 <= sampling.steps <= TIMESTEPS:
        raise ValueError(f"sampling.steps={sampling.steps} must lie between 1 and {TIMESTEPS:,}")
    if sampling.guidance < 1:
        raise ValueError(f"sampling.guidance={sampling.guidance} must be at least 1 (none)")


def latent_shape(network: Any, codec: Any, sampling: Sampling, samples: str) -> tuple[int, ...]:
    """Return channels, rows and columns of the denoised tensor, with frames before the rows for clips.

    Args:
        network: the transformer.
        codec: between samples and latents; None where the network denoises pixels.
        sampling: sampler options.
        samples: what the samples are, for errors.

    Raises:
        ValueError: for a size that the autoencoder or the patches do not divide.
    """
    grid = sampling.size if codec is None else codec.latent_size(*sampling.size)
    check_patches(grid, network.config.patch_size, samples if codec is None else "latents")
    return (network.config.in_channels, *grid)


@torch.no_grad()
def denoise(
    host: Host,
    network: Any,
    shape: Sequence[int],
    sampling: Sampling,
    shift: float,
    captions: dict[str, Tensor],
    indices: Sequence[int],
    seed: int,
) -> Tensor:
    """Draw latents ``[B, *shape]`` float32, or samples in -1 .. 1. Each depends on weights, caption, seed and its index only.

    Args:
        host: class of the transformer.
        network: the transformer, in evaluation mode.
        shape: of one sample, see :func:`latent_shape`.
        sampling: sampler options.
        shift: as the network was trained with.
        captions: encoded captions and negative captions, by the pipeline's names for them.
        indices: number of each sample, for its noise.
        seed: seed of all samples.
    """
    device = captions["prompt_embeds"].device
    generators = [sample_generator(seed, index) for index in indices]
    noise = randn_tensor((len(indices), *shape), generator=generators, device=device, dtype=torch.float32)
    scheduler = host.schedulers[sampling.sampler](shift)
    pipeline = host.pipeline(tokenizer=None, text_encoder=None, vae=None, transformer=network, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    latents: Tensor = pipeline(
        **captions,
        **host.pipeline_options,
        latents=noise,
        num_inference_steps=sampling.steps,
        guidance_scale=sampling.guidance,
        output_type="latent",
        return_dict=False,
    )[0]
    return latents


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
